"""Layouts of convolutions: what there is to choose, how a module is given one, and which parts have one each."""
