"""Steps on devices whose kernels add in another order each time: how a trace is compared with its module there.

Two equal steps of such a module differ by rounding. PyTorch has kernels for most of these operations that add in a
fixed order: with those, a trace is held to every bit, as elsewhere. What is left are operations that have none. Where
these play a part, a trace may be as far from its module as the module is from itself, within a small factor.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch

from rkgb.devices.registry import device_of
from rkgb.replay.step_record import StepRecord, largest_difference
from rkgb.torch_private.flags import (
    cudnn_is_deterministic,
    cudnn_tries_out,
    set_cudnn_deterministic,
    set_cudnn_tries_out,
    set_deterministic,
)

_REPETITIONS = 3  # of a step, to see how far apart they are
_FACTOR = 10  # by which the largest difference of a few repetitions may be short of the largest of many
# Of a tensor's largest number, in units of its rounding error: an order of additions changes no more than that …
_MOST_ROUNDINGS = 1 << 10
_MOST_SHARE = 0.05  # … nor, in formats of few digits, more than this share of it


def are_orderly(devices: Iterable[torch.device]) -> bool:
    """Whether what runs in parallel on them adds in a fixed order, so that equal steps give equal bits."""
    return all(device_of(device).is_orderly for device in devices)


@contextlib.contextmanager
def fixed_order() -> Iterator[None]:
    """Context in which PyTorch chooses kernels that add in a fixed order, where it has any. It warns of no others."""
    strict = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    is_fixed, tries_out = cudnn_is_deterministic(), cudnn_tries_out()
    set_deterministic(True, warn_only=not strict or only_warns)
    set_cudnn_deterministic(True)
    set_cudnn_tries_out(False)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        set_cudnn_tries_out(tries_out)
        set_cudnn_deterministic(is_fixed)
        set_deterministic(strict, warn_only=only_warns)


def differ_by_order_alone(expected: Callable[[], StepRecord], found: Callable[[], StepRecord]) -> bool:
    """Whether two kinds of steps are one but for the order in which numbers are added."""
    with fixed_order():
        reference, other = expected(), found()
        if reference.first_difference_at(other) is None:
            return True
        repeated = [expected() for _ in range(_REPETITIONS)]
    if reference.plain != other.plain:
        return False
    return all(_is_within(name, reference, other, repeated) for name in {**reference.tensors, **other.tensors})


def _is_within(name: str, reference: StepRecord, other: StepRecord, repeated: list[StepRecord]) -> bool:
    mine, theirs = reference.tensor(name), other.tensor(name)
    if mine is None or theirs is None:
        return mine is theirs
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if not mine.is_floating_point() or mine.numel() == 0:
        return torch.equal(mine, theirs)
    again = [tensor for tensor in (one.tensor(name) for one in repeated) if tensor is not None]
    apart = max((largest_difference(mine, tensor) for tensor in again if tensor.shape == mine.shape), default=0.0)
    scale = float(mine.double().abs().nan_to_num().max())
    most = scale * min(_MOST_ROUNDINGS * torch.finfo(mine.dtype).eps, _MOST_SHARE)
    allowed = min(_FACTOR * apart, most)
    return bool((mine.isnan() == theirs.isnan()).all()) and largest_difference(mine, theirs) <= allowed
