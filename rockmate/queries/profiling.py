"""Steps of a planned module measured beside eager ones, and its operations beside what its plan says of them."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rk_solvers import Compute, Problem
from rkgb import DGraph, Sample, make_sample
from rkgb.devices.out_of_memory import if_it_fits
from rkgb.devices.registry import device_of
from rkgb.process.turns import TURNS
from rkgb.state.module_state import main_device, module_devices, module_state_kept, training_mode
from rockmate.errors import ArgumentError
from rockmate.memory.split import put_gradients
from rockmate.module import Rockmate
from rockmate.plan_files.content import PlanFile
from rockmate.planning.costs import LossFunction
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.real_step import peak_of, run_step
from rockmate.progress import ProgressCallback

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One way to run the step: what was measured, beside what was predicted."""

    label: Literal["eager", "plan"]
    predicted_ms: float
    predicted_peak_bytes: int
    peak_bytes: int
    times_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median time of a step."""
        return statistics.median(self.times_ms)

    @property
    def spread(self) -> float:
        """Half the range of the middle half of the times, as a part of the median: 0.02 is 2 %."""
        if len(self.times_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return (high - low) / 2 / self.median_ms


@dataclass(frozen=True, slots=True)
class OperationProfile:
    """One operation: what the plan was made with, and what was measured anew in the same way."""

    name: str
    phase: Phase
    module: str
    source: str
    runs: int  # in a step under the plan
    planned_ms: float  # of one run
    measured_ms: float | None  # None where the model has no such operation any more
    planned_bytes: int  # most that it takes while it runs, what it makes included
    measured_bytes: int | None


@dataclass(frozen=True, slots=True)
class Profile:
    """A plan, measured."""

    plan: StepProfile
    eager: StepProfile | None  # None where the eager step does not fit the memory
    operations: tuple[OperationProfile, ...]  # in the order of the step; none where nobody asked

    @property
    def overhead(self) -> float | None:
        """Measured time relative to eager's: 0.11 is +11 %."""
        return None if self.eager is None else self.plan.median_ms / self.eager.median_ms - 1


def profile(
    planned: Rockmate,
    sample: Any,
    *,
    loss: LossFunction | None = None,
    steps: int = 10,
    operations: bool = False,
    progress: ProgressCallback | None = None,
) -> Profile:
    """Measure steps of `planned` and of its original on `sample`, by turns, so that both meet the same disturbances.

    A step is forward, loss and backward; gradients start as None, or as zeros where the plan adds to them. The peak is
    counted in a step of its own, exactly. With `operations`, the model is measured anew, operation by operation, as
    planning does. Modes, buffers, gradients and random streams are left as they were.

    Raises `ArgumentError` for less than one step, `NotPlanned`, and what the model raises.
    """
    if steps < 1:
        raise ArgumentError(f"profile needs at least 1 step to measure, not {steps}")
    plan = planned.plan
    model = planned.original
    arguments = make_sample(model, sample)
    tell = progress or (lambda stage, done, total: None)
    measured = planned._member.measured
    device = main_device(module_devices(model, arguments.tensors))
    run = _Runs(arguments, loss, device, measured.graphs.D_graph, measured.gradients)
    with TURNS.planning(model), training_mode(planned), module_state_kept(model, {device}, run.graph.generators):
        tell("peaks", 0, 2)
        plan_peak = run.peak_bytes(planned)
        tell("peaks", 1, 2)
        eager_peak = if_it_fits(lambda: run.peak_bytes(model))
        tell("peaks", 2, 2)
        contenders = [planned] if eager_peak is None else [planned, model]
        times: list[list[float]] = [[] for _ in contenders]
        for step in range(-1, steps):  # the first round warms up
            tell("steps", max(step, 0), steps)
            for index in range(len(contenders)) if step % 2 else reversed(range(len(contenders))):
                duration_ms = run.time_ms(contenders[index])
                if step >= 0:
                    times[index].append(duration_ms)
        tell("steps", steps, steps)
    eager = None
    if eager_peak is not None:
        eager = StepProfile("eager", plan.baseline_time_ms, plan.baseline_peak_bytes, eager_peak, tuple(times[1]))
    return Profile(
        plan=StepProfile("plan", plan.time_ms, plan.peak_bytes, plan_peak, tuple(times[0])),
        eager=eager,
        operations=_operations(planned, arguments, loss, tell) if operations else (),
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Steps on one sample."""

    sample: Sample
    loss: LossFunction | None
    device: torch.device
    graph: DGraph
    gradients: frozenset[str]  # that are there before a step, by the names of their parameters in the graph

    def peak_bytes(self, step: torch.nn.Module) -> int:
        """Most bytes above what was there before."""
        self._start_gradients(step)
        return peak_of(step, self.sample, self.loss, self.device).allocated_bytes

    def time_ms(self, step: torch.nn.Module) -> float:
        """From an idle device to an idle one."""
        fresh = self.sample.copy()
        self._start_gradients(step)
        return device_of(self.device).time_ms(lambda: run_step(step, fresh, self.loss))

    def _start_gradients(self, step: torch.nn.Module) -> None:
        for parameter in step.parameters():
            parameter.grad = None
        put_gradients(step, self.graph, self.gradients)


# ---- operations --------------------------------------------------------------------------------------------


def _operations(
    planned: Rockmate, sample: Sample, loss: LossFunction | None, progress: ProgressCallback
) -> tuple[OperationProfile, ...]:
    plan_file = planned.plan_file()
    # What is pinned decides what may be recomputed, and no cost.
    request = PlanRequest(None, loss, progress=progress, opaque=plan_file.asked.opaque)
    return compared(plan_file, measure(planned.original, sample, request).problem)


def compared(plan_file: PlanFile, now: Problem) -> tuple[OperationProfile, ...]:
    """The operations of a plan with the costs that it was made with, beside those of `now`."""
    runs = Counter(op.name for op in plan_file.parsed_schedule.ops if isinstance(op, Compute))
    place = {op.node or op.name: op for op in reversed(plan_file.graph.operations)}
    place |= {op.name: op for op in plan_file.graph.operations}
    call_of = {backward.name: backward.op for backward in plan_file.problem.backward}
    costs_now = _costs(now)
    found = []
    for name, (phase, time_ms, size_bytes) in _costs(plan_file.problem).items():
        op = place.get(call_of.get(name, name))
        _, measured_ms, measured_bytes = costs_now.get(name, (phase, None, None))
        found.append(
            OperationProfile(
                name=name,
                phase=phase,
                module=op.module if op else "",
                source=op.source if op else "",
                runs=runs[name] if phase == "forward" else 1,
                planned_ms=time_ms,
                measured_ms=measured_ms,
                planned_bytes=size_bytes,
                measured_bytes=measured_bytes,
            )
        )
    return tuple(found)


def _costs(problem: Problem) -> dict[str, tuple[Phase, float, int]]:
    """Phase, time and bytes of each operation: the forward's with their outputs, the backward's above what is there."""
    found: dict[str, tuple[Phase, float, int]] = {}
    for forward in problem.forward:
        made_bytes = sum(problem.data[item].size_bytes for item in forward.outputs)
        found[forward.name] = ("forward", forward.time_ms, made_bytes + forward.workspace_bytes)
    for backward in problem.backward:
        found[backward.name] = ("backward", backward.time_ms, backward.peak_bytes - backward.resident_bytes)
    return found
