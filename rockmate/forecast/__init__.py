"""What training will take, told by shapes alone: nothing runs, and no memory is allocated."""
