"""A module that is measured once, and planned for one budget after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rkgb import make_sample
from rockmate.errors import NotPlanned
from rockmate.member import Member
from rockmate.memory.budget import Budget
from rockmate.module import Rockmate
from rockmate.plan import Plan
from rockmate.planning.exchange import plan_with_others
from rockmate.planning.measured import Measured, measure
from rockmate.planning.planner import make_plan, planning
from rockmate.planning.request import PlanRequest, check_request
from rockmate.progress import progress_display

_MEASURED = "_measured"


class Staged(Rockmate):
    """`Rockmate` whose stages are called one by one: measuring takes most of the time, and serves many budgets.

    What was measured is kept, with the tensors of its sample, for `plan_within`; copies and pickles are without it.
    """

    _measured: Measured | None = None

    def measure(self, sample: Any) -> None:
        """Trace and measure calls like `sample`, for `plan_within`. Raises as planning does."""
        call = make_sample(self.original, sample)
        with self._one_at_a_time() as request:
            self.__dict__[_MEASURED] = measure(self.original, call, request)

    def plan_within(self, budget: Budget) -> Plan:
        """Plan what was measured for this budget; plans made before are forgotten, and later ones are within it, too.

        Raises `NotPlanned` where nothing was measured, and `BudgetTooSmall`, which leaves everything as it was.
        """
        measured = self._what_was_measured()
        family = self._family
        with self._one_at_a_time() as request:
            request = replace(request, budget=budget)
            check_request(request)
            measured, planned = plan_with_others(measured, request, self.original, make_plan)
        member = Member.of(self.original, measured, planned)
        split = planned.plan.memory_split
        resolved_bytes = planned.plan.budget_bytes if split is None else split.total_bytes
        family.request = replace(family.request, budget=resolved_bytes)
        family.members = []
        family.adopt(member)
        return planned.plan

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
        """Context of planning, with what is asked for."""
        family = self._family
        with (
            family._turns.planning(),  # the module holds other parameters meanwhile
            progress_display(family.progress) as tell,
            planning(self.original),
        ):
            yield replace(family.request, progress=tell, follow=None)

    def _notes(self) -> dict[str, Any]:
        return {name: value for name, value in super()._notes().items() if name != _MEASURED}
