"""Plan the blocks of a model under one budget for the whole step, and shard them with FSDP2."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from rk_solvers.limits import USUAL_LIMITS
from rkgb import RockmateError, Sample, make_sample
from rkgb.devices.out_of_memory import if_it_fits
from rkgb.ir.sample import refuse_devices
from rkgb.process.turns import TURNS
from rkgb.state.module_state import main_device, module_devices, module_state_kept, training_mode
from rockmate.distributed.account import BlockProblem, Choice, Chooser, step_bytes, step_time_ms
from rockmate.distributed.blocks import BlockClass, Blocks, Forward, classes_of, find_blocks
from rockmate.distributed.precision import casting, computed_as
from rockmate.errors import ArgumentError, BudgetError, BudgetTooSmall, CheckpointingWarning, PlanExchangeError
from rockmate.guards.checkpointing import OwnCheckpointing
from rockmate.guards.sharded import refuse_what_spans_ranks
from rockmate.memory.budget import Budget, is_fraction, resolve_budget
from rockmate.memory.split import Residents
from rockmate.module import Rockmate
from rockmate.options import PlanOptions
from rockmate.plan_files.rank_agreement import default_exchange, key_of, plan_key, warn_alone
from rockmate.planning.costs import LossFunction
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.graph_solver import solver_for
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured, measure
from rockmate.planning.plan import Plan
from rockmate.planning.planner import make_plan
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.real_step import StepFunction, real_peak_bytes, warm_step
from rockmate.units import format_bytes

_ATTEMPTS = 5  # corrections of the account by real steps
_ENOUGH = 0.95  # a step that takes so much of its budget is not searched for a faster one
_LEVELS_SEARCHED = 10  # searches of each class, about


@dataclass(frozen=True, slots=True)
class BlockPlans:
    """What was planned: the bytes of a real step of the whole model, and the plan of each class of equal blocks.

    Bytes are of what a step allocates above the parameters and their gradients, which FSDP shards.
    """

    budget_bytes: int
    measured_peak_bytes: int
    plans: tuple[tuple[tuple[str, ...], Plan], ...]  # names of equal blocks, and the plan that all of them follow

    def __str__(self) -> str:
        each = (
            f"{len(names)} blocks such as {names[0]}: {plan.recomputations} recomputations, {plan.overhead:+.1%}"
            for names, plan in self.plans
        )
        return (
            f"BlockPlans(budget {format_bytes(self.budget_bytes)}, step measured at "
            f"{format_bytes(self.measured_peak_bytes)}; {'; '.join(each)})"
        )


def plan_blocks(
    model: nn.Module,
    budget: Budget,
    sample: Any,
    *,
    blocks: Blocks = None,
    loss: LossFunction | None = None,
    mp_policy: Any = None,
    time_limit: float | None = None,
    options: PlanOptions | None = None,
) -> BlockPlans:
    """Put a planned module in the place of each block of `model`, such that a whole step stays within `budget`.

    Equal blocks share one plan. The rest of the model stays as it is.

    Args:
        model: a module on this rank, whole: planning runs its training step.
        budget: most bytes that a step of the model may take above its parameters and their gradients: an int, a size
            such as "2GiB", a float fraction of what the eager step takes so, or None for the free memory, less 10 %.
        sample: the arguments of one step of `model`, as for `Rockmate`.
        blocks: classes of modules, or modules; None for the classes that the model repeats.
        loss: called on the model's output, as for `Rockmate`.
        mp_policy: the `MixedPrecisionPolicy` under which blocks and root will be sharded.
        time_limit: seconds for each search of a plan, 15 by default.
        options: as for `Rockmate`, in place of `loss` and `time_limit`: loss, solver and limits. Others are refused,
            but for `cache`: plans of blocks are not kept there.

    With more than one rank, the plans are those of the first rank that makes them. Raises what `Rockmate` raises,
    `ModelError` for `blocks` that are none, and `ArgumentError` for options that have no meaning here; `model` is then
    as it was before.
    """
    if time_limit is None and options is None:
        time_limit = USUAL_LIMITS.search_s  # and no time to better plans, of which a step takes several
    options = PlanOptions.of(options, {"loss": loss}, time_limit)
    _refuse_others(options)
    request = options.request(budget)
    refuse_what_spans_ranks(model)
    arguments = make_sample(model, sample)
    refuse_devices(model, arguments)
    found = find_blocks(model, blocks)
    checkpointing = OwnCheckpointing(model)
    news = checkpointing.news()
    if news is not None:
        warnings.warn(news, CheckpointingWarning, stacklevel=2)
    with TURNS.planning(model), checkpointing.switched_off(), computed_as(model, mp_policy), training_mode(model):
        classes = classes_of(Forward(model, arguments, found, mp_policy), _measured)
        step = _WholeStep(model, arguments, request.loss, mp_policy, classes)
        search = _Search(step, request)
        chosen = search.agreed()
    step.install(chosen.planned)
    pairs = zip(classes, chosen.planned, strict=True)
    plans = tuple((tuple(blocks.blocks), planned.plan) for blocks, planned in pairs)
    return BlockPlans(search.budget_bytes, chosen.peak_bytes, plans)


def apply(
    model: nn.Module,
    budget: Budget,
    *,
    sample: Any,
    blocks: Blocks = None,
    loss: LossFunction | None = None,
    time_limit: float | None = None,
    options: PlanOptions | None = None,
    **sharding: Any,
) -> BlockPlans:
    """`plan_blocks`, then FSDP2: ``fully_shard(block, **sharding)`` of each planned block, and of `model`.

    `sharding` are options of `fully_shard`, such as `mesh`, `reshard_after_forward`, `mp_policy` and `offload_policy`;
    the others are those of `plan_blocks`. Keys of the state dict are those of the sharded original. Raises what
    `plan_blocks` and `fully_shard` raise.
    """
    from torch.distributed.fsdp import fully_shard

    policy = sharding.get("mp_policy")
    found = plan_blocks(
        model,
        budget,
        sample,
        blocks=blocks,
        loss=loss,
        mp_policy=policy,
        time_limit=time_limit,
        options=options,
    )
    for name in (name for names, _ in found.plans for name in names):
        fully_shard(model.get_submodule(name), **sharding)
    fully_shard(model, **sharding)
    return found


def _refuse_others(options: PlanOptions) -> None:
    """Raise `ArgumentError` for what is said of planning and would not be heard here."""
    usual = PlanOptions()
    others = ("pin", "scope", "optimizer", "shapes", "opaque", "progress", "offload", "layout", "compile")
    for name in (*others, "kernels", "loss_chunks"):
        if getattr(options, name) != getattr(usual, name):
            raise ArgumentError(
                f"{name} is an option of whole models, and plans of blocks do not follow it: leave it out. Loss, "
                "solver and limits are what they take."
            )


def _measured(block: nn.Module, sample: Sample) -> Measured:
    try:
        return measure(block, sample, PlanRequest(None))
    except RockmateError as error:
        error.add_note(
            f"This is a block of the model, a {type(block).__name__}. Leave it out of `blocks` to run it as it is; "
            "where a block fills a cache that it is given, switch that off (config.use_cache = False)."
        )
        raise


class _WholeStep:
    """Real steps of the whole model under plans of its blocks."""

    def __init__(
        self, model: nn.Module, sample: Sample, loss: LossFunction | None, policy: Any, classes: Sequence[BlockClass]
    ) -> None:
        self.model, self.sample, self.loss, self.policy = model, sample, loss, policy
        self.classes = classes
        self.device = main_device(module_devices(model, sample.tensors))
        gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.device == self.device)
        self._residents = Residents(0, gradient_bytes, 0, 0, 0, 0)

    def eager_bytes(self) -> int | None:
        """Most bytes that the eager step takes above gradients; None where it does not fit the device."""
        blocks = [block for each in self.classes for block in each.blocks.values()]
        with casting([self.model, *blocks], self.policy):
            return if_it_fits(partial(self._peak_bytes, self.model))

    def planned_bytes(self, chosen: Sequence[LoweredPlan]) -> int:
        """The same of a step whose blocks follow `chosen`, one for each class."""
        with self._installed(chosen) as wrapped, casting([self.model, *wrapped], self.policy):
            return self._peak_bytes(self.model)

    def _peak_bytes(self, step: StepFunction) -> int:
        borrow = partial(module_state_kept, self.model, {self.device})
        warm_step(step, self.sample, self.loss, self.device, borrow)
        with borrow():
            peak = real_peak_bytes(step, self.sample, self.loss, self.device, self._residents)
        return peak.allocated_bytes

    @contextlib.contextmanager
    def _installed(self, chosen: Sequence[LoweredPlan]) -> Iterator[list[nn.Module]]:
        blocks = {id(block): block for each in self.classes for block in each.blocks.values()}
        wrapped = self.install(chosen)
        try:
            yield list(wrapped.values())
        finally:
            put_in_place(self.model, {id(new): blocks[old] for old, new in wrapped.items()})

    def install(self, chosen: Sequence[LoweredPlan]) -> dict[int, nn.Module]:
        """Put planned modules in the places of the blocks; by the `id` of the block that each stands for."""
        wrapped: dict[int, nn.Module] = {}
        for each, planned in zip(self.classes, chosen, strict=True):
            first, *others = each.blocks.values()
            measured = replace(each.measured, sample=None)  # its tensors are not kept
            planned_first = Rockmate._following(first, measured, planned, "nearest")
            wrapped[id(first)] = planned_first
            wrapped |= {id(block): planned_first._of_an_equal(block) for block in others}
        put_in_place(self.model, wrapped)
        return wrapped


def put_in_place(model: nn.Module, instead: Mapping[int, nn.Module]) -> None:
    """Replace submodules of `model`, wherever they are, by others: `instead` is by the `id` of those there now."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and id(child) in instead:
                module._modules[name] = instead[id(child)]


