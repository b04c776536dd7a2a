"""A bound from the end of the step on: exact for what follows a place, linear programs for what comes before it.

`exact.state_sweep` goes through the step from its end. Of each set of data that may be alive at a place it knows the
least time of all that follows, with each byte counted. Where little is alive at a place, these sets are few. What comes
before is bounded by the relaxation in a few groups (`Relaxation.stop`). The multipliers of one linear program prove a
bound for all sets at once, that is linear in what is alive (Benders, 1962). A set is dropped if both times together
are as long as is asked for. Once none is left, that much is proven of every plan. A sweep that comes to the beginning
with some left has found the plan of least time.

This tells most where what is narrow is late in the backward, as in networks for images. Their first layers hold most,
and compute some operations again and again, which no relaxation in a few groups counts.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rk_solvers.bounds.refinement import Refinement, Target, left_s
from rk_solvers.bounds.relaxation import UNITS, Relaxation
from rk_solvers.exact.state_sweep import States, Sweep, TooMany
from rk_solvers.liveness import alive_before, peak_and_time
from rk_solvers.milp import Floats, Outcome, relaxation_bound
from rk_solvers.problem import BackwardOp, Recompute

MANY, MOST_STATES = 2_000_000, 4_000_000  # at one stage: to drop some before it, and to give up
LOWEST = 0.1  # of the states: those whose average is bounded
RISE = 1e-3  # of the step's time, by which a program must raise the lowest bound for another one to follow
MOST_PROGRAMS = 8  # at one place
ENDING_S = 1.5  # for the last programs, where time is over
DEAR = 0.1  # of the step's time: for a data that cannot be had
SAME = 1e-6  # of the step's time


@dataclass(frozen=True, slots=True)
class Proven:
    """What a sweep proves."""

    bound_ms: float  # no plan is faster
    plan: Recompute | None  # of least time; None if none was found that takes less than what was asked for


def swept(refinement: Refinement, starts: tuple[int, ...], target: Target) -> Proven:
    """A sweep from the end, until a bound of `target.enough_ms` is proven, states are too many, or time is over.

    `starts` are of groups for the linear programs.
    """
    return _Thinned(
        refinement.problem,
        refinement.budget_bytes,
        target.enough_ms - refinement.problem.keep_all_time_ms,
        refinement=refinement,
        starts=starts,
        deadline=time.monotonic() + target.time_limit_s,
    ).prove()


@dataclass(slots=True)
class _Thinned(Sweep):
    """A sweep that drops the states which take too long with what comes before them."""

    most_states: int = MOST_STATES
    refinement: Refinement = field(kw_only=True)
    starts: tuple[int, ...] = field(kw_only=True)  # of groups
    deadline: float = field(kw_only=True)
    thinned: int = -1  # the last stage before which states were dropped
    stage: int = field(init=False)  # the last one that was swept
    left: States = field(default_factory=dict)  # before it
    lowest_ms: float = 0.0  # what is proven of all, where states were dropped

    def prove(self) -> Proven:
        """The whole of it."""
        self.stage, self.left = len(self.problem.backward), {0: (0.0, 0, None)}
        found = self.run()
        keep_all_ms, extra_ms = self.problem.keep_all_time_ms, self.at_most_ms
        if found.recompute is not None:
            extra_ms = peak_and_time(self.problem, found.recompute)[1] - keep_all_ms
        elif not found.proven:
            if self.stage != self.thinned:
                self._thin(self.stage, self.left)
            extra_ms = min(extra_ms, self.lowest_ms)
        return Proven(keep_all_ms + extra_ms - SAME * keep_all_ms, found.recompute)

    def _count(self, states: States) -> None:
        Sweep._count(self, states)
        if time.monotonic() > self.deadline - ENDING_S:
            raise TooMany

    def _stage(self, stage: int, states: States) -> States:
        try:
            self.most_states = self.states + MANY
            before = Sweep._stage(self, stage, states)
        except TooMany:
            if time.monotonic() > self.deadline - ENDING_S:
                raise
            if self.stage != self.thinned:
                states = self._thin(self.stage, states)
            self.most_states = self.states + MOST_STATES
            before = Sweep._stage(self, stage, states)
        self.stage, self.left = stage, before
        return before

    def _thin(self, stage: int, states: States) -> States:
        """The states that may be those of a plan that is fast enough."""
        bounds = self._bounded(stage, states)
        may = (bounds < self.at_most_ms).tolist()
        self.thinned = stage
        self.left = {state: states[state] for state, is_left in zip(states, may, strict=True) if is_left}
        self.lowest_ms = max(self.lowest_ms, float(bounds.min(initial=math.inf)))
        return self.left

    def _bounded(self, stage: int, states: States) -> Floats:
        """By state, the time of what follows, and a bound on that of what comes before, in ms."""
        times = np.array([value[0] for value in states.values()])
        before = np.zeros(len(times))
        if stage == 0 or not states:
            return times
        prices = _Prices(self.refinement, tuple(start for start in self.starts if start < stage), stage)
        alive = prices.alive(list(states))
        rise_ms = RISE * self.problem.keep_all_time_ms
        least, lowest_ms = np.zeros(alive.shape[1]), -math.inf
        for number in range(MOST_PROGRAMS):
            np.maximum(before, prices.before(alive, least, left_s(self.deadline)), out=before)
            total = times + before
            if total.min() >= self.at_most_ms or (number and number % 2 == 0 and total.min() < lowest_ms + rise_ms):
                break
            lowest_ms = total.min() if number % 2 == 0 else lowest_ms
            count = math.ceil(LOWEST * len(total)) if number % 2 else 1
            least = alive[np.argpartition(total, count - 1)[:count]].mean(axis=0)
        return times + before


class _Prices:
    """The linear program of what comes before a stage: what it costs to have data alive there."""

    def __init__(self, refinement: Refinement, starts: tuple[int, ...], stage: int) -> None:
        problem = refinement.problem
        self.relaxation = Relaxation(problem, refinement.budget_bytes, list(starts), spans=True, stop=stage)
        self.items = [item for item in self.relaxation.alive[-1] if problem.data[item].size_bytes]
        self.variables = [self._asked(self.relaxation.alive[-1][item]) for item in self.items]
        self.width = 2 * len(problem.data)
        self.unit_ms = problem.keep_all_time_ms / UNITS or 1.0

    def _asked(self, alive: int) -> int:
        """A variable for how much of a data is asked for. What cannot be had is bought, at a high price."""
        asked, bought = self.relaxation.variable(), self.relaxation.variable()
        self.relaxation.model.cost[bought] = DEAR * UNITS
        self.relaxation.model.add_row([(asked, 1.0), (alive, -1.0), (bought, -1.0)], upper=0.0)
        return asked

    def alive(self, states: list[int]) -> NDArray[np.float32]:
        """By state and data, whether it is alive."""
        mask, length = (1 << self.width) - 1, (self.width + 7) // 8
        packed = b"".join((state & mask).to_bytes(length, "little") for state in states)
        bits = np.frombuffer(packed, np.uint8).reshape(len(states), length)
        places = 2 * np.array(self.items, dtype=np.int64)
        return (bits[:, places // 8] >> (places % 8).astype(np.uint8) & 1).astype(np.float32)

    def before(self, alive: NDArray[np.float32], least: Floats, time_limit_s: float) -> Floats:
        """In ms, what is proven of each state by the program in which at least so much of each data is alive."""
        model = self.relaxation.model
        for variable, part in zip(self.variables, least.tolist(), strict=True):
            model.lower[variable] = part
        result = relaxation_bound(model, time_limit_s)
        if result.outcome is Outcome.INFEASIBLE:  # whatever is asked for
            return np.full(len(alive), math.inf)
        if result.reduced is None:
            return np.zeros(len(alive))
        slopes = np.maximum(result.reduced[self.variables], 0.0)
        constant = result.bound - float(slopes @ least)
        return np.asarray((constant + alive @ slopes - SAME * UNITS) * self.unit_ms, np.float64)


def starts_before(refinement: Refinement, stage: int, plan: Recompute, seconds: float) -> tuple[int, ...]:
    """Groups of `refinement`, those before a stage placed anew for what a plan has alive there."""
    problem, chain = refinement.problem, refinement.chain
    rest = BackwardOp("what-follows", 0.0, tuple(alive_before(problem, plan, stage)), 0, 0)
    head = replace(problem, backward=(*problem.backward[:stage], rest))
    if chain is not None:
        chain = replace(chain, backward_block=chain.backward_block[: stage + 1])
    coarse = Refinement(head, refinement.budget_bytes, chain, spans=True)
    placed = coarse.placed(Target(math.inf, seconds, integer=False))
    before = [start for start in placed.starts if start < stage]
    return (*before, *(start for start in refinement.starts if start >= stage))
