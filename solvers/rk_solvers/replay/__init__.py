"""A schedule gone through: by its rules, which tells what is wrong with it, and as prediction, for those who look."""