@dataclass(frozen=True, slots=True)
class _Found:
    """Plans for all classes, and the bytes of a real step under them."""

    decisions: list[PortablePlan]
    planned: list[LoweredPlan]
    peak_bytes: int


class _Search:
    """Chooses plans by the account, runs a real step of them, and corrects the account by what was measured."""

    def __init__(self, step: _WholeStep, request: PlanRequest) -> None:
        self._step = step
        self._request = request
        self._problems = [BlockProblem.of(blocks) for blocks in step.classes]
        eager_bytes = step.eager_bytes() if is_fraction(request.budget) else 0
        if eager_bytes is None:
            raise BudgetError(
                f"the budget {request.budget!r} is a part of the eager step, which does not fit the memory: give "
                'bytes, or a size such as "8GiB".'
            )
        self.budget_bytes = resolve_budget(request.budget, eager_bytes, step.device)

    def agreed(self) -> _Found:
        """Plans for all classes: chosen here, or by the first rank to come."""
        searches = len(self._problems) * (_LEVELS_SEARCHED + _ATTEMPTS)
        exchange = default_exchange(searches * self._request.limits.longest_s)
        if exchange is None:
            return self._chosen()
        each = [[plan_key(blocks.measured, self._request), blocks.calls] for blocks in self._step.classes]
        own: list[_Found] = []

        def make() -> str:
            own.append(self._chosen())
            return json.dumps([decisions.to_json() for decisions in own[0].decisions])

        try:
            text, mine = exchange.agree(key_of(["blocks", *each]), make)
        except PlanExchangeError as error:
            if error.rank is not None:
                raise
            reason = str(error)
        else:
            found = own[0] if mine else self._run([PortablePlan.from_json(decisions) for decisions in json.loads(text)])
            if found.peak_bytes <= self.budget_bytes:
                return found
            reason = f"the step takes {format_bytes(found.peak_bytes)} here, of {format_bytes(self.budget_bytes)}"
        warn_alone(self._step.model, reason)
        return self._chosen()

    def _chosen(self) -> _Found:
        solvers = [solver_for(self._request, blocks.measured) for blocks in self._step.classes]
        chooser = Chooser(self._problems, solvers)
        best: _Found | None = None
        best_ms, lowest_bytes = math.inf, sys.maxsize
        choice: Choice | None = chooser.leanest()
        for _ in range(_ATTEMPTS):
            if choice is None:
                break
            found = self._run([candidate.decisions for candidate in choice])
            lowest_bytes = min(lowest_bytes, found.peak_bytes)
            time_ms = step_time_ms(self._problems, choice)
            if found.peak_bytes <= self.budget_bytes and time_ms < best_ms:
                best, best_ms = found, time_ms
                if found.peak_bytes >= _ENOUGH * self.budget_bytes:
                    break
            rest_bytes = found.peak_bytes - step_bytes(self._problems, choice)
            previous, choice = choice, chooser.choose(self.budget_bytes - rest_bytes)
            if choice == previous:
                break
        if best is None:
            raise self._too_small(lowest_bytes)
        return best

    def _run(self, decisions: list[PortablePlan]) -> _Found:
        """What one plan for each class comes to."""
        planned = [self._planned(*pair) for pair in zip(self._step.classes, decisions, strict=True)]
        return _Found(decisions, planned, self._step.planned_bytes(planned))

    def _planned(self, blocks: BlockClass, decisions: PortablePlan) -> LoweredPlan:
        """A program for the blocks of a class. What they may take is the whole model's to judge, not its own."""
        follow = FixedPlan(decisions, lower_bound_ms=0.0)  # a bound of one block's time would say nothing here
        measured = replace(blocks.measured, sample=blocks.sample)
        room_bytes = max(self.budget_bytes, 2 * blocks.measured.eager_peak_bytes) + blocks.gradient_bytes()
        block = next(iter(blocks.blocks.values()))
        planned = make_plan(measured, PlanRequest(room_bytes, solver=follow), block)
        planned.plan = replace(planned.plan, lower_bound_ms=None)
        return planned

    def _too_small(self, lowest_bytes: int) -> BudgetTooSmall:
        names = ", ".join(f"{blocks.calls} x {blocks.name}" for blocks in self._step.classes)
        return BudgetTooSmall(
            f"the smallest step found for {type(self._step.model).__name__} takes {format_bytes(lowest_bytes)} above "
            f"its parameters and their gradients, but the budget is {format_bytes(self.budget_bytes)}. What could be "
            f"recomputed within its blocks ({names}) is; the rest of the model keeps everything. Halve the batch, give "
            "larger blocks, or those that the rest repeats, too.",
            lowest_bytes,
            f"a block of {self._step.classes[-1].name}",
            0,
        )
