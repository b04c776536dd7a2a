"""The blocks of a chain as numbers, with several ways (options) to run each.

An option of block `i` is a plan for the block alone: what is recomputed between its own backward operations.
It is known by its saved bytes (kept between the block's forward and backward) and its peaks. Options come
from the greedy solver on the block preceded, at its backward, by a barrier that stands for the rest of the
chain; a bound on the bytes alive there makes them save less. Reference: X. Zhao, T. Le Hellard, L.
Eyraud-Dubois, J. Gusak, O. Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
re-materialization in PyTorch", ICML 2023.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rk_solvers.groups import normalise
from rk_solvers.liveness import (
    PlanState,
    Tables,
    evaluate,
    kept_over_the_turn,
    memory_curve,
    recompute_time_ms,
    steps_of,
)
from rk_solvers.local.local_search import improve, polish, weights_for
from rk_solvers.local.repair import repair
from rk_solvers.problem import BackwardOp, Chain, Data, ForwardOp, Problem, Recompute


@dataclass(frozen=True, slots=True)
class Rerun:
    """The forward of a block run again for nothing but the backward of the block, after it was passed."""

    time_ms: float  # of what is computed again
    peak_bytes: int  # backward included, gradients resident before it and the block's input left out
    total_bytes: int  # the same with the input, from the start to the last use of each data of it
    reads_input: bool  # whether the input, or a pin of an earlier block, is read at all


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way to run a block. Bytes leave out the block's input, which the chain accounts for."""

    extra_ms: float  # recomputation inside the block
    saved_bytes: int  # kept after its forward until its backward, its output to the next block included
    forward_bytes: int  # peak of the forward
    backward_bytes: int  # peak of the backward, gradients resident before it left out
    again_ms: float  # forward and recomputation, where the forward runs again for nothing but its own backward
    again_bytes: int  # and the peak then, backward included, gradients resident before it left out
    recompute: Recompute  # per backward operation of the block, indices within the block
    again: Rerun | None = None  # the same two numbers and more; None where they are all that is known
    given: Rerun | None = None  # the same where what `Block.given_bytes` counts is still stored; None: no gain


@dataclass(frozen=True, slots=True)
class Pin:
    """Data that blocks beyond the next one read."""

    size_bytes: int
    first_reader: int  # blocks; its own where its own backward needs it: it may have to be kept for that
    last_reader: int
    late: bool  # a backward operation needs it: it may be alive after the forward of its last reader


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the chain; the loss is a last block without forward."""

    forward: range  # forward indices of the problem
    stages: tuple[int, ...]  # its backward operations in the problem, in execution order
    forward_ms: float
    backward_ms: float
    input_bytes: int  # data of the block before that this one uses, and no later one
    pins: tuple[Pin, ...]  # those that it makes
    resident_bytes: int  # gradients alive at its backward, at least
    forget_bytes: int  # peak of a forward that keeps nothing but the output
    options: tuple[BlockOption, ...]
    given_bytes: int = 0  # of the data that it hands on, those that spare a part of running it again for its backward
    spared: tuple[int, ...] = ()  # the operations, within the block, that are not run again where these are stored
    part: SubProblem | None = None  # the block's own problem; equal for blocks that are equal but for their place


@dataclass(frozen=True, slots=True)
class SubProblem:
    """A block cut out of its problem, the barrier being the first backward operation; names are positions.

    Parts of equal numbers are equal.
    """

    problem: Problem
    input_bytes: tuple[int, ...]  # of each data that the block before makes for this one alone
    reads: tuple[frozenset[int], ...]  # by each forward, then each backward operation: numbers of these, -1 for a pin
    lasting: frozenset[int]  # data of the block that are stored until its own backward, if those after it read them


Planner = Callable[[SubProblem, tuple[BlockOption, ...]], list[Recompute]]
"""More plans for a block's problem, whose first backward operation is the barrier, from the options that there are."""


PlansOf = Callable[[SubProblem], list[Recompute]]
"""Plans for a block's problem that recompute nothing before the barrier, one of them keep-all."""


