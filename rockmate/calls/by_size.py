"""Plans for calls that differ from planned ones in sizes alone: nothing is traced, measured or run for them.

Three calls of different sizes are planned one by one. From then on they are a family (`rockmate.families`), and a call
of other sizes has its plan within milliseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb import GuardError, Sample, make_sample
from rockmate.calls.specialization import Specialization
from rockmate.families.choice import FamilyPlans
from rockmate.families.control import gives_the_same, step_bytes
from rockmate.families.family import LEAST_MEMBERS, family_of
from rockmate.families.sized_plan import PlanOfSize
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits
from rockmate.planning.planner import planning
from rockmate.planning.request import PlanRequest
from rockmate.runtime.double_backward import DoubleBackward

_MOST = 1024  # sizes whose plans are kept; what has not been used for longest goes, and is made again in no time
_MOST_MEASURED = 6  # members of a family
_MOST_REFUSED = 4096


class PlansBySize:
    """The plans of one module for sizes that were not measured."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._families: dict[Hashable, FamilyPlans | None] = {}  # by the plans that they are made of
        self._made: OrderedDict[Hashable, Specialization] = OrderedDict()
        self._refused: set[Hashable] = set()  # calls that are of no family after all, as a step showed

    def forget(self) -> None:
        """The module, or what is known of it, has changed."""
        self._families.clear()
        self._made.clear()
        self._refused.clear()

    def __iter__(self) -> Iterator[Specialization]:
        return iter(tuple(self._made.values()))

    def alike(self, call: Sample) -> tuple[Specialization, ...]:
        """The plan for calls that look like `call`, if it is there."""
        member = self._made.get(CallPattern.of(call).key)
        return () if member is None else (member,)

    def run(
        self,
        call: Sample,
        traits: ModuleTraits,
        planned: Iterable[Specialization],
        request: PlanRequest,
        double_backward: DoubleBackward,
    ) -> tuple[bool, Any]:
        """Whether a call of new sizes is of a family of the plans that are there, and what the module returns by that.

        Steps of the family's first plan, and of sizes above all that were seen before, are compared with the module's
        own, and measured: for nobody else to run within this.
        """
        member = self._new(call, traits, planned, request)
        return (False, None) if member is None else self._first_run(member, call, double_backward)

    def _new(
        self, call: Sample, traits: ModuleTraits, planned: Iterable[Specialization], request: PlanRequest
    ) -> Specialization | None:
        pattern = CallPattern.of(call)
        if pattern.key in self._refused:
            return None
        for members in _by_graph(one for one in planned if _may_be_family(one, pattern, traits)):
            plans = self._plans_of(members)
            member = None if plans is None else self._of_family(plans, members, call, request)
            if member is not None and member.mismatch(call, traits) is None and member.gradients_mismatch() is None:
                return member
        return None

    def _first_run(self, member: Specialization, call: Sample, double_backward: DoubleBackward) -> tuple[bool, Any]:
        """Each shape, and all that autograd saves, is compared with what was computed. Where something differs, nothing
        has happened.
        """
        planned, key = member.planned, member.measured.pattern.key
        assert isinstance(planned, PlanOfSize)
        runner = planned.runner_for(self._model, member.measured, member.bound_settings, checked=True)
        try:
            output = runner.run(call, double_backward)
        except GuardError:
            self._refuse(key)
            return False, None
        member.uses += 1
        self._made[key] = member
        if len(self._made) > _MOST:
            self._made.popitem(last=False)
        return True, output

    def used(self, member: Specialization) -> None:
        """`member` has run another call."""
        member.uses += 1
        self._made.move_to_end(member.measured.pattern.key)

    def _refuse(self, key: Hashable) -> None:
        if len(self._refused) > _MOST_REFUSED:
            self._refused.clear()
        self._refused.add(key)

    def _of_family(
        self, plans: FamilyPlans, members: Sequence[Specialization], call: Sample, request: PlanRequest
    ) -> Specialization | None:
        budget = request.budget
        budget_bytes = budget if isinstance(budget, int) else members[0].plan.budget_bytes
        found = plans.plan_for(call, request, budget_bytes)
        if found is None:
            return None
        measured, planned = found
        member = Specialization(self._model, measured, planned, _settings=members[0].runner.settings)
        if plans.is_new_ground(planned.point):
            with planning(self._model):
                sample = make_sample(self._model, call)
                if not gives_the_same(self._model, member.runner, measured, sample, request.loss):
                    self._refuse(measured.pattern.key)
                    return None
                taken_bytes = step_bytes(self._model, member.runner, measured, sample, request.loss)
            planned.plan = replace(planned.plan, measured_peak_bytes=taken_bytes)
            if taken_bytes > budget_bytes:
                self._refuse(measured.pattern.key)
                return None
            plans.was_seen(planned.point)
        return member

    def _plans_of(self, members: Sequence[Specialization]) -> FamilyPlans | None:
        """The family of these plans; None where they are none."""
        by_pattern = {one.measured.pattern.key: one for one in members}
        chosen = list(by_pattern.values())[-_MOST_MEASURED:]
        key = frozenset(map(id, chosen))
        if key not in self._families:
            family = family_of([one.measured for one in chosen]) if len(chosen) >= LEAST_MEMBERS else None
            plans = None if family is None else FamilyPlans(family, [(one.measured, one.planned) for one in chosen])
            self._families[key] = plans
        return self._families[key]


def _may_be_family(one: Specialization, pattern: CallPattern, traits: ModuleTraits) -> bool:
    measured = one.measured
    if measured.residents is not None or measured.traits != traits:
        return False
    mine = measured.pattern
    if mine.skeleton != pattern.skeleton or len(mine.traits) != len(pattern.traits):
        return False
    return all(a.but_for_sizes == b.but_for_sizes for a, b in zip(mine.traits, pattern.traits, strict=True))


def _by_graph(members: Iterable[Specialization]) -> list[list[Specialization]]:
    """Those of the same operations and decisions."""
    found: list[tuple[Any, list[Specialization]]] = []
    for one in members:
        measured = one.measured
        asked = (*(measured.graphs.B_graph.questions or ()), *(measured.asked_sizes or ()))
        answers = [question.answer for question in asked]
        operations = [op.name for op in measured.graphs.D_graph]
        facts = (operations, answers, measured.settings.by_place, measured.pinned)
        group = next((group for known, group in found if known == facts), None)
        if group is None:
            found.append((facts, group := []))
        group.append(one)
    return [group for _, group in found]
