"""Chains of blocks: dynamic programs over them, and options of their blocks."""
