"""What is taken for granted of values that nobody knows: they are finite, and what is chosen among them is spread.

Models that ask whether their data are finite do so to raise, or to clamp them in the place of that: a step that trains
goes on. Routers choose experts by numbers that come of parameters, and how many rows each gets decides on the shapes:
they are trained to give each as many.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rkgb.tree import leaves

_aten = torch.ops.aten
# How questions reach us that ask whether numbers are finite, and what they say where these are.
_NOT_FINITE = {_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default}
_COMPARED_WITH_NUMBER = {_aten.eq.Scalar: False, _aten.ne.Scalar: True}
_COMPARED = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}
# What tells places along a dimension, and where among the arguments that is.
_CHOICES = {
    _aten.topk.default: ("dim", 2, -1),
    _aten.sort.default: ("dim", 1, -1),
    _aten.sort.stable: ("dim", 1, -1),  # past a keyword
    _aten.argmax.default: ("dim", 1, None),
    _aten.argmin.default: ("dim", 1, None),
    _aten.max.dim: ("dim", 1, None),
    _aten.min.dim: ("dim", 1, None),
}

ASKING = frozenset({*_NOT_FINITE, *_COMPARED_WITH_NUMBER, *_COMPARED, *_CHOICES})
"""The operations of which something is taken for granted; no other need be looked at."""


def where_all_is_finite(function: Any, args: Any) -> bool | None:
    """What the operation says of each number where none is infinite or undefined; None for what asks something else."""
    if function in _NOT_FINITE:
        return False
    if function in _COMPARED_WITH_NUMBER:
        return _COMPARED_WITH_NUMBER[function] if isinstance(args[1], float) and math.isinf(args[1]) else None
    if function in _COMPARED:
        return _COMPARED[function] if args[0] is args[1] else None
    return None


def spread_choice(function: Any, args: Any, kwargs: Any, made: Any) -> torch.Tensor | None:
    """The places that the operation tells last if each is chosen as often; None for what chooses nothing.

    Row after row goes on where the one before has ended, so that ten rows that choose two of four choose each five
    times.
    """
    if function not in _CHOICES:
        return None
    name, place, otherwise = _CHOICES[function]
    dim = args[place] if len(args) > place else kwargs.get(name, otherwise)
    given, told = args[0], leaves(made)[-1]
    if dim is None or given.dim() == 0:  # of all numbers one
        return torch.zeros(told.shape, dtype=torch.int64)
    keeps_dim = told.dim() == given.dim()
    chosen = told.shape[dim] if keeps_dim else 1
    rows = told.numel() // max(1, chosen)
    first = torch.arange(rows).unsqueeze(1) * (chosen if chosen < given.shape[dim] else 0)
    spread = (first + torch.arange(chosen)) % max(1, given.shape[dim])
    if not keeps_dim:
        return spread.reshape(told.shape)
    others = [size for axis, size in enumerate(told.shape) if axis != dim % told.dim()]
    return spread.reshape(*others, chosen).movedim(-1, dim)