def blocks_of(
    problem: Problem,
    chain: Chain,
    grid: int = 4,
    rounds: int = 10,
    plans_of: PlansOf | None = None,
    deadline: float = math.inf,
) -> tuple[Block, ...]:
    """All blocks with their options, of `plans_of` or else of greedy; blocks of equal numbers are solved once.

    Blocks that come when `time.monotonic` has reached `deadline` have keep-all as their only option from greedy. Raises
    `ValueError` on a chain of another problem.
    """
    find = plans_of or (lambda part: greedy_plans(part.problem, grid, rounds, deadline))
    users = _Users(problem, chain)
    solved: dict[SubProblem, _Solved] = {}
    blocks: list[Block] = []
    for index in range(len(chain.blocks) + 1):
        stages, resident = users.stages(index)
        part = _sub_problem(problem, users, index)
        if part not in solved:
            solved[part] = _solve(part, find(part))
        found = solved[part]
        blocks.append(
            Block(
                users.inside(index),
                stages,
                sum(op.time_ms for op in part.problem.forward),
                sum(op.time_ms for op in part.problem.backward),
                sum(part.input_bytes),
                tuple(users.pins[index]),
                resident,
                found.forget_bytes,
                found.options,
                found.given_bytes,
                found.spared,
                part,
            )
        )
    return tuple(blocks)


def sub_problems_of(problem: Problem, chain: Chain) -> list[SubProblem]:
    """The problems of the blocks, that of the loss last. Raises `ValueError` on a chain of another problem."""
    users = _Users(problem, chain)
    return [_sub_problem(problem, users, index) for index in range(len(chain.blocks) + 1)]


def with_more_options(blocks: tuple[Block, ...], planner: Planner) -> tuple[Block, ...]:
    """The blocks with those of all options that no other one beats; `planner` is asked once for each class.

    It is not asked about blocks without forward or without backward operations.
    """
    classes = {block.part: block for block in blocks if block.part and has_choice(block.part)}
    better: dict[SubProblem, tuple[BlockOption, ...]] = {}
    for part, block in classes.items():
        spared = frozenset(block.spared)
        more = [option_of(part, plan, spared) for plan in planner(part, block.options)]
        better[part] = pareto([*block.options, *more])
    return tuple(
        replace(block, options=better[block.part]) if block.part and block.part in better else block for block in blocks
    )


def has_choice(part: SubProblem) -> bool:
    """Whether a block has a forward and a backward."""
    return len(part.problem.forward) > 0 and len(part.problem.backward) > 1


class _Users:
    """Which blocks make and use which data. Raises `ValueError` on a chain of another problem."""

    def __init__(self, problem: Problem, chain: Chain) -> None:
        chain.check(problem)
        self.problem, self.blocks = problem, chain.blocks
        self.backward_block = chain.backward_block
        block_of = [index for index, block in enumerate(chain.blocks) for _ in block]
        self.home = [block_of[item.producer] for item in problem.data]
        self.forward, self.backward = _readers(problem, chain)
        readers = zip(self.home, self.forward, self.backward, strict=True)
        self.last = [max({home} | forward | backward) for home, forward, backward in readers]
        self.pins: list[list[Pin]] = [[] for _ in range(len(chain.blocks) + 1)]
        for number, item in enumerate(problem.data):
            if number not in problem.held and self.last[number] > self.home[number] + 1:
                pin = _pin(item.size_bytes, self.home[number], self.forward[number], self.backward[number])
                self.pins[self.home[number]].append(pin)

    def stages(self, index: int) -> tuple[tuple[int, ...], int]:
        """Backward operations of a block, and the least bytes resident at them."""
        found = tuple(stage for stage, block in enumerate(self.backward_block) if block == index)
        return found, min((self.problem.backward[stage].resident_bytes for stage in found), default=0)

    def is_input(self, item: int, index: int) -> bool:
        """Whether a data is made by the block before `index`, and by no later one than `index` used."""
        return self.home[item] + 1 == index == self.last[item]

    def inside(self, index: int) -> range:
        """Forward operations of a block; none of the loss."""
        return self.blocks[index] if index < len(self.blocks) else range(0)


def _readers(problem: Problem, chain: Chain) -> tuple[list[set[int]], list[set[int]]]:
    """For each data, the blocks of which a forward operation reads it, and those of which a backward one does."""
    forward: list[set[int]] = [set() for _ in problem.data]
    backward: list[set[int]] = [set() for _ in problem.data]
    for index, block in enumerate(chain.blocks):
        for op in block:
            for item in problem.forward[op].inputs:
                forward[item].add(index)
    for stage, index in enumerate(chain.backward_block):
        for item in problem.backward[stage].needs:
            backward[item].add(index)
    return forward, backward


def _pin(size_bytes: int, home: int, forward: set[int], backward: set[int]) -> Pin:
    """The pin of which these blocks read, made by block `home`."""
    beyond = (forward | backward) - {home}
    first = home if home in backward else min(beyond)
    return Pin(size_bytes, first, max(beyond), late=bool(backward))


