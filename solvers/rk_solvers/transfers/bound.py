"""A lower bound on the time of every plan that recomputes data, moves them to a second memory and back, or both.

The class of plans is that which `checker.check` takes: any recomputations, and any data that leaves and comes back at
any steps between any two of its uses, over links that do one transfer after the other. A plan that moves nothing needs
no staging; one that moves something has it beside the budget throughout. The bound is the lower of what is proven of
the two.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from itertools import accumulate

from rk_solvers.bounds.refinement import BRIEF
from rk_solvers.bounds.relaxation import UNITS
from rk_solvers.bounds.time_bound import lower_bound_ms
from rk_solvers.links import SecondMemory
from rk_solvers.liveness import Tables, least_bytes, memory_curve, peak_and_time
from rk_solvers.milp import BackendLimits, Outcome, Result, relaxation_bound, solve
from rk_solvers.problem import Chain, Problem
from rk_solvers.transfers.relaxation import MOMENTS, MovesRelaxation

FULLEST = 30  # steps at which bytes are counted for the quick bound
EACH_APART = 12  # backward operations, up to which a grouping has each of them apart
CUTS = 3  # further groupings of larger problems, each with a group more
BUILT_PER_S = 30_000  # data times groups and moments: a program for which there is no time is not even built
MOST_EXTRA = 100.0  # of the step's time: a bound is not told beyond about that


def lower_bound_with_moves_ms(
    problem: Problem,
    budget_bytes: int,
    memory: SecondMemory,
    limit_s: float = 10.0,
    chain: Chain | None = None,
    integer: bool = True,
) -> float:
    """A proven lower bound, in milliseconds, on the time of every plan within the budget that may move data, too.

    Infinite where it is proven that none fits, however fast the links are; that of keep-all where it fits. It is that
    of linear programs (see `relaxation`), or, with `integer`, of an integer program in what they leave of the seconds.
    Groups may begin where blocks of `chain` do. Raises `ValueError` if `chain` is not one of the problem.
    """
    if chain is not None:
        chain.check(problem)
    if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
        return problem.keep_all_time_ms
    if budget_bytes < least_bytes(problem):
        return math.inf
    deadline = time.monotonic() + limit_s
    alone_s = limit_s / 3 if memory.staging_bytes else 0.0
    moving_ms = _Moving(problem, budget_bytes - memory.staging_bytes, memory, deadline - alone_s).bound_ms(
        chain, integer
    )
    if not memory.staging_bytes or moving_ms <= problem.keep_all_time_ms:
        return moving_ms
    left_s = deadline - time.monotonic()
    return min(moving_ms, lower_bound_ms(problem, budget_bytes, chain, time_limit_s=left_s, integer=integer))


def quick_bound_ms(problem: Problem, room_bytes: int, memory: SecondMemory) -> float:
    """The same by counting bytes, at the steps that are fullest with everything kept; `room_bytes` is without staging.

    What is above the budget there has left by then and comes back later, in the time that there is, or is computed
    again.
    """
    curve = memory_curve(problem, problem.no_recompute)
    fullest = [int(step) for step in curve.argsort(kind="stable")[::-1][:FULLEST] if curve[step] > room_bytes]
    times_ms = [op.time_ms for op in problem.forward] + [op.time_ms for op in problem.backward]
    begins_ms = [0.0, *accumulate(times_ms)]
    live = Tables(problem)
    extra_ms = 0.0
    for step in fullest:
        kept_bytes, renewed_bytes = _bytes_at(problem, live, step)
        out = memory.out.bytes_per_ms, begins_ms[step]
        back = memory.back.bytes_per_ms, begins_ms[-1] - begins_ms[step + 1]
        shares = sorted((live.time[index] / size, live.time[index], size) for index, size in renewed_bytes.items())
        extra_ms = max(extra_ms, _least_extra_ms(kept_bytes - room_bytes, shares, out, back))
    return problem.keep_all_time_ms + extra_ms * (1 - 1e-9)


def _bytes_at(problem: Problem, live: Tables, step: int) -> tuple[int, dict[int, int]]:
    """What is alive at a step if all is kept that the backward needs later; of it, by operation, what may be absent."""
    turn = live.count
    if step < turn:
        own, made = {*live.inputs[step], *live.renewed[step]}, step
        fixed_bytes = live.held_until(step) + live.workspace[step]
    else:
        own, made = set(live.needs[step - turn]), turn
        fixed_bytes = live.held_bytes + live.peak[step - turn]
    later = set[int]().union(*live.needs[max(0, step - turn + 1) :])
    absent: dict[int, int] = {}
    total_bytes = fixed_bytes + sum(live.size[item] for item in own)
    for item in later - own:
        producer, size = live.producer[item], live.size[item]
        if producer <= made and size:
            total_bytes += size
            absent[producer] = absent.get(producer, 0) + size
    return total_bytes, {index: size for index, size in absent.items() if live.recomputable[index]}


def _least_extra_ms(
    excess_bytes: int,
    shares: list[tuple[float, float, int]],
    out: tuple[float, float],
    back: tuple[float, float],
) -> float:
    """The least time beyond that of the step in which so many bytes are computed again, or moved.

    `shares` are the operations that may be computed again, those with the most bytes for their time first; `out` and
    `back` the bytes per millisecond of each link, and its time in a step that takes nothing more.
    """
    ends_ms = [0.0, *accumulate(time_ms for _, time_ms, _ in shares)]
    sums = [0, *accumulate(size for _, _, size in shares)]

    def covered(extra_ms: float) -> float:
        whole = bisect_right(ends_ms, extra_ms) - 1
        bytes_again = float(sums[whole])
        if whole < len(shares) and shares[whole][1] > 0:
            bytes_again += shares[whole][2] * min(1.0, (extra_ms - ends_ms[whole]) / shares[whole][1])
        return bytes_again + min(speed * (given_ms + extra_ms) for speed, given_ms in (out, back))

    low, high = 0.0, max(excess_bytes, 0) / min(out[0], back[0])
    if covered(low) >= excess_bytes:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if covered(middle) >= excess_bytes else (middle, high)
    return low


class _Moving:
    """The bound of the plans that move something, or nothing, beside staging: `room_bytes` is what that leaves."""

    def __init__(self, problem: Problem, room_bytes: int, memory: SecondMemory, deadline: float) -> None:
        self.problem = problem
        self.room_bytes = room_bytes
        self.memory = memory
        self.deadline = deadline
        self.keep_all_ms = problem.keep_all_time_ms
        links_ms = sum(
            memory.out.time_ms(data.size_bytes) + memory.back.time_ms(data.size_bytes) for data in problem.data
        )
        # A plan that waits longer is above the bound: variables need an end.
        self.most_extra_ms = 10 * max(1.0, self.keep_all_ms) + min(links_ms, MOST_EXTRA * self.keep_all_ms)

    def bound_ms(self, chain: Chain | None, integer: bool) -> float:
        """The highest bound that the groupings give in the time."""
        problem = self.problem
        if self.room_bytes < least_bytes(problem):
            return math.inf
        if not problem.backward or not problem.forward:
            return self.keep_all_ms
        bound_ms = quick_bound_ms(problem, self.room_bytes, self.memory)
        found: list[tuple[float, list[int]]] = []
        for starts in _groupings(problem, chain):
            if len(problem.data) * (len(starts) + MOMENTS) > BUILT_PER_S * self._left_s():
                break
            told = self._told(relaxation_bound(self._relaxation(starts).model, self._left_s()), 1e-9)
            found.append((told, starts))
        bound_ms = max([bound_ms, *(told for told, _ in found)])
        if bound_ms >= self.keep_all_ms + self.most_extra_ms and self._is_infeasible(found):
            return math.inf
        if integer and found and len(problem.forward) <= BRIEF:
            _, starts = max(found, key=lambda one: (one[0], len(one[1])))
            relaxation = self._relaxation(starts)
            relaxation.model.integer = relaxation.integer
            left_s = 0.9 * self._left_s()  # the back end looks at its clock now and then
            if left_s > 0:
                bound_ms = max(bound_ms, self._told(solve(relaxation.model, "scipy", BackendLimits(left_s)), 1e-5))
        return bound_ms

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _relaxation(self, starts: list[int], *, unlinked: bool = False) -> MovesRelaxation:
        return MovesRelaxation(
            self.problem,
            self.room_bytes,
            starts,
            brief=len(self.problem.forward) > BRIEF,
            memory=self.memory,
            most_extra_ms=self.most_extra_ms,
            unlinked=unlinked,
        )

    def _told(self, result: Result, margin: float) -> float:
        """The bound of a program: never beyond what its variables of waiting reach to. Margins as in `refinement`."""
        most_ms = self.keep_all_ms + self.most_extra_ms
        if result.outcome is Outcome.INFEASIBLE:
            return most_ms
        unit_ms = self.keep_all_ms / UNITS or 1.0
        return min(most_ms, self.keep_all_ms + max(0.0, result.bound * unit_ms * (1 - margin)))

    def _is_infeasible(self, found: list[tuple[float, list[int]]]) -> bool:
        """Whether a program has no solution even where transfers take no time."""
        for told, starts in found:
            if told >= self.keep_all_ms + self.most_extra_ms:
                model = self._relaxation(starts, unlinked=True).model
                if relaxation_bound(model, max(self._left_s(), 1.0)).outcome is Outcome.INFEASIBLE:
                    return True
        return False


def _groupings(problem: Problem, chain: Chain | None) -> list[list[int]]:
    """First backward operations of groups. They do not depend on the budget, so that the bound falls as it rises."""
    count = len(problem.backward)
    curve = memory_curve(problem, problem.no_recompute)[len(problem.forward) :]
    fullest = int(curve.argmax())
    apart = {0, fullest, fullest + 1} - {count}
    found = [apart]
    if count <= EACH_APART:
        found.append(set(range(count)))
    else:
        natural = list(range(1, count))
        if chain is not None:
            homes = chain.backward_block
            natural = [stage for stage in natural if homes[stage] != homes[stage - 1]]
        cuts = [natural[len(natural) * place // (CUTS + 1)] for place in range(1, CUTS + 1)] if natural else []
        found += [apart | {cut} for cut in cuts]
    return [sorted(starts) for place, starts in enumerate(found) if starts not in found[:place]]
