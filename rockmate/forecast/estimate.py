"""Will it fit? What training takes on a device that need not be there, told by shapes alone."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from rk_solvers import Limits, SecondMemory, Solution, solver_named
from rk_solvers.bounds.peak_bound import least_peak_bytes
from rk_solvers.limits import USUAL_LIMITS
from rk_solvers.liveness import peak_and_time
from rk_solvers.local.min_peak_search import min_peak_plan
from rkgb import Sample, make_sample
from rkgb.errors import RockmateError
from rkgb.process.garbage import own_garbage_collected
from rkgb.shapes.dataless import Dataless
from rkgb.shapes.device import Shapes, standing_for
from rkgb.shapes.machine import CONTEXT_BYTES, NAMES, Machine, accelerator_of, named_machine, with_speed
from rockmate.errors import ArgumentError, BatchError
from rockmate.forecast.answer import BatchEstimate, Estimate, PlannedStep
from rockmate.forecast.batches import SizedStep, largest_eager_batch, largest_planned_batch
from rockmate.forecast.eager_step import EagerStep, observe_eager_step
from rockmate.forecast.moves import second_memory_of, smallest_with_moves
from rockmate.memory.budget import AboveResidents, Budget, read_budget, resolve_budget
from rockmate.memory.optimizer_state import OptimizerLike, with_parameters
from rockmate.offload.option import Offload, as_offload
from rockmate.options import PlanOptions
from rockmate.planning.costs import LossFunction
from rockmate.planning.graph_solver import moving_solver
from rockmate.planning.measured import measure
from rockmate.queries.batches import MakeBatch, find_batch
from rockmate.queries.verification import OPTIMIZERS
from rockmate.units import format_bytes, parse_bytes

SEARCH_S = 2.0  # for one plan; there are two, and those of the largest batch


def estimate(
    model: torch.nn.Module | MakeBatch,
    sample: Any = None,
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerLike | str | None = None,
    device: str = "cpu",
    memory: int | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    link: float | None = None,
    batches: bool = True,
    budget: Budget = None,
    offload: Offload | str | None = None,
    time_limit: float = SEARCH_S,
) -> Estimate:
    """What training `model` takes on `device`, without running it there or anywhere: no kernel runs, and nothing of the
    size of the model is allocated. The model and the sample may be on the device "meta"; they are left as they are.

    Args:
        model: a module; or a function of the batch size that returns (model, sample) or (model, sample, loss).
        sample: of a module, as for `Rockmate`; of a function, the batch size.
        loss: a function of the output, as for `Rockmate`; without one, what a cross-entropy takes is assumed.
        optimizer: one of the model's parameters, what makes one, or a name such as "adamw". Without one, its state is
            left out.
        device: "cpu", an accelerator's name such as "H100", or the memory of one, such as "24GiB".
        memory: bytes or a size: what there is, in the place of what the device has.
        dtype: train in this type of floating point, in the place of the model's own.
        autocast: forward and loss run under `torch.autocast` to this type, with weights as they are. Regions that
            forward opens itself count without it.
        flops, bandwidth: operations and bytes a second, in the place of those known of the device.
        link: bytes a second to the memory of the host, or of the CPU to a file, in the place of what is known.
        batches: whether to tell how large a batch fits, where the memory is known.
        budget: of the step, as for `Rockmate`: bytes, a size, or a part of the eager step's peak. What a plan for it
            costs is told in the place of one for the device's memory.
        offload: whether plans may also move data over that link, as for `Rockmate`: "auto", "host", "disk", or a
            record. The largest batch is that of plans that move nothing.
        time_limit: seconds for the search of one plan.

    Raises:
        ArgumentError: the device is not known, an optimizer of that name, or how fast the link is.
        OffloadError: data of such a device cannot be moved there.
        OptimizerError, LossError, SampleError: as planning does.
        RuntimeError, …: what the module raises, also where its forward reads numbers out of its data.
    """
    started = time.perf_counter()
    machine = with_speed(_machine(device, memory), flops, bandwidth, link)
    optimizer = _optimizer(optimizer)
    make, rows = None, 0
    if not isinstance(model, torch.nn.Module):
        make, rows = model, _DEFAULT_ROWS if sample is None else int(sample)
        model, sample, *others = make(rows)
        loss = others[0] if others else loss
    assert isinstance(model, torch.nn.Module)
    moving = as_offload(offload)
    second = None if moving is None else second_memory_of(machine, moving)
    study = _Study(machine, Dataless(machine, dtype, autocast), optimizer, time_limit, read_budget(budget), second)
    arguments = make_sample(model, sample)
    with (
        own_garbage_collected(),
        standing_for(machine, study.dataless.values) as shapes,
        study.dataless.module(model),
    ):
        step = study.step(model, study.dataless.sample(arguments), loss, shapes, rows)
        found = study.told(type(model).__name__, step, shapes)
        if batches and found.usable_bytes is not None:
            at = study.by_batch(make, step, shapes) if make else study.of_module(model, arguments, loss, step, shapes)
            if at is not None:
                found = replace(found, batch=study.batches(at, found.usable_bytes))
    return replace(found, offload=None if moving is None else moving.where, took_s=time.perf_counter() - started)


_DEFAULT_ROWS = 4  # of a function of the batch, where nobody says


def _machine(device: str, memory: int | str | None) -> Machine:
    machine = named_machine(device)
    if machine is None:
        try:
            machine = accelerator_of(parse_bytes(device))
        except ValueError:
            raise ArgumentError(
                f'there is no device {device!r}: give "cpu", the memory of an accelerator such as "24GiB", or one of '
                f"{', '.join(NAMES)}"
            ) from None
    if memory is not None:
        try:
            size_bytes = parse_bytes(memory) if isinstance(memory, str) else int(memory)
        except ValueError as error:
            raise ArgumentError(str(error)) from None
        machine = replace(machine, memory_bytes=size_bytes)
    if machine.usable_bytes is not None and machine.usable_bytes <= 0:
        raise ArgumentError(
            f"of {format_bytes(machine.memory_bytes or 0)} nothing is left for tensors: a process with an accelerator "
            f"holds about {format_bytes(CONTEXT_BYTES)} beside them. Give the memory of the whole device"
        )
    return machine


def _optimizer(optimizer: OptimizerLike | str | None) -> OptimizerLike | None:
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ArgumentError(f"there is no optimizer {optimizer!r}; there are {', '.join(OPTIMIZERS)}")
    return partial(OPTIMIZERS[optimizer], lr=1e-3)  # what it takes does not depend on the rate


@dataclass(frozen=True, slots=True)
class _Study:
    """One estimate. Models and samples have no data here."""

    machine: Machine
    dataless: Dataless
    optimizer: OptimizerLike | None
    search_s: float
    budget: int | float | AboveResidents | None = None  # that was asked about
    second: SecondMemory | None = None  # where data may be moved

    # ---- one step --------------------------------------------------------------------------------------------

    def step(
        self, model: torch.nn.Module, sample: Sample, loss: LossFunction | None, shapes: Shapes, batch: int
    ) -> SizedStep:
        """Without a plan, and for the solvers."""
        own_loss = None if loss is None else self.dataless.function(loss)
        optimizer: Any = self.optimizer
        if isinstance(optimizer, Optimizer):  # of the user's parameters: one like it, of those without data
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer = with_parameters(optimizer, {id(one): self.dataless.twin(one) for one in held})  # type: ignore[misc]
        eager = observe_eager_step(model, sample, own_loss, optimizer, shapes)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of values that a trace reads: it has none
                request = PlanOptions(loss=own_loss, cache=False).request(sys.maxsize)
                measured = measure(model, sample, request)
        except (RockmateError, RuntimeError, NotImplementedError) as error:
            return SizedStep(batch, eager, why=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return SizedStep(batch, eager, measured.problem, measured.chain)

    def told(self, name: str, step: SizedStep, shapes: Shapes) -> Estimate:
        """All that is told of one batch."""
        eager = step.eager
        allocator = shapes.emulated()
        reserved_bytes = None if allocator is None else allocator.run(eager.training_events()).most_reserved_bytes
        unknown = _unknown(self.machine, eager, self.second is not None)
        if self.dataless.values.goes_by_choices:
            unknown += (_CHOICES,)
        found = Estimate(name, self.machine, eager, reserved_bytes, None, None, None, None, step.why, unknown)
        if step.problem is None:
            return found
        smallest, proven_bytes = self._smallest(step)
        found = replace(
            found,
            smallest=smallest,
            proven_bytes=max(eager.held_bytes + proven_bytes, eager.after_backward_bytes),
        )
        budget_bytes = self._budget_bytes(found)
        if self.budget is not None:
            found = replace(found, asked_bytes=budget_bytes)
        if budget_bytes is None or smallest.budget_bytes > budget_bytes:
            return found
        if self.second is None:
            solver = solver_named("auto", Limits().without_proofs(self.search_s), step.chain)
        else:
            solver = moving_solver(step.chain, self.second, self.search_s)
        solution = solver.solve(step.problem, budget_bytes)
        return replace(found, planned=_planned(step, budget_bytes, solution))

    def _smallest(self, step: SizedStep) -> tuple[PlannedStep, int]:
        """The plan of least peak that is found, and what no plan's step is below."""
        problem, chain = step.problem, step.chain
        assert problem is not None
        lowest = min_peak_plan(problem, [], chain, time.monotonic() + self.search_s / 2)
        peak_bytes, time_ms = peak_and_time(problem, lowest)
        proof_s = min(self.search_s / 2, USUAL_LIMITS.proof_s)
        may_move = self.second is not None
        proven_bytes = least_peak_bytes(problem, peak_bytes, may_move=may_move, time_limit_s=proof_s)
        if self.second is not None:
            moving = smallest_with_moves(problem, chain, self.second, self.search_s)
            if moving.peak_bytes < peak_bytes:
                return _planned(step, moving.peak_bytes, moving), proven_bytes
        return _planned_step(step, peak_bytes, peak_bytes, time_ms), proven_bytes

    def _budget_bytes(self, found: Estimate) -> int | None:
        """Of the step that is to be planned: what was asked about, or what the device has for it; None where it has
        enough without a plan, or not even enough for what is there after the backward."""
        eager = found.eager
        if self.budget is not None:
            return resolve_budget(self.budget, eager.step_peak_bytes, torch.device("cpu"))
        if found.fits is not False or found.usable_bytes is None or eager.after_backward_bytes > found.usable_bytes:
            return None
        return found.usable_bytes - eager.held_bytes

    # ---- other batches ---------------------------------------------------------------------------------------

    def by_batch(self, make: MakeBatch, known: SizedStep, shapes: Shapes) -> _Sized:
        """Steps of what a function makes."""

        def at(batch: int) -> SizedStep:
            if batch == known.batch:
                return known
            model, sample, *others = make(batch)
            with self.dataless.module(model):
                given = self.dataless.sample(make_sample(model, sample))
                return self.step(model, given, others[0] if others else None, shapes, batch)

        return _Sized(at, known.batch)

    def of_module(
        self,
        model: torch.nn.Module,
        arguments: Sample,
        loss: LossFunction | None,
        known: SizedStep,
        shapes: Shapes,
    ) -> _Sized | None:
        """Steps of a module, whose batch dimension is found by trial; None where none is found.

        A loss that takes this batch alone is left out, and what a cross-entropy takes is assumed.
        """
        given = self.dataless.sample(arguments)
        first: SizedStep | None = known
        try:
            found = find_batch(model, given, None if loss is None else self.dataless.function(loss))
        except BatchError:
            try:
                found, loss, first = find_batch(model, given), None, None
            except BatchError:
                return None

        def at(batch: int) -> SizedStep:
            if first is not None and batch == found.size:
                return replace(first, batch=batch)
            return self.step(model, found.make(batch)[1], loss, shapes, batch)

        return _Sized(at, found.size)

    def batches(self, at: _Sized, usable_bytes: int) -> BatchEstimate:
        """How many rows fit, by the steps of the sample's rows, of twice as many, and of the first answer."""
        rows = max(2, at.rows)  # one row alone is laid out as no other number is
        one, other = at.step(rows), at.step(2 * rows)
        eager = largest_eager_batch(one, other, usable_bytes)
        planned = largest_planned_batch(one, other, usable_bytes, self.search_s)
        if planned is not None and planned.batch not in (one.batch, other.batch):
            # What is kept of masks and draws is not affine: nearer steps tell better.
            nearer = largest_planned_batch(other, at.step(planned.batch), usable_bytes, self.search_s)
            planned = nearer or planned
        return BatchEstimate(at.rows, eager, planned)


