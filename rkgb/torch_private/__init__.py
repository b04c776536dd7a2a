"""What is used of PyTorch that is private: all names of it with an underscore in them, by subject, under plain names.

Nothing else in rkgb and rockmate uses such names; `tests/test_layering.py` sees to it. Each name here tells what it
gives, why none that is public does, and in which releases it differs. `tests/graph/test_torch_private.py` asks PyTorch
for what is relied on: where a new release breaks something, that file shows what, and here is where to mend it.

Functions of C++ that training steps call stand here as they are: a function around them would take time in every step.
What others put something else in the place of, for a while, is looked up when it is asked for. The compiler is not
imported here: it takes seconds. Private attributes of tensors, modules and operations are read where they are needed;
`attributes` lists them.
"""
