"""Whether a trace is exact: it is run again beside the module, on other data."""
