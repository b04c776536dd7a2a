"""Budgets, what training holds beside a step, allocators, and the measured peak."""
