"""What a recorder of calls notes while a module runs."""
