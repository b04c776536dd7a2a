"""Layouts of convolutions as an option of a plan: where they apply, which is faster, and how a module is given one."""
