"""From one graph to the next, or to the same one changed: one pass, one file."""