class _Sized(NamedTuple):
    """Steps by their batch."""

    step: Callable[[int], SizedStep]
    rows: int  # of the sample


def _planned(step: SizedStep, budget_bytes: int, solution: Solution) -> PlannedStep:
    found = _planned_step(step, budget_bytes, solution.peak_bytes, solution.time_ms)
    return replace(found, moved_bytes=solution.stored_bytes)


def _planned_step(step: SizedStep, budget_bytes: int, peak_bytes: int, time_ms: float) -> PlannedStep:
    assert step.problem is not None
    whole_bytes = max(step.eager.held_bytes + peak_bytes, step.eager.after_backward_bytes)
    return PlannedStep(budget_bytes, whole_bytes, time_ms / step.problem.keep_all_time_ms - 1)


_CHOICES = "whom forward chooses, by topk and the like, where it goes by that: each is taken to be chosen as often"


def _unknown(machine: Machine, eager: EagerStep, moves: bool) -> tuple[str, ...]:
    kinds = ["what kernels compute with and do not return, but for the largest of the CPU's"]
    if machine.is_accelerator:
        kinds = [
            "what kernels compute with and do not return, such as the workspaces of convolutions",
            "the gaps that another order of allocations leaves",
        ]
    if moves:
        kinds.append("what moves cost the computation beside them")
    if not eager.knows_optimizer_step:
        kinds.append("what the optimizer's step computes with: it does not run without data")
    return tuple(kinds)
