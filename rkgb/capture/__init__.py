"""From a module and a sample to its B graph."""