def _sub_problem(problem: Problem, users: _Users, index: int) -> SubProblem:
    """Block `index` alone: its own data, backward numbers relative to what is resident at its backward."""
    inside = users.inside(index)
    stages, resident_bytes = users.stages(index)
    items = [item for op in inside for item in problem.forward[op].outputs]
    local = {item: number for number, item in enumerate(items)}
    held = frozenset(local[item] for item in items if item in problem.held)
    data = tuple(
        Data(f"d{number}", 0 if number in held else problem.data[item].size_bytes,
             problem.data[item].producer - inside.start)
        for number, item in enumerate(items)
    )  # fmt: skip
    # All plans run each operation a first time: what that takes beyond a repetition is the same in all of them.
    forward = tuple(
        ForwardOp(
            f"f{number}", op.recompute_ms, tuple(local[item] for item in op.inputs if item in local),
            tuple(local[item] for item in op.outputs), op.workspace_bytes, op.recomputable, op.replay_bytes,
        )
        for number, op in enumerate(problem.forward[number] for number in inside)
    )  # fmt: skip
    passed_on = tuple(local[item] for item in items if users.last[item] > index)
    backward = [BackwardOp("barrier", 0.0, passed_on, 0, 0)]
    for number, op in enumerate(problem.backward[stage] for stage in stages):
        needs = tuple(local[item] for item in op.needs if item in local)
        resident, peak = op.resident_bytes - resident_bytes, op.peak_bytes - resident_bytes
        backward.append(BackwardOp(f"b{number}", op.time_ms, needs, resident, peak))
    lasting = frozenset(
        local[item]
        for item in items
        if item not in problem.held
        and (users.last[item] == index + 1 or (users.last[item] > index and index in users.backward[item]))
    )
    outside: dict[int, int] = {}
    reads: list[frozenset[int]] = []
    for read in [problem.forward[op].inputs for op in inside] + [problem.backward[stage].needs for stage in stages]:
        foreign = [item for item in read if item not in local and item not in problem.held]
        numbers = (outside.setdefault(item, len(outside)) if users.is_input(item, index) else -1 for item in foreign)
        reads.append(frozenset(numbers))
    sizes = tuple(problem.data[item].size_bytes for item in outside)
    return SubProblem(Problem(data, forward, tuple(backward), held), sizes, tuple(reads), lasting)


@dataclass(frozen=True, slots=True)
class _Solved:
    """What blocks of equal numbers share."""

    forget_bytes: int
    options: tuple[BlockOption, ...]
    given_bytes: int
    spared: tuple[int, ...]


def _solve(part: SubProblem, plans: list[Recompute]) -> _Solved:
    """The options of these plans that no other one beats, and the other numbers of a block."""
    problem = part.problem
    alone = Problem(problem.data, problem.forward, problem.backward[:1], problem.held)
    given, spared = _given(part)
    options = pareto([option_of(part, plan, spared) for plan in plans])
    given_bytes = sum(problem.data[item].size_bytes for item in given)
    return _Solved(evaluate(alone, ((),)).peak_bytes, options, given_bytes, tuple(sorted(spared)))


def _given(part: SubProblem) -> tuple[frozenset[int], frozenset[int]]:
    """Data handed on that spare running some operations again for the block's own backward; these operations."""
    problem = part.problem
    wanted = {item for op in problem.backward[1:] for item in op.needs}
    given: set[int] = set()
    spared: set[int] = set()
    for index in reversed(range(len(problem.forward))):
        made = wanted.intersection(problem.renewed(index))
        if made and made <= part.lasting and problem.forward[index].recomputable:
            given |= made
            spared.add(index)
        elif made:
            wanted.update(problem.forward[index].inputs)
    return frozenset(given), frozenset(spared)


def greedy_plans(part: Problem, grid: int, rounds: int, deadline: float = math.inf) -> list[Recompute]:
    """Keep-all, and what greedy finds under each of a grid of bounds on peak and saved bytes until `deadline`."""
    bounds = (bound for bound in bounds_of(part, grid) if time.monotonic() < deadline)
    plans = (bounded_plan(part, peak, saved, rounds) for peak, saved in bounds)
    return list(dict.fromkeys([part.no_recompute, *(plan for plan in plans if plan is not None)]))


