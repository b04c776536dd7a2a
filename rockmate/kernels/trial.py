"""An operation by another kernel beside the one that PyTorch picks: the same but for rounding, and worth it?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from rkgb import DNode
from rkgb.devices.registry import device_of
from rkgb.ir.call import Call, Ref
from rkgb.ir.values import ValueInfo
from rkgb.tree import leaves, map_leaves
from rockmate.kernels.alternative import Alternative
from rockmate.kernels.option import KernelTrial
from rockmate.regions.rounding import distance, is_close
from rockmate.regions.trial import Step, random_like

_TURNS = 3  # of each, at least
_MOST_TURNS = 15
_TRIAL_S = 0.15  # beyond which there are no more turns than there must be
_NOTES = 0.01  # of what is saved for the backward: some kernels of attention note a seed beside, or pad what they note
_CLEAR = (0.85, 1.1)  # of the given one's time, beyond which no more turns are needed to tell


def class_of(op: DNode, other: Alternative, values: Mapping[str, ValueInfo]) -> str:
    """A text that is equal for operations that are tried once for all of them."""

    def described(ref: Ref) -> str:
        info = values[ref.name]
        return f"{info.describe_array()} {info.stride} {op.tracks(ref.name, values)}"

    call = op.call
    args = map_leaves(described, (call.args, call.kwargs), lambda leaf: isinstance(leaf, Ref))
    return f"{call.function} {args} {op.grad_enabled} by {other.kernel} {other.call.function}"


def tried(op: DNode, other: Alternative, values: Mapping[str, ValueInfo]) -> KernelTrial:
    """The operation by the `other` kernel beside its own, on random numbers that lie as its inputs do."""
    infos = {name: values[name] for name in op.inputs}
    inputs = [
        _mask(info, seed) if name == other.mask else _random(info, op.tracks(name, values), seed)
        for seed, (name, info) in enumerate(infos.items())
    ]
    made = op.output_names[0]
    taking = [op.grad_enabled and any(one.requires_grad for one in inputs)]

    def run(call: Call) -> Any:
        return lambda *given: leaves(call.evaluate(dict(zip(infos, given, strict=True))))[:1]

    calls = run(op.call), run(other.call)
    gradients: list[torch.Tensor] = []
    expected, found = (Step(one, inputs, taking, gradients) for one in calls)
    reason = _misfit(values[made], expected, found)
    del expected, found
    if reason:
        return KernelTrial((op.name,), other.kernel, 0.0, 0.0, reason)
    times: tuple[list[float], list[float]] = ([], [])
    device, started = device_of(inputs[0].device), time.perf_counter()
    while not _is_told(times, time.perf_counter() - started):
        for one, spent in zip(calls, times, strict=True):
            device.synchronize()
            begun = time.perf_counter()
            Step(one, inputs, taking, gradients, is_watched=False)
            device.synchronize()
            spent.append(1e3 * (time.perf_counter() - begun))
    return KernelTrial((op.name,), other.kernel, min(times[0]), min(times[1]))


def _is_told(times: tuple[list[float], list[float]], spent_s: float) -> bool:
    """Whether enough turns were taken to tell which is faster."""
    turns = len(times[0])
    if turns < _TURNS:
        return False
    ratio = min(times[1]) / min(times[0])
    return turns >= _MOST_TURNS or spent_s >= _TRIAL_S or not _CLEAR[0] <= ratio <= _CLEAR[1]


def _random(info: ValueInfo, requires_grad: bool, seed: int) -> torch.Tensor:
    """Numbers of a generator of their own, with the strides of a value."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(info.shape, info.stride, strict=True) if size)
    plain = random_like(torch.empty(max(extent, 1), dtype=info.dtype, device=info.device), seed)
    return plain.as_strided(info.shape, info.stride).requires_grad_(requires_grad)


def _mask(info: ValueInfo, seed: int) -> torch.Tensor:
    """A mask of an attention that hides a quarter of all, and, where there are several rows, a whole one of them."""
    made = _random(info, False, seed)
    once = made[tuple(slice(None) if stride else slice(1) for stride in info.stride)]  # of what is expanded
    hidden = torch.rand(once.shape, generator=torch.Generator("cpu").manual_seed(seed)) < 0.25
    rows = next((axis for axis, size in enumerate(once.shape[:-1]) if size > 1), None)
    if rows is not None:
        hidden.select(rows, 0).fill_(True)
    hidden = hidden.to(made.device)
    once.copy_(~hidden if info.dtype is torch.bool else once.masked_fill(hidden, float("-inf")))
    return made


def _misfit(info: ValueInfo, expected: Step, found: Step) -> str:
    """Why the other kernel must not stand for the operation; "" where it may."""
    (theirs,), (ours,) = expected.outputs, found.outputs
    if (ours.shape, ours.dtype, ours.stride()) != (theirs.shape, theirs.dtype, theirs.stride()):
        return "it gives a tensor that lies otherwise"
    if ours.untyped_storage().nbytes() != info.storage_bytes:
        return "its result takes other bytes"
    if found.saved_bytes > (1 + _NOTES) * expected.saved_bytes:
        return "it saves more for the backward"
    pairs = [(theirs, ours), *zip(expected.gradients, found.gradients, strict=True)]
    for one, other in pairs:
        if (one is None) != (other is None):
            return "it has other gradients"
        if one is not None and other is not None and not is_close(one, other):
            return f"its numbers are others: {distance(one, other):.1e} away"
    return ""
