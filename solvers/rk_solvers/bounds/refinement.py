"""Coarse to fine over the whole graph: a relaxation, refined where that tells most.

The relaxation (see `relaxation`) groups the stages of the backward. Its optimum bounds the time of every plan; its plan
is one of least time if it fits the budget after all, and a good start for repair if it does not. Where the groups begin
matters more than how many there are. The first grouping sets the stage of the highest peak apart. The next one adds,
one by one, the beginnings that raise the bound of the linear program most, and moves them as long as that helps. From
there on, the stage in which the relaxation's plan exceeds the budget most is set apart.

With spans (`Relaxation.spans`) the linear program is some times larger, and tight for more groups. Then beginnings are
placed again from where they are, and each is moved at once, as its place within a block tells more than the block.

Of thousands of operations the relaxation is brief, and its linear program alone is solved: seconds in place of minutes,
for a bound that is lower by some tenths of a percent on long chains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rk_solvers.bounds.relaxation import UNITS, Limit, Relaxation
from rk_solvers.liveness import memory_curve, steps_of
from rk_solvers.milp import BackendLimits, Outcome, Result, relaxation_bound, solve
from rk_solvers.problem import Chain, Problem, Recompute

CANDIDATES, CANDIDATES_WITH_SPANS = 48, 24  # places where a group may begin, that are tried at first
TRIED, TRIED_WITH_SPANS = 16, 4  # of these, from the second beginning on: those that raised the bound most before
EFFORT = 2_000_000  # entries of all linear programs solved to place the groups of one grouping, at most
GAIN = 2e-4  # of the step's time: what a beginning must raise the bound by
LARGE = 600  # forward operations above which one program may take seconds: the clock is looked at
BRIEF = 1500  # forward operations above which the relaxation counts bytes at the beginnings of groups alone
REACH, REACH_WITH_SPANS = 16, 8  # stages to either side, to which a beginning is moved


@dataclass(frozen=True, slots=True)
class Target:
    """When a bound is enough, and how long to look for it."""

    enough_ms: float  # stop at a bound of this
    time_limit_s: float
    gap: float = 0.0  # of the recomputation's time, that the integer program may leave
    integer: bool = True  # False: the linear program only


def left_s(deadline: float) -> float:
    """Seconds until a deadline of `time.monotonic`, for a part of the work: a tenth of one at least."""
    return max(0.1, deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class Refinement:
    """A grouping, and what is known from it and those before."""

    problem: Problem
    budget_bytes: int
    chain: Chain | None = None
    starts: tuple[int, ...] = (0,)  # first backward operation of each group
    bound_ms: float = 0.0  # no plan that fits is faster; infinite if none fits
    plan: Recompute | None = field(default=None, hash=False)  # of the relaxation; it may exceed the budget
    rounds: int = 0  # groupings so far
    spans: bool = False  # whether the relaxation has them
    limit: Limit | None = None  # what is assumed; the bound is that of the plans of which it is true
    settled: bool = False  # whether no beginnings are to be placed any more
    complete: bool = True  # whether the last integer program was solved to its end
    alive: Mapping[int, Mapping[int, float]] = field(default_factory=dict, hash=False)  # in its plan, before each group
    gains: Mapping[int, float] = field(default_factory=dict, hash=False)  # what to expect of beginnings

    def advanced(self, incumbent: Recompute, target: Target) -> Refinement:
        """The next grouping and its bound; the same object where there is no other. `incumbent` is a plan to go by."""
        grouped = self._grouped(incumbent, target)
        return self if grouped is self else grouped.solved(target)

    def solved(self, target: Target) -> Refinement:
        """With the bound of its groups: that of the linear program, and of the integer program where that may help."""
        relaxation = self.relaxation(self.starts)
        # The method is the quicker one on large programs that are sparse, and slower on the others.
        method = "highs-ipm" if self.is_brief else "highs"
        result = relaxation_bound(relaxation.model, target.time_limit_s, method)
        found = self._noted(relaxation, result, integer=False)
        if found.bound_ms >= target.enough_ms or result.values is None or not target.integer or self.is_brief:
            return found
        relaxation.model.integer = relaxation.integer
        result = solve(relaxation.model, "scipy", BackendLimits(target.time_limit_s, target.gap))
        alive = {} if result.values is None else relaxation.alive_in(np.round(result.values))
        complete = result.outcome is not Outcome.LIMIT
        return replace(found._noted(relaxation, result, integer=True), complete=complete, alive=alive)

    def placed(self, target: Target) -> Refinement:
        """With groups that begin where that tells most, as the linear program has it; the bound is as it was.

        Where `gains` are known, from a similar problem, the first beginnings are chosen from the most promising ones.
        """
        placement = _Placement(self, target)
        settled = placement.place()
        return replace(self._with(placement.starts), settled=settled, gains=placement.first_gains)

    def with_spans(self, starts: Iterable[int] | None = None) -> Refinement:
        """As it is, but for what follows; in groups that begin at `starts`, where these are given."""
        found = replace(self, spans=True, settled=False)
        return found if starts is None else found._with(set(starts))

    def _grouped(self, incumbent: Recompute, target: Target) -> Refinement:
        """With the next grouping; the same object where there is no other."""
        if self.rounds == 0:
            return self._with(_apart({0}, _fullest_stage(self.problem, incumbent), self.problem))
        if not self.settled and not self.is_brief:  # to place groups takes many programs
            placed = self.placed(target)
            if placed.starts != self.starts:
                return placed
        starts = self._next_apart()
        return self if starts == set(self.starts) else replace(self._with(starts), settled=True)

    def _with(self, starts: set[int]) -> Refinement:
        return replace(self, starts=tuple(sorted(starts)), rounds=self.rounds + 1, alive={})

    def relaxation(self, starts: Iterable[int]) -> Relaxation:
        """The program of a grouping."""
        found = Relaxation(self.problem, self.budget_bytes, sorted(starts), self.spans, brief=self.is_brief)
        if self.limit is not None:
            found.limit(self.limit)
        return found

    @property
    def is_brief(self) -> bool:
        """Whether the problem is so large that the whole relaxation would take minutes."""
        return len(self.problem.forward) > BRIEF

    def _noted(self, relaxation: Relaxation, result: Result, *, integer: bool) -> Refinement:
        """With the bound and the plan of a program."""
        plan = self.plan if result.values is None else relaxation.recompute(result.values)
        if result.outcome is Outcome.INFEASIBLE:
            return replace(self, bound_ms=math.inf)
        return replace(self, plan=plan, bound_ms=max(self.bound_ms, self.bound_of(result, integer=integer)))

    def bound_of(self, result: Result, *, integer: bool) -> float:
        """What the result of a program proves, in ms. The margin is for rounding, and for the back end's tolerance."""
        return math.inf if result.outcome is Outcome.INFEASIBLE else self.proven_ms(result.bound, integer=integer)

    def proven_ms(self, bound: float, *, integer: bool) -> float:
        """What a bound in the unit of the objective proves, in ms, with that margin."""
        extra = max(0.0, bound) / UNITS * (1 - (1e-5 if integer else 1e-9))
        return self.problem.keep_all_time_ms * (1 + extra)

    def units(self, time_ms: float) -> float:
        """What a plan of this time recomputes, in the unit of the objective."""
        return (time_ms / (self.problem.keep_all_time_ms or 1.0) - 1) * UNITS

    def _next_apart(self) -> set[int]:
        """The grouping with one stage more apart: that in which the plan exceeds the budget most."""
        starts = set(self.starts)
        if self.plan is None:
            return starts
        excess = _excess(self.problem, self.plan, self.budget_bytes)
        for stage in sorted(excess, key=lambda stage: (-excess[stage], stage)):
            more = _apart(starts, stage, self.problem)
            if more != starts:
                return more
        return starts


