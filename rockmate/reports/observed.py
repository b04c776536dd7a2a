"""Real steps of a planned module, observed for a report: what they take in bytes, and in time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from rkgb import Sample
from rkgb.devices.out_of_memory import if_it_fits, out_of_memory_told
from rkgb.devices.registry import device_of
from rkgb.state.module_state import for_planning, module_state_kept
from rockmate.guards.checkpointing import OwnCheckpointing
from rockmate.memory.peak import MemoryUse, PeakMemory
from rockmate.planning.costs import LossFunction
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.real_step import StepFunction, run_step, warm_step
from rockmate.reports.comparison import scaled_to
from rockmate.reports.measured import MeasuredStep, MeasuredSteps

Borrow = Callable[[], AbstractContextManager[None]]

TIMED_ROUNDS = 4  # of which the fastest counts


def observe(
    model: torch.nn.Module,
    planned: StepFunction,
    sample: Sample,
    loss: LossFunction | None,
    device: torch.device,
    borrow: Borrow | None = None,
) -> MeasuredSteps:
    """Run the step by `planned`, and by `model` itself, several times each: first observed, then timed.

    The module's parameters, buffers, gradients, modes and random streams are given back as they were, by `borrow`
    around each step if it is given. Without a loss, gradients of ones are handed to what the model returns. Raises what
    the allocator raises where a planned step does not fit the device; where the eager one does not, it is left out.
    """
    borrow = borrow or partial(module_state_kept, model, {device})
    doing = f"when steps of {type(model).__name__} were observed for a report"
    with (
        out_of_memory_told(doing, "Free some memory first."),
        for_planning(model),
        OwnCheckpointing(model).switched_off(),
    ):
        plan = _observed(planned, sample, loss, device, borrow)
        eager = if_it_fits(partial(_observed, model, sample, loss, device, borrow))
        steps: list[StepFunction] = [planned] if eager is None else [planned, model]
        # By turns, so that all meet the same disturbances.
        rounds = [[_time_ms(step, sample, loss, device, borrow) for step in steps] for _ in range(TIMED_ROUNDS)]
    found = [
        MeasuredStep(use.peak_bytes, time_ms, scaled_to(use.timeline, time_ms))
        for use, time_ms in zip((plan, eager), map(min, zip(*rounds, strict=True)), strict=False)
        if use is not None
    ]
    return MeasuredSteps(found[0], found[1] if eager is not None else None)


def measured_operations(
    model: torch.nn.Module, sample: Sample, loss: LossFunction | None, opaque: tuple[str, ...] = ()
) -> tuple[tuple[str, float], ...]:
    """Time in ms of each operation of forward and backward by name, measured anew as planning does, in as long a time.

    The submodules at the paths `opaque` are one operation each. Raises as planning does.
    """
    problem = measure(model, sample, PlanRequest(None, loss, opaque=opaque)).problem
    forward = [(op.name, op.time_ms) for op in problem.forward]
    return (*forward, *((op.name, op.time_ms) for op in problem.backward))


def _observed(
    step: StepFunction, sample: Sample, loss: LossFunction | None, device: torch.device, borrow: Borrow
) -> MemoryUse:
    warm_step(step, sample, loss, device, borrow)
    fresh = sample.copy()  # gradients of inputs are not the user's to find
    with borrow(), PeakMemory(device) as memory:
        run_step(step, fresh, loss)
    return MemoryUse(memory.peak_bytes, memory.net_bytes, memory.reserved_bytes, memory.timeline)


def _time_ms(
    step: StepFunction,
    sample: Sample,
    loss: LossFunction | None,
    device: torch.device,
    borrow: Borrow,
) -> float:
    with borrow():
        fresh = sample.copy()
        return device_of(device).time_ms(lambda: run_step(step, fresh, loss))
