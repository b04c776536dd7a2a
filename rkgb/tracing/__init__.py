"""From a module to a graph of what it ran, and whether that graph is exact."""
