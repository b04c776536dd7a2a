"""Models on samples of other batch sizes: the batch dimension found by trial, and costs of batches never measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rk_solvers import Problem
from rkgb import Sample, make_sample
from rkgb.ir.sample import refuse_devices, refuse_without_data
from rkgb.process.turns import TURNS
from rkgb.state.module_state import module_state_kept
from rkgb.tree import leaves, map_leaves
from rockmate.errors import BatchError
from rockmate.planning.costs import LossFunction

MakeBatch = Callable[[int], tuple[Any, ...]]
"""From a batch size to (model, sample) or (model, sample, loss)."""

# Kernels chosen for another batch round otherwise; what is no batch dimension changes values by far more.
_SAME = {"rtol": 1e-2, "atol": 1e-3}


@dataclass(frozen=True, slots=True)
class Batches:
    """Where the batch of a model is."""

    make: MakeBatch
    size: int  # of the sample
    dimension: int
    inputs: tuple[int, ...]  # places, among the sample's tensors, of those that have it
    tried: tuple[str, ...]  # every dimension that was tried, and what came of it


def find_batch(model: torch.nn.Module, sample: Any, loss: LossFunction | None = None) -> Batches:
    """Find the batch dimension: the one along which a sample repeated gives the outputs repeated.

    The model is run in eval mode and without gradients, and left as it was.

    Raises:
        BatchError: no dimension is one, or the loss takes no other batch; the message tells what was tried.
        SampleError, ModelError: as planning does.
    """
    arguments = make_sample(model, sample)
    refuse_devices(model, arguments)
    refuse_without_data(model, arguments)
    tried: list[str] = []
    with _evaluated(model):
        expected = leaves(arguments.call(model))
        again = leaves(arguments.call(model))
        has_data = all(not tensor.is_meta for tensor in expected)
        is_random = not has_data or not all(map(_close, expected, again))
        for dimension, size, inputs in _candidates(arguments.tensors):
            text = f"dimension {dimension} of {_places(inputs)} (size {size})"
            twice = _resized(arguments, dimension, size, inputs, 2 * size)
            try:
                output = twice.call(model)
            except Exception as error:  # noqa: BLE001  whatever the model raises: then it is no such dimension
                tried.append(f"{text}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                continue
            reason = _difference(expected, leaves(output), dimension, is_random)
            repeat = "outputs grow with it; their values are random" if is_random else "outputs repeat with it"
            tried.append(f"{text}: {reason or repeat}")
            if reason is None:
                _check_loss(model, loss, output, size)
                batches = Batches(lambda batch: (), size, dimension, inputs, tuple(tried))
                return replace(batches, make=_maker(model, arguments, loss, batches))
    raise BatchError(
        f"no dimension of the sample of {type(model).__name__} is its batch: along none does the model give its "
        f"outputs twice for a sample that is there twice. Tried: {'; '.join(tried) or 'nothing'}. Give a function of "
        "the batch that returns (model, sample, loss)."
    )


def _maker(model: torch.nn.Module, sample: Sample, loss: LossFunction | None, found: Batches) -> MakeBatch:
    return lambda batch: (model, _resized(sample, found.dimension, found.size, found.inputs, batch), loss)


@contextlib.contextmanager
def _evaluated(model: torch.nn.Module) -> Iterator[None]:
    """Context: `model` in eval mode, without gradients, left as it was."""
    with TURNS.planning(model), torch.no_grad(), module_state_kept(model):
        modes = [(submodule, submodule.training) for submodule in model.modules()]
        try:
            model.eval()
            yield
        finally:
            for submodule, mode in modes:
                submodule.training = mode


def _candidates(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(dimension, size, inputs): first what most inputs share, of the first dimensions."""
    for dimension in range(max((tensor.dim() for tensor in tensors), default=0)):
        groups: dict[int, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.dim() > dimension and tensor.shape[dimension] > 0:
                groups.setdefault(tensor.shape[dimension], []).append(place)
        for size, places in sorted(groups.items(), key=lambda group: -len(group[1])):
            yield dimension, size, tuple(places)


def _places(inputs: Sequence[int]) -> str:
    return f"input {inputs[0]}" if len(inputs) == 1 else f"inputs {', '.join(map(str, inputs))}"


def _resized(sample: Sample, dimension: int, size: int, inputs: Sequence[int], batch: int) -> Sample:
    """The sample with `batch` rows: its own, again and again."""
    tensors = list(sample.tensors)
    for place in inputs:
        tensor = tensors[place]
        rows = torch.arange(batch, device=tensor.device) % size
        resized = tensor.detach().index_select(dimension, rows)
        tensors[place] = resized.requires_grad_(tensor.requires_grad)
    return sample.with_tensors(tensors)


def _difference(expected: Sequence[Any], found: Sequence[Any], dimension: int, is_random: bool) -> str | None:
    """Why `found` is not what repeating gives; None where it is. Of random values, the shapes alone tell."""
    if len(expected) != len(found):
        return f"there are {len(found)} outputs instead of {len(expected)}"
    repeated = 0
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        doubled = [d for d in range(one.dim()) if other.dim() == one.dim() and other.shape[d] == 2 * one.shape[d]]
        if one.shape == other.shape and one.numel() == 1 and (is_random or _close(one, other)):
            continue  # a mean, as of a loss
        if len(doubled) != 1:
            return f"output {index} is {list(other.shape)} after {list(one.shape)}"
        if not is_random and not all(_close(one, half) for half in other.chunk(2, doubled[0])):
            return f"output {index} has other values"
        repeated += 1
    if not repeated and dimension:
        return "no output has such a dimension"
    return None


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        bool(torch.allclose(one.double(), other.double(), equal_nan=True, **_SAME))
        if not one.is_complex()
        else (_close(torch.view_as_real(one), torch.view_as_real(other)))
    )


