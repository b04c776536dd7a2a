"""Check a planned module against eager training: the claim of this project, on the user's own model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample, make_sample
from rkgb.replay import StepRecord, backward_from, largest_difference
from rkgb.state import module_devices, random_states
from rkgb.tree import leaves
from rockmate.budget import Budget
from rockmate.costs import LossFunction
from rockmate.module import Rockmate
from rockmate.plan import Plan
from rockmate.units import format_bytes

_SEED = 0


@dataclass(frozen=True, slots=True)
class Verification:
    """What a few training steps under a plan gave, compared bit by bit with eager training."""

    exact: bool
    first_difference: str | None  # the step, the tensor and by how much; None where exact
    largest_gradient_difference: float  # over all steps and gradients; inf where one is there on one side only
    eager_is_deterministic: bool  # eager training, repeated, gives the same bits
    plan: Plan

    def __str__(self) -> str:
        budget = format_bytes(self.plan.budget_bytes)
        if self.exact:
            return f"exact under {budget}: outputs, gradients, buffers, random stream and parameters are eager's"
        repeated = "repeats itself exactly" if self.eager_is_deterministic else "differs from itself, too"
        return (
            f"not exact under {budget}: {self.first_difference} (gradients off by at most "
            f"{self.largest_gradient_difference:.3g}; eager training {repeated})"
        )


def verify(
    model: torch.nn.Module,
    sample: Any,
    budget: Budget = 0.6,
    *,
    loss: LossFunction | None = None,
    steps: int = 3,
    learning_rate: float = 1e-2,
) -> Verification:
    """Train copies of `model` for `steps` steps of SGD, eagerly and under a plan, and compare everything.

    Compared bit by bit: after each step outputs, gradients, buffers and random streams, at the end the
    parameters. `model` may be a `Rockmate`: then its own plan is followed, and `budget` is not used. The
    model, the sample and the random streams are left as they were. Planning raises as `Rockmate` does.

    Raises:
        ValueError: `steps` is less than 1.
    """
    if steps < 1:
        raise ValueError(f"verify needs at least 1 step to compare, not {steps}")
    arguments = make_sample(model.original if isinstance(model, Rockmate) else model, sample)
    with _streams_restored(model, arguments):
        planned = copy.deepcopy(model)
        if not isinstance(planned, Rockmate):
            planned = Rockmate(planned, _copied(arguments), budget, loss=loss)
        eager, again = copy.deepcopy(planned.original), copy.deepcopy(planned.original)
        expected, repeated, found = (
            _train(module, arguments, loss, steps, learning_rate) for module in (eager, again, planned)
        )
    difference = _first_difference(expected, found)
    return Verification(
        exact=difference is None,
        first_difference=difference,
        largest_gradient_difference=_largest_gradient_difference(expected, found),
        eager_is_deterministic=_first_difference(expected, repeated) is None,
        plan=planned.plan,
    )


@contextlib.contextmanager
def _streams_restored(model: torch.nn.Module, sample: Sample) -> Iterator[None]:
    states = random_states(module_devices(model, sample.tensors))
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _copied(sample: Sample) -> Sample:
    """The same values in tensors of their own, so that gradients and writes do not reach the user's."""
    return sample.with_tensors([t.detach().clone().requires_grad_(t.requires_grad) for t in sample.tensors])


def _train(
    module: torch.nn.Module, sample: Sample, loss: LossFunction | None, steps: int, learning_rate: float
) -> list[StepRecord]:
    """What each step left behind; the parameters are in the last record."""
    if not module.training:
        module.train()
    torch.manual_seed(_SEED)
    records: list[StepRecord] = []
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = None
        records.append(_step(module, _copied(sample), loss))
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(learning_rate * parameter.grad)
    for name, parameter in module.named_parameters():
        records[-1].tensors[f"parameter {name}"] = parameter.detach()
    return records


def _step(module: torch.nn.Module, sample: Sample, loss: LossFunction | None) -> StepRecord:
    torch.clear_autocast_cache()  # of the weights before the last optimizer step
    with torch.enable_grad():
        output = sample.call(module)
        outputs = leaves(output)
        record = StepRecord({})
        for index, tensor in enumerate(outputs):
            record.add(f"output {index}", tensor.detach().clone())
        if loss is None:
            backward_from(outputs)
        else:
            loss(output).backward()
    for name, parameter in module.named_parameters():
        record.add(f"gradient of {name}", parameter.grad)
    for index, tensor in enumerate(sample.tensors):
        if tensor.requires_grad:
            record.add(f"gradient of input {index}", tensor.grad)
    for name, buffer in module.named_buffers():
        record.add(f"buffer {name}", buffer.detach().clone())
    devices = module_devices(module, sample.tensors)
    for index, (_, state) in enumerate(random_states(devices)):
        record.add(f"random stream {index}", state)
    return record


def _first_difference(expected: list[StepRecord], found: list[StepRecord]) -> str | None:
    for number, (one, other) in enumerate(zip(expected, found, strict=True), start=1):
        difference = one.first_difference(other)
        if difference is not None:
            return f"step {number}: {difference}"
    return None


def _largest_gradient_difference(expected: list[StepRecord], found: list[StepRecord]) -> float:
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        for name in one.tensors:
            if not name.startswith("gradient of "):
                continue
            gradient, theirs = one.tensor(name), other.tensor(name)
            if gradient is None or theirs is None or gradient.shape != theirs.shape:
                largest = max(largest, 0.0 if gradient is theirs else float("inf"))
            else:
                largest = max(largest, largest_difference(gradient, theirs))
    return largest
