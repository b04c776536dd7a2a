"""Optimal plans of small problems, and of windows of larger ones."""
