"""Plans for calls that differ in sizes alone: one graph, one code, and every figure a function of the sizes."""
