"""Relaxations for budgets just above the smallest one: groups begin where little room is left beside what is needed.

The linear program, by which `refinement` places groups, gains nothing from a stage that leaves little room, as it may
have a part of each data alive there. Where telling cases of what is alive at one of these places raises the bound at
once, that is gone on with, as long as it raises it further (`branching`). The integer program gains from such stages
itself: the narrowest ones are set apart, a few more each time, in the relaxation with spans, as long as that is solved
in time. After that, beginnings are placed by the linear program once more, with spans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rk_solvers.bounds.branching import Branching
from rk_solvers.bounds.refinement import Refinement, Target
from rk_solvers.liveness import Tables
from rk_solvers.problem import Problem, Recompute

APART = (3, 5, 7, 10, 14)  # of the narrowest stages, that are set apart in the rounds
RAISED = 1e-3  # of the step's time, by which a round of cases must raise their bound for another one to follow
NEAR = 3  # stages to either side among which one is the narrowest


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What goes on from a `Refinement`, and may be asked like one."""

    coarse: Refinement  # from which it begins
    refinement: Refinement  # with spans: the last groups
    rounds: int = 0  # of all kinds
    programs: int = 0  # rounds of integer programs with narrow stages apart
    branching: Branching | None = None
    is_branching: bool = True  # whether the next round is one of cases

    @staticmethod
    def of(refinement: Refinement) -> Narrowing:
        """To go on from there."""
        return Narrowing(refinement, refinement.with_spans())

    @property
    def bound_ms(self) -> float:
        """No plan that fits is faster."""
        return max(self.refinement.bound_ms, 0.0 if self.branching is None else self.branching.bound_ms)

    @property
    def plan(self) -> Recompute | None:
        """That of the last integer program; it may exceed the budget."""
        return self.refinement.plan

    def advanced(self, incumbent: Recompute, target: Target) -> Narrowing:
        """Further by one round; the same object where there is nothing more to do. `incumbent` is a plan to go by."""
        if self.refinement.is_brief:
            return self
        if self.rounds == 0:
            deadline = time.monotonic() + target.time_limit_s
            refinement = self.refinement.with_spans(self._starts(APART[0]))
            return self._further(branching=Branching.worth(refinement, self.coarse, deadline))
        if self.is_branching and self.branching is not None:
            return self._branched(self.branching, target)
        if self.programs < len(APART) and self.refinement.complete:
            refinement = self.refinement.with_spans(self._starts(APART[self.programs]))
            if refinement.starts != self.refinement.starts:
                return self._further(refinement=refinement.solved(target), programs=self.programs + 1)
        further = self.refinement.advanced(incumbent, target)
        if further is not self.refinement:
            return self._further(refinement=further)
        return self if self.branching is None else self._branched(self.branching, target)

    def _branched(self, branching: Branching, target: Target) -> Narrowing:
        """By a round of cases; the same object where nothing more is to be expected of them."""
        further = branching.advanced(target)
        if further is branching and not self.is_branching:
            return self
        raised_ms = further.bound_ms - branching.bound_ms
        is_branching = bool(further.cases) and raised_ms >= RAISED * self.coarse.problem.keep_all_time_ms
        return self._further(branching=further, is_branching=is_branching)

    def _starts(self, apart: int) -> set[int]:
        """Beginnings of groups, so many of the narrowest stages among them."""
        return {*self.coarse.starts, *_begun_at(self.coarse.problem, self._narrow()[:apart])}

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
