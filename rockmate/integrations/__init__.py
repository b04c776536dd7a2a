"""Planned modules in other libraries' trainers. Each module here needs its library, and says so where it is missing."""
