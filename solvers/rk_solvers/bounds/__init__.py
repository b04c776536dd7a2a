"""What no plan can be better than: lower bounds of times and of peaks."""
