"""Plans that were made elsewhere: in a file, or by the module that was saved or copied."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from rkgb import RockmateError, Sample
from rkgb.process.autocast import Autocast
from rockmate.calls.by_size import PlansBySize
from rockmate.calls.specialization import Specialization
from rockmate.errors import NothingToTrain, PlanFileMismatch
from rockmate.families.choice import FamilyPlans
from rockmate.families.record import restored
from rockmate.families.siblings import resized
from rockmate.guards.inputs import CallPattern
from rockmate.plan_files.content import FamilyRecord, PlanFile
from rockmate.plan_files.kept_families import kept_family
from rockmate.plan_files.restore import restore
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured
from rockmate.planning.request import PlanRequest

Planned = tuple[Measured, LoweredPlan]


class GivenPlans:
    """What a module has of plans that were made elsewhere, until calls come that they are for."""

    def __init__(
        self,
        file: PlanFile | None = None,
        decisions: Iterable[tuple[CallPattern, PortablePlan]] = (),
        is_asked_for: bool = True,
        may_be_cached: bool = False,
    ) -> None:
        """A `file` that is not asked for, but came with the module, may be for another place than this."""
        self.may_be_cached = may_be_cached
        self.file = file  # for the first call
        self.decisions = list(decisions)  # to be followed for such calls, in place of a search
        self._is_asked_for = is_asked_for
        self._stand_in: Sequence[torch.Tensor] = ()  # those of a call that nobody has made

    def copy(self) -> GivenPlans:
        """The same, for another module."""
        return GivenPlans(self.file, self.decisions, self._is_asked_for, self.may_be_cached)

    def decisions_for(self, call: Sample) -> PortablePlan | None:
        """Those to follow for `call`."""
        pattern = CallPattern.of(call, Autocast.now())
        for expected, decisions in self.decisions:
            if replace(expected, flags=None) == pattern:  # measured anew, under whichever flags
                return decisions
        return None

    def planned_first(
        self,
        model: torch.nn.Module,
        call: Sample,
        request: PlanRequest,
        plan: Callable[[Sample, PlanRequest, PortablePlan | None], Specialization],
    ) -> Specialization | None:
        """The plan for a call of the file's sizes, made of `call`, which has others; None where there is no need of it.

        Where no file was given, the user's cache may have one. Raises as `plan` does, where the file was asked for.
        """
        if self.file is None and self.may_be_cached and not self.decisions:
            self.file, self._is_asked_for = kept_family(model, call, request), False
        self.may_be_cached = False
        self._stand_in = () if self.file is None or self.file.family is None else _stand_in(call, self.file.family)
        if not self._stand_in:
            return None
        sizes = ", ".join(str(list(tensor.shape)) for tensor in self._stand_in)
        try:
            return plan(call.with_tensors(list(self._stand_in)), request, None)
        except NothingToTrain:
            return None
        except Exception as error:
            if not self._is_asked_for:
                return None
            if isinstance(error, RockmateError):
                raise
            raise PlanFileMismatch(
                f"the plan was made for calls on {sizes}, which this module does not take: {error}. Plan it by itself."
            ) from error
        finally:
            self._stand_in = ()

    def take_file(
        self, model: torch.nn.Module, call: Sample, request: PlanRequest, by_size: PlansBySize
    ) -> Planned | None:
        """The plan of the file for `call`, and by its sizes those for others; None where there is none left.

        Raises as `restore` where the file was asked for, or `call` stands for another.
        """
        file, self.file = self.file, None
        if file is None:
            return None
        try:
            measured, planned = restore(model, call, request, file)
            # Where costs were measured anew, those of other sizes are not known either.
            if file.family is not None and measured.problem == file.problem:
                family, schedules = restored(file.family, measured)
                by_size.give(measured, FamilyPlans(family, schedules))
        except RockmateError:
            if self._is_asked_for:
                self.file = file
            if self._is_asked_for or any(map(operator.is_, call.tensors, self._stand_in)):
                raise
            return None
        return measured, planned


def _stand_in(call: Sample, record: FamilyRecord) -> list[torch.Tensor]:
    """The tensors of `call`, in the sizes of the file's; none where they have these, or cannot have them."""
    sizes = {
        place: size
        for places, size in zip(record.positions, record.point, strict=False)
        for place in places
        if size > 0
    }
    tensors = call.tensors
    there = all(tensor < len(tensors) and dimension < tensors[tensor].dim() for tensor, dimension in sizes)
    if not there or not all(tensor.is_contiguous() and tensor.numel() for tensor in tensors):
        return []
    if all(tensors[tensor].shape[dimension] == size for (tensor, dimension), size in sizes.items()):
        return []
    return resized(call, sizes).tensors
