"""What was traced and measured of a module under another budget: planning within one more is a solve.

All that plan one module in this process know of each other, as long as they live: a second `Rockmate` of it, a module
whose budget changes. What one of them has measured of such calls serves the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from rkgb import Sample
from rkgb.state.module_state import for_planning
from rockmate.calls.lookup import SpecializationIndex
from rockmate.calls.specialization import Specialization
from rockmate.guards.module import ModuleTraits, TraitsReader
from rockmate.planning.measured import Measured
from rockmate.planning.request import PlanRequest

_MOST = 64  # calls of before
_OF: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[RememberedCalls]] = weakref.WeakKeyDictionary()


class RememberedCalls:
    """What was measured for the plans of one module, those of before included."""

    def __init__(self, model: torch.nn.Module, members: SpecializationIndex, request: PlanRequest) -> None:
        self.request = request  # under which it was measured
        self._model = model
        self._members = members
        self._before: Sequence[Specialization] = ()
        _OF.setdefault(model, weakref.WeakSet()).add(self)

    def keep(self) -> None:
        """The plans that are there go, and what was measured for them stays."""
        self._before = [*self._members, *self._before][:_MOST]

    def find(self, call: Sample, request: PlanRequest) -> Measured | None:
        """What was measured of calls like `call`, of the module as it is; None where nothing was."""
        others = [other for other in _OF.get(self._model, ()) if _is_measured_alike(other.request, request)]
        known = [member for other in others for member in other.members()]
        if not known:
            return None
        with for_planning(self._model):
            traits = TraitsReader(self._model).read()
            return next((one.measured for one in known if _holds(one, call, traits)), None)

    def members(self) -> Iterable[Specialization]:
        """Plans for which something was measured."""
        return (*self._members, *self._before)


def _is_measured_alike(one: PlanRequest, other: PlanRequest) -> bool:
    """Whether two requests differ in what is solved alone."""
    facts = ("pin", "scope", "opaque", "may_branch")
    if one.scope != "step" or any(getattr(one, fact) != getattr(other, fact) for fact in facts):
        return False
    return one.loss is other.loss


def _holds(member: Specialization, call: Sample, traits: ModuleTraits) -> bool:
    """Whether what was measured for `member` is what would be measured for `call`."""
    measured = member.measured
    if member.is_by_size or measured.numbers is not None or measured.settings.have_tensors:
        return False
    reads_data = any(op.is_guard for op in measured.graphs.D_graph)  # which may take another branch with these
    if reads_data or not measured.was_measured_as_now():
        return False
    try:
        return member.mismatch(call, traits) is None
    except Exception:  # noqa: BLE001  arguments that cannot be compared
        return False
