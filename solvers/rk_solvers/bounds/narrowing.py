"""Relaxations for budgets just above the smallest one: groups begin where little room is left beside what is needed.

The linear program, by which `refinement` places groups, gains nothing from a stage that leaves little room, as it may
have a part of each data alive there. The integer program does. So the narrowest stages are set apart, and its groups
are divided, a few more each time, where its plan is wrong (`dividing`), as long as it is solved in time. Where the
narrowest stage is a late one, and much is recomputed behind it, that is swept exactly first (`sweeping`). Where telling
cases of what is alive at one of the narrow places proves much of the plan known, these come first, as long as they
prove more (`cases`). After that, beginnings are placed by the linear program once more, with spans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rk_solvers.bounds.cases import Cases, worth
from rk_solvers.bounds.dividing import divided
from rk_solvers.bounds.refinement import Refinement, Target, left_s
from rk_solvers.bounds.sweeping import starts_before, swept
from rk_solvers.liveness import Tables, peak_and_time
from rk_solvers.problem import Problem, Recompute

APART = 2  # of the narrowest stages, that are set apart
PLACES = 3  # behind which cases are told apart for trial
RAISED = 1e-3  # of the step's time, by which a round of cases must raise their bound for another one to follow
LATE = 0.5  # of the backward operations: the narrowest one is after them where it is late
BEHIND = 0.25  # of what the plan known recomputes: so much is behind that stage where a sweep may tell much
SWEPT_GAP = 0.02  # of a plan's time: what a first sweep is to leave
PREPARING_S = 5.0  # to place groups for a sweep
SHARE, SWEEP_SHARE = 0.4, 0.85  # of the time that is left, for one round, and for a sweep
NEAR = 3  # stages to either side among which one is the narrowest


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What goes on from a `Refinement`, and may be asked like one."""

    coarse: Refinement  # from which it begins
    refinement: Refinement  # with spans: the last groups
    rounds: int = 0  # of all kinds
    is_begun: bool = False  # whether the narrowest stages are apart
    swept_starts: tuple[int, ...] = ()  # of groups before what is swept, once they are placed
    asked_ms: float = math.inf  # of the last sweep
    cases: Cases | None = None
    is_telling: bool = True  # whether the next round is one of cases

    @staticmethod
    def of(refinement: Refinement) -> Narrowing:
        """To go on from there."""
        return Narrowing(refinement, refinement.with_spans())

    @property
    def bound_ms(self) -> float:
        """No plan that fits is faster."""
        return max(self.refinement.bound_ms, 0.0 if self.cases is None else self.cases.bound_ms)

    @property
    def plan(self) -> Recompute | None:
        """That of the last integer program; it may exceed the budget."""
        return self.refinement.plan

    def advanced(self, incumbent: Recompute, target: Target) -> Narrowing:
        """Further by one round; the same object where there is nothing more to do. `incumbent` is a plan to go by."""
        if self.refinement.is_brief:
            return self
        if self._may_sweep(incumbent):
            return self._swept(incumbent, target) if self.swept_starts else self._prepared(incumbent, target)
        if not self.is_begun:
            return self._begun(incumbent, target)
        if self.is_telling and self.cases is not None:
            return self._told(self.cases, target)
        if self.refinement.complete and self.refinement.alive:
            deadline = time.monotonic() + target.time_limit_s
            starts = divided(self.refinement, target.time_limit_s)
            if starts != set(self.refinement.starts):
                left = replace(target, time_limit_s=left_s(deadline))
                refinement = self.refinement.with_spans(starts).solved(left)
                return self._further(refinement=refinement, is_telling=self._may_tell())
        further = self.refinement.advanced(incumbent, target)
        if further is not self.refinement:
            return self._further(refinement=further, is_telling=self._may_tell())
        return self if self.cases is None else self._told(self.cases, target)

    def _may_tell(self) -> bool:
        """Whether more may be proven by cases."""
        return self.cases is not None and not self.cases.is_over

    def _begun(self, incumbent: Recompute, target: Target) -> Narrowing:
        """With the narrowest stages apart, and cases, where these are worth it."""
        deadline = time.monotonic() + target.time_limit_s
        problem, narrow = self.coarse.problem, self._narrow()
        starts = {*self.coarse.starts, *_begun_at(problem, narrow[:APART])}
        refinement = self.refinement.with_spans(starts).solved(target)
        behind = [stage + 1 for stage in narrow[:PLACES] if stage + 1 < len(problem.backward)]
        plan = incumbent if peak_and_time(problem, incumbent)[0] <= self.coarse.budget_bytes else None
        found = worth(replace(self.coarse, bound_ms=refinement.bound_ms), behind, plan, left_s(deadline))
        return self._further(refinement=refinement, cases=found, is_begun=True)

    def share(self, incumbent: Recompute) -> float:
        """Of the time that is left, what the next round is worth."""
        return SWEEP_SHARE if self._may_sweep(incumbent) else SHARE

    def _may_sweep(self, incumbent: Recompute) -> bool:
        """Whether the next round is for a sweep: the first one, or one that is asked for less than the last."""
        problem = self.coarse.problem
        peak_bytes, time_ms = peak_and_time(problem, incumbent)
        behind = self._behind()
        if peak_bytes > self.coarse.budget_bytes or behind <= LATE * len(problem.backward):
            return False
        again_ms = Tables(problem).time
        behind_ms = math.fsum(again_ms[index] for group in incumbent[behind:] for index in group)
        if behind_ms < BEHIND * (time_ms - problem.keep_all_time_ms):
            return False
        asked_ms = time_ms * (1 - SWEPT_GAP)
        return self.bound_ms < asked_ms < self.asked_ms - RAISED * problem.keep_all_time_ms

    def _prepared(self, incumbent: Recompute, target: Target) -> Narrowing:
        """With groups for a sweep."""
        seconds = min(PREPARING_S, target.time_limit_s)
        return self._further(swept_starts=starts_before(self.refinement, self._behind(), incumbent, seconds))

    def _swept(self, incumbent: Recompute, target: Target) -> Narrowing:
        """By a sweep, with the narrowest stage in what is swept first of all."""
        asked_ms = peak_and_time(self.coarse.problem, incumbent)[1] * (1 - SWEPT_GAP)
        enough_ms = min(target.enough_ms, asked_ms)
        found = swept(self.refinement, self.swept_starts, replace(target, enough_ms=enough_ms))
        bound_ms = max(self.refinement.bound_ms, found.bound_ms)
        plan = found.plan or self.refinement.plan
        return self._further(refinement=replace(self.refinement, bound_ms=bound_ms, plan=plan), asked_ms=asked_ms)

    def _behind(self) -> int:
        """The stage behind the narrowest one that any follows; 0 where there is none."""
        last = len(self.coarse.problem.backward) - 1
        return next((stage + 1 for stage in self._narrow() if stage < last), 0)

    def _told(self, cases: Cases, target: Target) -> Narrowing:
        """By a round of cases; the same object where nothing more is to be expected of them."""
        further = cases.advanced(target)
        if further is cases and not self.is_telling:
            return self
        raised_ms = further.bound_ms - cases.bound_ms
        is_telling = not further.is_over and raised_ms >= RAISED * self.coarse.problem.keep_all_time_ms
        return self._further(cases=further, is_telling=is_telling)

    def _further(self, **changes: object) -> Narrowing:
        return replace(self, rounds=self.rounds + 1, **changes)  # type: ignore[arg-type]

    def _narrow(self) -> list[int]:
        """Stages that leave less room beside what they need than those around them: the narrowest first."""
        problem = self.coarse.problem
        used = list(_used_bytes(problem, Tables(problem)))

        def is_narrowest(stage: int) -> bool:
            around = used[max(0, stage - NEAR) : stage + NEAR + 1]
            return used[stage] == max(around) and (stage == 0 or used[stage - 1] < used[stage])

        return sorted(filter(is_narrowest, range(len(used))), key=lambda stage: (-used[stage], stage))


def _used_bytes(problem: Problem, live: Tables) -> Iterator[float]:
    """Of each backward operation, whatever the plan."""
    for stage, op in enumerate(problem.backward):
        yield op.peak_bytes + math.fsum(live.size[item] for item in live.needs[stage])


def _begun_at(problem: Problem, stages: list[int]) -> set[int]:
    """Beginnings of groups that have these stages for themselves."""
    return {start for stage in stages for start in (stage, stage + 1) if start < len(problem.backward)}
