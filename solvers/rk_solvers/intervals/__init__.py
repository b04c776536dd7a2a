"""Retention intervals by constraint programming (CP-SAT): to be named by users, not used by default."""
