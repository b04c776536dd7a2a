"""The default: the best of the others within a time limit; several budgets; the least budget."""
