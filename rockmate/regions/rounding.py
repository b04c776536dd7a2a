"""How far numbers may be apart that other code of the same operations rounds.

Where an operation has a kink, as a ReLU at zero, rounding may put a value on its other side, and the gradient there is
another altogether. Such values are no error, and a norm does not tell them from one. They are few, or, where others are
made of them, no further apart than the operations themselves give other gradients when inputs are moved by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rkgb import Sample

# Norm of the difference over the norm: rounding, in another order of sums.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

_FEW = 1e-4  # of the elements of a large tensor
MOVES = 2  # of the inputs, of which the one that changes most counts
_AS_MOVED = 3.0  # times what that changes: how many values are so near a kink is a matter of chance
_ROUNDINGS = 64  # by which inputs are moved at most: sums of many numbers, as those of a mean, may be off by as much
_MOST_MOVED = 5e-3  # of a number, however coarse its type is


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `other` is `one` but for rounding, by the norm of the difference."""
    return distance(one, other) <= CLOSE.get(one.dtype, 1e-3)


def distance(one: torch.Tensor, other: torch.Tensor, without: int = 0) -> float:
    """Norm of the difference over that of `one`, `without` so many elements that are furthest apart.

    Of what is not floating, the share that differs.
    """
    if not one.dtype.is_floating_point:
        return float((one != other).double().mean())
    mine, theirs = one.detach().double(), other.detach().double()
    away = torch.where((mine == theirs) | (mine.isnan() & theirs.isnan()), 0.0, mine - theirs).flatten()
    away[away.abs().topk(without).indices] = 0.0
    size = torch.where(mine.isfinite(), mine, 0.0).norm()
    return float(away.norm() / size) if size > 0 else float(away.norm())


def is_close_but_for_few(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it is close without the few elements that are furthest apart; those of small tensors all count."""
    return distance(one, other, without=int(_FEW * one.numel())) <= CLOSE.get(one.dtype, 1e-3)


def is_as_moved(one: torch.Tensor, other: torch.Tensor, moves: Iterable[torch.Tensor]) -> bool:
    """Whether `other` is no further from `one` than rounding explains, given what moved inputs make of `one`."""
    return is_explained(distance(one, other), max(distance(one, new) for new in moves))


def is_explained(apart: float, moved_apart: float) -> bool:
    """Whether gradients that are so far `apart` are so by rounding, where moved inputs change them by `moved_apart`."""
    return apart <= _AS_MOVED * moved_apart


def moved(sample: Sample, seed: int) -> Sample:
    """A copy with each number off by a few of its roundings. It draws nothing from the user's generators."""
    copy, generator = sample.copy(), torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(one): one for one in copy.tensors}.values():
            if not tensor.dtype.is_floating_point or tensor.layout is not torch.strided:
                continue
            once = tensor[
                tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
            ]  # of what is expanded
            numbers = torch.rand(once.shape, generator=generator, dtype=torch.float64) * 2 - 1
            most = min(_ROUNDINGS * torch.finfo(tensor.dtype).eps, _MOST_MOVED)
            once.copy_(once.double() * (1 + most * numbers.to(tensor.device)))
    return copy