def bounds_of(part: Problem, grid: int) -> list[tuple[int, int]]:
    """Bounds on (peak, saved) bytes for a block's problem, between the least and those of keep-all."""
    if not part.forward or len(part.backward) == 1:
        return []
    least = sum(part.data[item].size_bytes for item in part.backward[0].needs)
    most, low = int(memory_curve(part, part.no_recompute).max()), saved_bytes_at_barrier(part, part.no_recompute)
    peaks = [2 * most] + [round(least + (most - least) * (grid - step) / grid) for step in range(1, grid)]
    steps = 2 * grid + 1
    saved = [round(least + (max(low, least) - least) * step / (steps - 1)) for step in range(steps)]
    return [(peak, limit) for peak in peaks for limit in saved if limit <= peak]


def bounded(part: Problem, peak: int, saved: int) -> Problem:
    """A block's problem that has at most `saved` bytes alive at the barrier, if its peak is at most `peak`."""
    first = part.backward[0]
    barrier = BackwardOp(first.name, 0.0, first.needs, peak - saved, peak - saved)
    return Problem(part.data, part.forward, (barrier, *part.backward[1:]), part.held)


def bounded_plan(part: Problem, peak: int, saved: int, rounds: int) -> Recompute | None:
    """A fast plan with at most `peak` bytes anywhere and at most `saved` bytes at the barrier."""
    state = PlanState(Tables(bounded(part, peak, saved)))
    rng = random.Random(0)
    if not repair(state, peak, weights_for(state, rng, 1.0, 0.0)):
        return None
    deadline = time.monotonic() + 5.0
    polish(state, peak, deadline)
    improve(state, peak, rounds, deadline, rng)
    plan = normalise(part, state.recompute())
    return None if plan[0] else plan


def saved_bytes_at_barrier(part: Problem, plan: Recompute) -> int:
    """Bytes alive at the barrier."""
    return sum(part.data[item].size_bytes for item in kept_over_the_turn(part, plan))


def option_of(part: SubProblem, plan: Recompute, spared: frozenset[int] = frozenset()) -> BlockOption:
    """The option of a plan for the block's problem that recomputes nothing before the barrier."""
    problem, count = part.problem, len(part.problem.forward)
    curve = memory_curve(problem, plan)
    again = _rerun(part, plan, frozenset())
    return BlockOption(
        recompute_time_ms(problem, plan),
        saved_bytes_at_barrier(problem, plan),
        int(curve[:count].max(initial=0)),
        int(curve[count + 1 :].max(initial=0)),
        again.time_ms,
        again.peak_bytes,
        plan[1:],
        again,
        _rerun(part, plan, spared) if spared else None,
    )


def _rerun(part: SubProblem, plan: Recompute, spared: frozenset[int]) -> Rerun:
    """The forward after the barrier, without `spared` operations and what only later blocks would read."""
    problem, count = part.problem, len(part.problem.forward)
    if len(plan) == 1:
        return Rerun(0.0, 0, 0, False)
    barrier = BackwardOp(problem.backward[0].name, 0.0, (), 0, 0)
    alone = Problem(problem.data, problem.forward, (barrier, *problem.backward[1:]), problem.held)
    everything = {index for index, op in enumerate(problem.forward) if op.recomputable} - spared
    again = normalise(alone, ((), tuple(sorted(everything | set(plan[1]))), *plan[2:]))
    curve = memory_curve(alone, again)[count + 1 :]
    steps = steps_of(alone, again)[count + 1 :]
    uses = [part.reads[step.forward if step.forward >= 0 else count + step.stage - 1] for step in steps]
    total = curve.copy()
    for number, size in enumerate(part.input_bytes):
        last = max((position for position, read in enumerate(uses) if number in read), default=-1)
        total[: last + 1] += size
    peaks = int(curve.max(initial=0)), int(total.max(initial=0))
    return Rerun(recompute_time_ms(alone, again), *peaks, any(uses))


def pareto(options: list[BlockOption]) -> tuple[BlockOption, ...]:
    """Options that no other one beats in times, saved bytes and peaks."""

    def costs(option: BlockOption) -> tuple[float, ...]:
        memory = (option.saved_bytes, option.backward_bytes, option.forward_bytes, option.again_bytes)
        given = (option.given.time_ms, option.given.peak_bytes) if option.given else ()
        return option.extra_ms, option.again_ms, *memory, *given

    kept: list[BlockOption] = []
    for option in sorted(options, key=costs):
        if not any(all(a <= b for a, b in zip(costs(other), costs(option), strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)
