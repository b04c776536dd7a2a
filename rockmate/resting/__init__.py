"""Tensors that live in a second memory, and are here when they are used: weights, and the state of optimizers."""
