"""The plans that need no search."""