class _Placement:
    """Beginnings of groups under construction, judged by the linear program."""

    def __init__(self, refinement: Refinement, target: Target) -> None:
        self.refinement = refinement
        self.enough = refinement.units(target.enough_ms)
        timed = refinement.spans or len(refinement.problem.forward) > LARGE
        self.deadline = time.monotonic() + target.time_limit_s if timed else math.inf
        self.starts = set(refinement.starts)
        self.needed = {0} if refinement.limit is None else {0, refinement.limit.stage}
        self.left = math.inf if refinement.spans else EFFORT
        self.known: dict[frozenset[int], float] = {}
        self.value = self.judge(self.starts)
        self.gain = dict(refinement.gains)  # by candidate, when it was tried last
        self.first_gains = self.gain  # before another one is added

    def place(self) -> bool:
        """Add beginnings, and move them, while that raises the bound; whether nothing is to be expected of more.

        Without spans that is a fixed effort, once. With them it may take until the time limit, again and again.
        """
        refinement = self.refinement
        natural = _natural_starts(refinement.problem, refinement.chain)
        candidates = _spread(natural, CANDIDATES_WITH_SPANS if refinement.spans else CANDIDATES)
        if refinement.spans:
            self.drop_useless()
        added = self.add_best(candidates)
        self.first_gains = dict(self.gain)
        while added is not None:
            self.drop_useless()
            if refinement.spans and added in self.starts:
                self.move(added)
            added = self.add_best(candidates)
        for start in sorted(self.starts - self.needed):
            self.move(start)
        self.add_best(candidates)
        self.drop_useless()
        return time.monotonic() < self.deadline

    def judge(self, starts: Iterable[int]) -> float:
        """The bound of a grouping, in the unit of the objective; that of none once the effort is spent."""
        key = frozenset(starts)
        if key not in self.known:
            if self.left <= 0 or time.monotonic() >= self.deadline:
                return -math.inf
            model = self.refinement.relaxation(key).model
            self.left -= model.entries
            self.known[key] = relaxation_bound(model, min(60.0, self.deadline - time.monotonic())).bound
        return self.known[key]

    def add_best(self, candidates: list[int]) -> int | None:
        """Add the candidate that raises the bound most, if it is by enough. The most promising ones are tried.

        Returns the candidate; None if there is none, or the bound is enough already.
        """
        if self.value >= self.enough:
            return None
        others = [start for start in candidates if start not in self.starts]
        promising = sorted(others, key=lambda start: (-self.gain.get(start, math.inf), start))
        known = sum(start in self.gain for start in promising)
        tried = TRIED_WITH_SPANS if self.refinement.spans else TRIED
        values = {start: self.judge(self.starts | {start}) for start in promising[: tried if known else None]}
        judged = {start: value for start, value in values.items() if value > -math.inf}
        self.gain |= {start: value - self.value for start, value in judged.items()}
        value, start = max(((value, start) for start, value in values.items()), default=(-math.inf, 0))
        if not value > self.value + GAIN * UNITS:  # nor where both are infinite: nothing fits
            return None
        self.starts, self.value = self.starts | {start}, value
        return start

    def drop_useless(self) -> None:
        """Take out what the bound does not need."""
        for start in sorted(self.starts - self.needed):
            value = self.judge(self.starts - {start})
            if value >= self.value - 1e-6 * UNITS:
                self.starts, self.value = self.starts - {start}, value

    def move(self, start: int) -> None:
        """Move a beginning to the place near it where the bound is highest: in long steps, then in shorter ones."""
        step = (REACH_WITH_SPANS if self.refinement.spans else REACH) // 2
        while step:
            others = self.starts - {start}
            near = [place for place in (start - step, start + step) if place not in self.starts]
            places = [place for place in near if 0 < place < len(self.refinement.problem.backward)]
            value, place = max(((self.judge(others | {place}), place) for place in places), default=(-math.inf, 0))
            if value > self.value + 1e-6 * UNITS:
                self.starts, self.value, start = others | {place}, value, place
            else:
                step //= 2


