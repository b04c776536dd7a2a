"""Which plan serves a call: those of one module, by what calls look like, and calls without a plan."""
