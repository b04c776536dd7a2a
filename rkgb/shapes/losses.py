"""Losses as kernels make them: a number in the memory that was made for all of which it is the mean or the sum.

That memory is as large as the predictions, and lives as long as the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1
# By operation, the place of the reduction among its arguments.
_PLACES = {
    _aten.mse_loss.default: 2,
    _aten.smooth_l1_loss.default: 2,
    _aten.huber_loss.default: 2,
    _aten.soft_margin_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
}
_SUMMED_BYTES = 4


def _reduced(function: Any, *args: Any) -> Tensor:
    made: Tensor = function(*args)
    if not _is_reduced(function, args):
        return made
    room = torch.empty(_broadcast(args), dtype=made.dtype, device=made.device)
    return room.resize_(made.shape)


def _is_reduced(function: Any, args: Sequence[Any]) -> bool:
    place = _PLACES[function]
    return bool((args[place] if len(args) > place else _MEAN) != _NONE)


def _broadcast(args: Sequence[Any]) -> torch.Size:
    return torch.broadcast_shapes(args[0].shape, args[1].shape)


def _apart(function: Any, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """The loss of each element, beside the memory that the result keeps; and of short types the numbers to sum."""
    if not _is_reduced(function, args):
        return 0
    size = args[0].element_size()
    return _broadcast(args).numel() * (size + (_SUMMED_BYTES if size < _SUMMED_BYTES else 0))


def _exponentials(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    return 2 * int(args[1].nbytes)


KEEPING = {function: partial(_reduced, function) for function in _PLACES if function is not _aten.huber_loss.default}
"""By operation: what is called in its place where there are no data."""

SCRATCH: dict[Any, Callable[[Sequence[Any], Sequence[Tensor]], int]] = {
    **{
        function: partial(_apart, function)
        for function in (_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default)
    },
    _aten.soft_margin_loss_backward.default: _exponentials,
}
"""By operation: bytes that its kernel allocates for itself, by its arguments and what it has made."""
