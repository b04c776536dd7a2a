"""A module that is measured once, and planned for one budget after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from rk_solvers import Solver
from rkgb import Sample, TraceError, make_sample
from rkgb.replay.first_call import FirstCall, left_as_it_was
from rockmate.calls.specialization import Specialization
from rockmate.errors import NotPlanned, PlanMismatch
from rockmate.memory.budget import AboveResidents, Budget
from rockmate.module import Rockmate
from rockmate.plan_files import PlanFile
from rockmate.plan_files.rank_agreement import plan_with_others
from rockmate.plan_files.restore import restore
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured, measure
from rockmate.planning.plan import Plan
from rockmate.planning.planner import make_plan, planning
from rockmate.planning.request import PlanRequest, check_request
from rockmate.planning.share import Share
from rockmate.progress import progress_display

_MEASURED = "_measured"
_FIRST = "_first"


@dataclass(eq=False, slots=True)
class PlannedStage:
    """A plan, and what it was made of."""

    measured: Measured
    planned: LoweredPlan
    asked: Budget  # for which

    @property
    def budget(self) -> Budget:
        """The budget for later plans: the same bytes, or as many above all that training holds."""
        return self.asked if isinstance(self.asked, AboveResidents) else self.planned.plan.whole_budget_bytes


class MeasuredRockmate(Rockmate):
    """`Rockmate` whose stages are called one by one: measuring takes most of the time, and serves many budgets.

    What was measured is kept, with the tensors of its sample, for `plan_within`; copies and pickles are without it.
    """

    _measured: Measured | None = None
    _first: FirstCall | None = None  # where what was measured is a call after the first

    def measure(self, sample: Any) -> None:
        """Trace and measure calls like `sample`, for `plan_within`. Raises as planning does."""
        call = make_sample(self.original, sample)
        model = self.original
        with (
            self._one_at_a_time() as request,
            planning(model),
            left_as_it_was(model, call) as first,
            first.told(),
        ):
            measured, is_later = self._measured_as_calls_are(call, request, first)
        self.__dict__.update({_MEASURED: measured, _FIRST: first if is_later else None})

    def _measured_as_calls_are(self, call: Sample, request: PlanRequest, first: FirstCall) -> tuple[Measured, bool]:
        """What a call takes, and whether it is one after the first, which makes state that no plan of it has."""
        if not first.is_structure:
            try:
                return measure(self.original, call, request), False
            except (TraceError, PlanMismatch):
                if not first.made:
                    raise
        with first.done():
            return measure(self.original, call, request), True

    def _after_first_call(self) -> AbstractContextManager[None]:
        """Context in which the module is as it was measured: where need be, after its first call."""
        return nullcontext() if self._first is None else self._first.done()

    def plan_within(self, budget: Budget) -> Plan:
        """Plan what was measured for this budget; plans made before are forgotten, and later ones are within it, too.

        Raises `NotPlanned` where nothing was measured, and `BudgetTooSmall`, which leaves everything as it was.
        """
        stage = self._planned_within(budget)
        self._take(stage)
        return stage.planned.plan

    def _planned_within(self, budget: Budget, solver: Solver | None = None) -> PlannedStage:
        """A plan that the module does not follow yet, by another solver than the one asked for."""
        measured = self._what_was_measured()
        with self._one_at_a_time() as request, planning(self.original), self._after_first_call():
            request = replace(request, budget=budget, solver=solver or request.solver)
            check_request(request)
            return PlannedStage(*plan_with_others(measured, request, self.original, make_plan), budget)

    def _take(self, stage: PlannedStage) -> None:
        """Follow this plan and no other, and its budget."""
        family = self._family
        family.request = replace(family.request, budget=stage.budget)
        family._share = Share.of(stage.asked, stage.measured)
        family.members.remove(family.members)
        if self._first is None or stage.measured is not self._measured:
            family.adopt(Specialization.of(self.original, stage.measured, stage.planned))
            return
        with self._first.done():  # its code may read parts that are not there before
            make = Specialization.of if stage.measured.settings.have_tensors else Specialization
            family.adopt(make(self.original, stage.measured, stage.planned))
        family._first_makes = self._first.words

    def _follow(self, plan_file: PlanFile, sample: Any) -> None:
        """Follow the plan of a file for calls like `sample`. Raises as `restore`: then everything stays as it was."""
        with self._one_at_a_time() as request:
            stage = PlannedStage(*restore(self.original, sample, request, plan_file), None)
        asked = plan_file.asked
        self._family.request = replace(self._family.request, scope=asked.scope, opaque=asked.opaque)
        self._take(stage)

    def _what_was_measured(self) -> Measured:
        measured = self._measured
        if measured is None:
            raise NotPlanned(
                f"{type(self.original).__name__} was not measured yet: call measure(sample) first. What was measured "
                "is not copied or pickled with a module."
            )
        return measured

    @contextmanager
    def _one_at_a_time(self) -> Iterator[PlanRequest]:
        """Context in which no other thread runs the module, which holds other parameters; with what is asked for."""
        family = self._family
        with family._turns.planning(), progress_display(family.progress) as tell:
            yield replace(family.request, progress=tell, follow=None)

    def _notes(self) -> dict[str, Any]:
        return {name: value for name, value in super()._notes().items() if name not in (_MEASURED, _FIRST)}
