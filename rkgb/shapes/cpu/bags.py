"""Bags of embeddings on the CPU: which notes for the backward they keep, and what the backward sorts by.

Fitted to what was measured. Without data, PyTorch tells the notes of accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INDEX_BYTES = 8
_SUM, _MAX = 0, 2  # among the modes
_QUICK = (torch.float32, torch.float16, torch.bfloat16)
_DEFAULTS = (False, _SUM, False, None, False, -1)


def embedding_bag_made(weight: Tensor, indices: Tensor, offsets: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """What bags make: their sums [bags, width], the bag of each index, the size of each bag, and where maxima are.

    `args` are those of PyTorch's operation: whether gradients are scaled by frequency, the mode, whether gradients are
    sparse, weights of indices, whether the last offset is an end, and the index of padding. A quick sum notes no bags.
    """
    options: list[Any] = [*args, *_DEFAULTS[len(args) :]]
    _, mode, _, _, has_end, padding = options
    bags, width = offsets.shape[0] - has_end, weight.shape[1]
    is_quick = mode == _SUM and padding < 0 and weight.dtype in _QUICK and weight.stride(1) == 1
    noted = indices.new_empty(0 if is_quick else indices.shape[0] + 1)
    return (
        weight.new_empty(bags, width),
        noted if is_quick else noted[:-1],
        offsets.new_empty(bags),
        offsets.new_empty((bags, width) if mode == _MAX else bags),
    )


def embedding_bag_backward_scratch(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Bags of indices where they were not noted; and indices in order, their places, and what both are sorted in."""
    gradient, indices, _, noted, sizes = args[:5]
    mode = args[8] if len(args) > 8 else _SUM
    if mode == _MAX:  # column by column, of places and a gradient in another order
        return int(sizes.nbytes + gradient.numel() * _INDEX_BYTES + gradient.nbytes)
    count = indices.numel()
    return _INDEX_BYTES * (3 * count + (count + 1 if not noted.numel() else 0))
