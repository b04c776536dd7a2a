"""What a step takes by the shapes of its tensors alone: a device without data, in the place of a real one.

Operations run on PyTorch's device "meta": each tensor is told its shape, type and storage, and nothing is computed. A
`Machine` says what it stands for.
"""
