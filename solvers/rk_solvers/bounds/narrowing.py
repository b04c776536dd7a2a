"""Relaxations for budgets just above the smallest one: groups begin where little room is left beside what is needed.

The linear program, by which `refinement` places groups, gains nothing from a stage that leaves little room, as it may
have a part of each data alive there. The integer program does. So the narrowest stages are set apart, and its groups
are divided, a few more each time, where its plan is wrong (`dividing`), as long as it is solved in time. Where telling
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
from rk_solvers.liveness import Tables, peak_and_time
from rk_solvers.problem import Problem, Recompute

APART = 2  # of the narrowest stages, that are set apart
PLACES = 3  # behind which cases are told apart for trial
RAISED = 1e-3  # of the step's time, by which a round of cases must raise their bound for another one to follow
NEAR = 3  # stages to either side among which one is the narrowest


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What goes on from a `Refinement`, and may be asked like one."""

    coarse: Refinement  # from which it begins
    refinement: Refinement  # with spans: the last groups
    rounds: int = 0  # of all kinds
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
        if self.rounds == 0:
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
        return self._further(refinement=refinement, cases=found)

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