def _apart(starts: set[int], stage: int, problem: Problem) -> set[int]:
    """The starts with `stage` as a group of its own."""
    return starts | ({stage, stage + 1} - {len(problem.backward)})


def _natural_starts(problem: Problem, chain: Chain | None) -> list[int]:
    """Where the backward passes from one block to the next, or anywhere without a chain."""
    everywhere = range(1, len(problem.backward))
    if chain is None:
        return list(everywhere)
    homes = chain.backward_block
    return [stage for stage in everywhere if homes[stage] != homes[stage - 1]]


def _spread(places: list[int], most: int) -> list[int]:
    """At most `most` of the places, evenly spread."""
    if len(places) <= most:
        return places
    return [places[number * len(places) // most] for number in range(most)]


def _excess(problem: Problem, plan: Recompute, budget_bytes: int) -> dict[int, int]:
    """By stage, the bytes of a plan above the budget."""
    found: dict[int, int] = {}
    for bytes_alive, step in zip(memory_curve(problem, plan).tolist(), steps_of(problem, plan), strict=True):
        if step.stage >= 0 and bytes_alive > budget_bytes:
            found[step.stage] = max(found.get(step.stage, 0), bytes_alive - budget_bytes)
    return found


def _fullest_stage(problem: Problem, plan: Recompute) -> int:
    """The stage of the highest peak in the backward."""
    curve = memory_curve(problem, plan)[len(problem.forward) :]
    return steps_of(problem, plan)[len(problem.forward) + int(curve.argmax())].stage
