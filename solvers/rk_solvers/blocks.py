"""The blocks of a chain as numbers, with several ways (options) to run each.

An option of block `i` is a plan for the block alone: what is recomputed between its own backward operations.
It is known by its saved bytes (kept between the block's forward and backward) and its peaks. Options come
from the greedy solver on the block preceded, at its backward, by a pause that stands for the rest of the
chain; a bound on the bytes alive during the pause makes them save less. Reference: X. Zhao, T. Le Hellard, L.
Eyraud-Dubois, J. Gusak, O. Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
re-materialization in PyTorch", ICML 2023.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from .evaluate import evaluate, instances_of, memory_curve, normalise, recompute_time_ms
from .local_search import improve, polish, weights_for
from .plan_state import PlanState, Tables
from .problem import BackwardOp, Chain, Data, ForwardOp, Problem, Recompute
from .repair import repair


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block. Bytes leave out the block's input, which the chain accounts for."""

    extra_ms: float  # recomputation inside the block
    saved_bytes: int  # kept after its forward until its backward, its output to the next block included
    forward_bytes: int  # peak of the forward
    backward_bytes: int  # peak of the backward, gradients resident before it left out
    again_ms: float  # forward and recomputation, where the forward runs again for nothing but its own backward
    again_bytes: int  # and the peak then, backward included, gradients resident before it left out
    recompute: Recompute  # per backward operation of the block, indices within the block


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
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A block cut out of its problem, the pause being the first backward operation."""

    problem: Problem
    stages: tuple[int, ...]
    resident_bytes: int


def blocks_of(problem: Problem, chain: Chain, grid: int = 4, rounds: int = 10) -> tuple[Block, ...]:
    """All blocks with their options; blocks of equal numbers are solved once."""
    chain.check(problem)
    block_of = [index for index, block in enumerate(chain.blocks) for _ in block]
    forward, backward = _readers(problem, chain)
    last = [block_of[item.producer] for item in problem.data]
    input_bytes = [0] * (len(chain.blocks) + 1)
    pins: list[list[Pin]] = [[] for _ in input_bytes]
    for number, item in enumerate(problem.data):
        home = last[number]
        last[number] = max({home} | forward[number] | backward[number])
        if number not in problem.held and last[number] == home + 1:
            input_bytes[home + 1] += item.size_bytes
        elif number not in problem.held and last[number] > home:
            pins[home].append(_pin(item.size_bytes, home, forward[number], backward[number]))
    solved: dict[Problem, tuple[int, tuple[Option, ...]]] = {}
    blocks: list[Block] = []
    for index in range(len(chain.blocks) + 1):
        part = _part(problem, chain, index, last)
        key = _anonymous(part.problem)
        if key not in solved:
            solved[key] = (_forget_bytes(key), _options(key, grid, rounds))
        forget, options = solved[key]
        blocks.append(
            Block(
                chain.blocks[index] if index < len(chain.blocks) else range(0),
                part.stages,
                sum(op.time_ms for op in part.problem.forward),
                sum(op.time_ms for op in part.problem.backward),
                input_bytes[index],
                tuple(pins[index]),
                part.resident_bytes,
                forget,
                options,
            )
        )
    return tuple(blocks)


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


def _part(problem: Problem, chain: Chain, index: int, last: list[int]) -> _Part:
    """Block `index` alone: its own data, backward numbers relative to what is resident at its backward."""
    inside = chain.blocks[index] if index < len(chain.blocks) else range(0)
    stages = tuple(stage for stage, block in enumerate(chain.backward_block) if block == index)
    resident = min((problem.backward[stage].resident_bytes for stage in stages), default=0)
    items = [item for op in inside for item in problem.forward[op].outputs]
    local = {item: number for number, item in enumerate(items)}
    data = tuple(
        Data(problem.data[item].name, 0 if item in problem.held else problem.data[item].size_bytes,
             problem.data[item].producer - inside.start, problem.data[item].kind)
        for item in items
    )  # fmt: skip
    forward = tuple(
        ForwardOp(
            op.name, op.time_ms, tuple(local[item] for item in op.inputs if item in local),
            tuple(local[item] for item in op.outputs), op.workspace_bytes, op.recomputable, op.replay_bytes,
        )
        for op in (problem.forward[number] for number in inside)
    )  # fmt: skip
    passed_on = tuple(local[item] for item in items if last[item] > index)
    backward = [BackwardOp(_free_name(problem), 0.0, passed_on, 0, 0)]
    for stage in stages:
        op = problem.backward[stage]
        needs = tuple(local[item] for item in op.needs if item in local)
        backward.append(BackwardOp(op.name, op.time_ms, needs, op.resident_bytes - resident, op.peak_bytes - resident))
    held = frozenset(local[item] for item in items if item in problem.held)
    return _Part(Problem(data, forward, tuple(backward), held), stages, resident)


def _free_name(problem: Problem) -> str:
    """A name that no backward operation bears."""
    return "pause" + "_" * max((len(op.name) for op in problem.backward), default=0)


def _anonymous(part: Problem) -> Problem:
    """The same numbers with names that depend on positions only, so that equal blocks are equal values."""
    return Problem(
        tuple(Data(f"d{i}", item.size_bytes, item.producer) for i, item in enumerate(part.data)),
        tuple(
            ForwardOp(
                f"f{i}",
                op.time_ms,
                op.inputs,
                op.outputs,
                op.workspace_bytes,
                op.recomputable,
                op.replay_bytes,
            )
            for i, op in enumerate(part.forward)
        ),
        tuple(
            BackwardOp(f"b{i}", op.time_ms, op.needs, op.resident_bytes, op.peak_bytes)
            for i, op in enumerate(part.backward)
        ),
        part.held,
    )


def _forget_bytes(part: Problem) -> int:
    alone = Problem(part.data, part.forward, part.backward[:1], part.held)
    return evaluate(alone, ((),)).peak_bytes


def _options(part: Problem, grid: int, rounds: int) -> tuple[Option, ...]:
    """Pareto-optimal options: keep-all, and greedy plans on a grid of bounds on saved and peak bytes."""
    keep_all = _option(part, part.no_recompute)
    found = {keep_all.recompute: keep_all}
    if not part.forward or len(part.backward) == 1:
        return (keep_all,)
    least_saved = sum(part.data[item].size_bytes for item in part.backward[0].needs)
    most = max(keep_all.forward_bytes, keep_all.backward_bytes)
    low = max(keep_all.saved_bytes, least_saved)
    peaks = [2 * most] + [round(least_saved + (most - least_saved) * (grid - step) / grid) for step in range(1, grid)]
    for peak in peaks:
        for step in range(2 * grid + 1):
            saved = round(least_saved + (low - least_saved) * step / (2 * grid))
            if saved > peak:
                continue
            plan = _bounded_plan(part, peak, saved, rounds)
            if plan is not None:
                option = _option(part, plan)
                found.setdefault(option.recompute, option)
    return _pareto(list(found.values()))


def _bounded_plan(part: Problem, peak: int, saved: int, rounds: int) -> Recompute | None:
    """A fast plan with at most `peak` bytes anywhere and at most `saved` bytes during the pause."""
    first = part.backward[0]
    pause = BackwardOp(first.name, 0.0, first.needs, peak - saved, peak - saved)
    bounded = Problem(part.data, part.forward, (pause, *part.backward[1:]), part.held)
    state = PlanState(Tables(bounded))
    rng = random.Random(0)
    if not repair(state, peak, weights_for(state, rng, 1.0, 0.0)):
        return None
    deadline = time.monotonic() + 5.0
    polish(state, peak, deadline)
    improve(state, peak, rounds, deadline, rng)
    plan = normalise(part, state.recompute())
    return None if plan[0] else plan


def _option(part: Problem, plan: Recompute) -> Option:
    curve = memory_curve(part, plan)
    count = len(part.forward)
    alive = sum(
        part.data[item.data].size_bytes for item in instances_of(part, plan) if item.first <= count <= item.last
    )
    again_ms, again_bytes = _again(part, plan)
    return Option(
        recompute_time_ms(part, plan),
        alive,
        int(curve[:count].max(initial=0)),
        int(curve[count + 1 :].max(initial=0)),
        again_ms,
        again_bytes,
        plan[1:],
    )


def _again(part: Problem, plan: Recompute) -> tuple[float, int]:
    """Time and peak of a forward after the pause, of which nothing runs that only later blocks would read."""
    if len(plan) == 1:
        return 0.0, 0
    pause = BackwardOp(part.backward[0].name, 0.0, (), 0, 0)
    alone = Problem(part.data, part.forward, (pause, *part.backward[1:]), part.held)
    everything = {index for index, op in enumerate(part.forward) if op.recomputable}
    again = normalise(alone, ((), tuple(sorted(everything | set(plan[1]))), *plan[2:]))
    return recompute_time_ms(alone, again), int(memory_curve(alone, again)[len(part.forward) + 1 :].max(initial=0))


def _pareto(options: list[Option]) -> tuple[Option, ...]:
    """Options that no other one beats in times, saved bytes and peaks."""

    def costs(option: Option) -> tuple[float, ...]:
        memory = (option.saved_bytes, option.backward_bytes, option.forward_bytes, option.again_bytes)
        return option.extra_ms, option.again_ms, *memory

    kept: list[Option] = []
    for option in sorted(options, key=costs):
        if not any(all(a <= b for a, b in zip(costs(other), costs(option), strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)
