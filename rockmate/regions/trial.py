"""A compiled region beside its operations one by one, on the tensors that it is given: equal, and worth it?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rkgb import DGraph, Sample
from rkgb.devices.registry import device_of
from rkgb.ir.call import bind
from rkgb.ir.compiled import CompiledCall
from rockmate.regions.find import Region
from rockmate.regions.function import normalisations
from rockmate.regions.option import RegionTrial
from rockmate.regions.rounding import MOVES, distance, is_as_moved, is_close, is_close_but_for_few, moved

_TURNS = 5  # of each, at least
_MOST_TURNS = 25
_TRIAL_S = 0.3  # beyond which there are no more turns than there must be

Run = Callable[..., Sequence[torch.Tensor]]


def tried(graph: DGraph, region: Region, call: CompiledCall, values: Mapping[str, torch.Tensor]) -> RegionTrial:
    """The compiled `call` of `region` beside its operations, on `values` of its inputs, which are left as they are."""
    names = tuple(op.name for op in region.ops)
    inputs = [_leaf(values[name], graph.values[name].requires_grad) for name in region.inputs]
    taking = [graph.values[name].requires_grad for name in region.outputs]
    written = {name: values[name].detach().clone() for op in normalisations(region) for name in op.written}

    def eager(*given: torch.Tensor) -> list[torch.Tensor]:
        found: dict[str, Any] = {**written, **dict(zip(region.inputs, given, strict=True))}
        for op in region.ops:
            bind(op.outputs, op.call.evaluate(found), found)
        return [found[name] for name in region.outputs]

    def compiled(*given: torch.Tensor) -> list[torch.Tensor]:
        made = call(*given)
        return (list(made) if isinstance(made, (list, tuple)) else [made])[: len(region.outputs)]

    gradients: list[torch.Tensor] = []
    expected, found = (Step(run, inputs, taking, gradients) for run in (eager, compiled))

    def of_moved(seed: int) -> Step:
        return Step(eager, moved(Sample(tuple(inputs), {}), seed).tensors, taking, gradients, is_watched=False)

    reason = _misfit(graph, region, expected, found) or _misfit_of_statistics(call, inputs)
    reason = reason or _other_numbers(expected, found, of_moved)
    eager_bytes, compiled_bytes = expected.saved_bytes, found.saved_bytes
    if reason:
        return RegionTrial(names, 0.0, 0.0, eager_bytes, compiled_bytes, reason)
    del expected, found
    times: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    device = device_of(inputs[0].device)
    while len(times[0]) < _TURNS or (time.perf_counter() - started < _TRIAL_S and len(times[0]) < _MOST_TURNS):
        for run, spent in zip((eager, compiled), times, strict=True):
            device.synchronize()
            begun = time.perf_counter()
            Step(run, inputs, taking, gradients, is_watched=False)
            device.synchronize()
            spent.append(1e3 * (time.perf_counter() - begun))
    return RegionTrial(names, min(times[0]), min(times[1]), eager_bytes, compiled_bytes)


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(requires_grad)


class Step:
    """One forward and backward: what it gave, and what autograd saved for it."""

    def __init__(
        self,
        run: Run,
        inputs: list[torch.Tensor],
        taking: list[bool],
        gradients: list[torch.Tensor],
        is_watched: bool = True,
    ) -> None:
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            detached = tensor.detach()  # an operation that saved its own output would be in a cycle that nobody sees
            saved[tensor.untyped_storage().data_ptr()] = detached
            return detached

        with torch.enable_grad():
            if is_watched:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    outputs = list(run(*inputs))
            else:
                outputs = list(run(*inputs))
        parameters = {one.untyped_storage().data_ptr() for one in inputs if one.dim() <= 1}
        # Inputs may be parts of one storage, such as queries and keys; here each has one of its own.
        parts = {one.untyped_storage().data_ptr(): one.nbytes for one in inputs}
        self.saved_bytes = sum(
            min(one.untyped_storage().nbytes(), parts.get(place, sys.maxsize))
            for place, one in saved.items()
            if place not in parameters
        )
        reached = [one for one, takes in zip(outputs, taking, strict=True) if takes and one.requires_grad]
        if not gradients:
            gradients += [random_like(one, seed) for seed, one in enumerate(reached)]
        wanted = [one for one in inputs if one.requires_grad]
        self.gradients: Sequence[torch.Tensor | None] = ()
        if wanted and reached:
            self.gradients = torch.autograd.grad(reached, wanted, gradients, allow_unused=True)
        self.outputs = [one.detach() for one in outputs]


def random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A gradient: numbers of a generator of their own."""
    generator = torch.Generator("cpu").manual_seed(seed)
    numbers = torch.rand(tensor.shape, generator=generator, dtype=torch.float32) - 0.25
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(numbers)


def _misfit(graph: DGraph, region: Region, expected: Step, found: Step) -> str:
    """Why the compiled region must not stand for the operations; "" where it may."""
    seen: set[int] = set()
    for name, theirs, ours in zip(region.outputs, expected.outputs, found.outputs, strict=True):
        info = graph.values[name]
        if (tuple(ours.shape), ours.dtype, ours.device) != (info.shape, info.dtype, info.device):
            return f"it gives another kind of tensor for {name}"
        if tuple(ours.stride()) != tuple(theirs.stride()):
            return f"{name} lies otherwise in memory"
        storage = ours.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != ours.numel() * ours.element_size():
            return f"{name} shares its memory"
        seen.add(storage.data_ptr())
    if len(expected.gradients) != len(found.gradients):
        return "it has other gradients"
    pairs = zip(expected.gradients, found.gradients, strict=True)
    return "it has other gradients" if any((one is None) != (other is None) for one, other in pairs) else ""


def _misfit_of_statistics(call: CompiledCall, inputs: Sequence[torch.Tensor]) -> str:
    """Why statistics that are computed apart are not what a graph says of them; "" where they are."""
    if not call.parts:
        return ""
    kernels = call.kernels[0]
    made = call.parts[0].at(call.numbers, [inputs[place] for place in kernels.takes])
    for one, told in zip(made, kernels.hands_on, strict=False):
        if (one.dtype, (tuple(one.shape), one.stride())) != (told.dtype, told.layout(call.numbers)):
            return "its statistics lie otherwise in memory"
    if len({one.untyped_storage().data_ptr() for one in made}) < len(made):
        return "its statistics share their memory"
    return ""


def _other_numbers(expected: Step, found: Step, of_moved: Callable[[int], Step]) -> str:
    """Why numbers are others by more than rounding; "" if none are. `of_moved` is a step on inputs moved by that."""
    for value, made in zip(expected.outputs, found.outputs, strict=True):
        if not is_close(value, made):
            return f"its numbers are others: {distance(value, made):.1e} away"
    moves: list[Step] = []
    for place, (one, other) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        if one is None or other is None or is_close_but_for_few(one, other):
            continue
        moves = moves or [of_moved(seed) for seed in range(MOVES)]
        if not is_as_moved(one, other, (new for step in moves if (new := step.gradients[place]) is not None)):
            return f"its numbers are others: {distance(one, other):.1e} away"
    return ""
