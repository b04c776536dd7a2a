"""The graphs, B to K, and what they are made of. Plain data, each graph with its `verify`."""