def _trained(tensor: torch.Tensor) -> torch.Tensor:
    """As a loss has it in training."""
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _check_loss(model: torch.nn.Module, loss: LossFunction | None, output: Any, size: int) -> None:
    if loss is None:
        return
    try:
        with torch.enable_grad():
            loss(map_leaves(lambda tensor: _trained(tensor).clone(), output))  # it may write into what was computed
    except Exception as error:  # whatever the user's code raises
        raise BatchError(
            f"the loss given for {type(model).__name__} takes a batch of {size} only ({type(error).__name__}: {error})."
            " Give a function of the batch that returns (model, sample, loss), or leave the loss out."
        ) from error


# ---- costs of other batches --------------------------------------------------------------------------------


def interpolated(batch: int, first: tuple[int, Problem], second: tuple[int, Problem]) -> Problem | None:
    """The step for `batch` by those measured for two others: bytes and times are near affine in the batch.

    None where the two are not one step in two sizes.
    """
    (one_batch, one), (other_batch, other) = first, second
    if one_batch == other_batch or _shape(one) != _shape(other):
        return None
    share = (batch - one_batch) / (other_batch - one_batch)

    def size(low: int, high: int) -> int:
        return max(0, round(low + share * (high - low)))

    def time(low: float, high: float) -> float:
        return max(0.0, low + share * (high - low))

    data = tuple(
        replace(a, size_bytes=size(a.size_bytes, b.size_bytes)) for a, b in zip(one.data, other.data, strict=True)
    )
    forward = tuple(
        replace(
            a,
            time_ms=time(a.time_ms, b.time_ms),
            workspace_bytes=size(a.workspace_bytes, b.workspace_bytes),
            replay_bytes=size(a.replay_bytes, b.replay_bytes),
            repeat_ms=None if a.repeat_ms is b.repeat_ms is None else time(a.recompute_ms, b.recompute_ms),
        )
        for a, b in zip(one.forward, other.forward, strict=True)
    )
    backward = []
    for a, b in zip(one.backward, other.backward, strict=True):
        resident_bytes = size(a.resident_bytes, b.resident_bytes)
        peak_bytes = max(resident_bytes, size(a.peak_bytes, b.peak_bytes))
        backward.append(
            replace(a, time_ms=time(a.time_ms, b.time_ms), resident_bytes=resident_bytes, peak_bytes=peak_bytes)
        )
    return Problem(data, forward, tuple(backward), one.held, size(one.base_bytes, other.base_bytes))


def _shape(problem: Problem) -> tuple[Any, ...]:
    """All but the numbers."""

    return (
        *((data.name, data.producer, data.kind) for data in problem.data),
        *((op.name, op.inputs, op.outputs, op.recomputable) for op in problem.forward),
        *((op.name, op.needs) for op in problem.backward),
        problem.held,
    )
