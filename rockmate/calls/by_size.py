"""Plans for calls that differ from planned ones in sizes alone: nothing is traced, measured or run for them.

Calls of three different sizes are a family (`rockmate.families`), from which on one of other sizes has its plan within
milliseconds: those that were planned one by one, and, where they are fewer, smaller ones that are cut out of a call and
measured beside them.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from rkgb import AllGraphs, GuardError, Sample, make_sample
from rkgb.devices.out_of_memory import if_it_fits
from rkgb.process.ranks import has_other_ranks
from rockmate.calls.improvements import WORTH, Improvements
from rockmate.calls.specialization import Specialization
from rockmate.calls.told import Told
from rockmate.errors import SizeMismatch
from rockmate.families.choice import FamilyPlans
from rockmate.families.control import gives_the_same, step_bytes
from rockmate.families.family import LEAST_MEMBERS, Family, family_of
from rockmate.families.record import recorded
from rockmate.families.siblings import resized, siblings
from rockmate.families.sized_plan import PlanOfSize
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits
from rockmate.plan_files.content import FamilyRecord, PlanFile
from rockmate.plan_files.kept_families import keep_family
from rockmate.plan_files.record import plan_file_of
from rockmate.planning.measured import Measured, measure
from rockmate.planning.planner import planning
from rockmate.planning.request import PlanRequest
from rockmate.progress import no_progress
from rockmate.regions.any_size import code_of, has_parts_of_one_size
from rockmate.runtime.double_backward import DoubleBackward
from rockmate.runtime.runner import Runner

_MOST = 1024  # sizes whose plans are kept; what has not been used for longest goes, and is made again in no time
_MOST_MEASURED = 6  # members of a family
_MOST_REFUSED = 4096
_ATTEMPTS = 3  # schedules that are tried for one call


class PlansBySize:
    """The plans of one module for sizes that were not measured."""

    def __init__(self, model: torch.nn.Module, told: Told, use_cache: bool = False) -> None:
        self._model = model
        self._use_cache = use_cache
        self._told = told
        # By the plans that they are made of, which are kept beside.
        self._families: dict[Hashable, tuple[FamilyPlans | None, Sequence[Specialization]]] = {}
        self._made: OrderedDict[Hashable, Specialization] = OrderedDict()
        # Smaller calls, cut out of one that was made, by the largest plan that they are to be of one family with; what
        # was measured of them stands beside it, and nothing where it was in vain.
        self._siblings: dict[Specialization, list[Measured]] = {}
        self._given: list[tuple[AllGraphs, FamilyPlans]] = []  # families of plans that were made elsewhere
        self._grouped: tuple[tuple[Specialization, ...], list[list[Specialization]]] = (), []
        self._refused: set[Hashable] = set()  # calls that are of no family after all, as a step showed
        self._preferred: set[Hashable] = set()  # calls that have plans of their own, and better ones by their sizes
        # It does not hold this object, which holds it: what goes on in the background ends with the module.
        self.improvements = Improvements(self._told_of_better())

    def _told_of_better(self) -> Callable[[FamilyPlans, int], None]:
        myself = weakref.ref(self)

        def tell(plans: FamilyPlans, budget_bytes: int) -> None:
            known = myself()
            if known is not None:
                known.has_better(plans, budget_bytes)

        return tell

    def forget(self) -> None:
        """The module, or what is known of it, has changed."""
        self._families.clear()
        self._made.clear()
        self._grouped = (), []
        self._siblings.clear()
        self._given.clear()
        self._refused.clear()
        self._preferred.clear()
        self.improvements.forget()

    def give(self, measured: Measured, plans: FamilyPlans) -> None:
        """Take `plans` for other sizes than what was `measured`, until three sizes were measured here."""
        self._given.append((measured.graphs, plans))

    def file_of(self, member: Specialization, members: Iterable[Specialization], request: PlanRequest) -> PlanFile:
        """The plan of `member`, one of those that were measured for the request, and what is known of other sizes."""
        file = plan_file_of(self._model, member.measured, member.plan, request)
        return structs.replace(file, family=self._record_of(member, members))

    def saved(self, members: Sequence[Specialization], request: PlanRequest) -> PlanFile | None:
        """The plan used last by which something is known of other sizes."""
        for member in members:
            record = self._record_of(member, members)
            if record is not None:
                file = plan_file_of(self._model, member.measured, member.plan, request)
                return structs.replace(file, family=record)
        return None

    def _record_of(self, member: Specialization, members: Iterable[Specialization]) -> FamilyRecord | None:
        """What is known of other sizes by a plan; None where nothing is that a file with this plan could tell."""
        plans, alike = self._beside(member, members)
        if plans is None:
            return None
        family: Family | None = plans.family
        if plans.family.base.graphs is not member.measured.graphs:
            beside = [found for one in alike for found in self._siblings.get(one, ())]
            others = [one.measured for one in alike if one is not member]
            family = family_of([member.measured, *others[: _MOST_MEASURED - 1], *beside])
        # Where stages of it were joined, the file's call has others than the family.
        if family is None or family.base.graphs is not member.measured.graphs or family.parts:
            return None  # parts are compiled for the call of a file alone
        return recorded(family, plans.schedules) if family.base.gradients == member.measured.gradients else None

    def copy_for(self, twin: PlansBySize, pairs: Iterable[tuple[Specialization, Specialization]]) -> None:
        """Let `twin` have what is known of other sizes by plans, for the same plans of a copy of the module."""
        pairs = tuple(pairs)
        for member, other in pairs:
            plans, _ = self._beside(member, [one for one, _ in pairs])
            if plans is not None and plans.family.base.graphs is member.measured.graphs:
                twin.give(other.measured, FamilyPlans(plans.family, plans.schedules))

    def _beside(
        self, member: Specialization, members: Iterable[Specialization]
    ) -> tuple[FamilyPlans | None, list[Specialization]]:
        """The family of a plan, if there is one, and those of its plans that were measured."""
        pattern, traits = member.measured.pattern, member.measured.traits
        for alike in self._by_graph(one for one in members if _may_be_family(one, pattern, traits)):
            if any(one is member for one in alike):
                return self._plans_of(alike), alike
        return None, []

    def __iter__(self) -> Iterator[Specialization]:
        return iter(tuple(self._made.values()))

    def alike(self, call: Sample) -> tuple[Specialization, ...]:
        """The plan for calls that look like `call`, if it is there."""
        member = self._made.get(CallPattern.of(call).key) if self._made else None
        return () if member is None else (member,)

    def prefers(self, call: Sample) -> bool:
        """Whether a better plan than its own is there for `call`, and is still to be made."""
        if not self._preferred:
            return False
        return CallPattern.of(call).key in self._preferred

    def has_better(self, plans: FamilyPlans, budget_bytes: int) -> None:
        """A family has a better schedule for some sizes: for which ones shows when they come again."""
        for key, member in tuple(self._made.items()):
            if not member.plan.keeps_all:  # else nothing is better
                del self._made[key]
        for one in next((members for known, members in self._families.values() if known is plans), ()):
            best_ms = plans.best_ms(one.measured.pattern, budget_bytes)
            if best_ms is not None and best_ms < (1 - WORTH) * one.plan.time_ms:
                self._preferred.add(one.measured.pattern.key)

    def run(
        self,
        call: Sample,
        traits: ModuleTraits,
        planned: Iterable[Specialization],
        request: PlanRequest,
        double_backward: DoubleBackward,
    ) -> tuple[bool, Any]:
        """Whether a call of new sizes is of a family of the plans that are there, and what the module returns by that.

        Steps of a schedule's first plan, and of sizes well above all that were seen before, are compared with the
        module's own, and measured: for nobody else to run within this.
        """
        planned = tuple(planned)
        while True:
            for member, runner in self._new(call, traits, planned, request):
                ran, output = self._first_run(member, runner, call, double_backward)
                if ran:
                    return True, output
            if not self._has_siblings(call, traits, planned, request):
                return False, None

    def make(self, call: Sample, traits: ModuleTraits, planned: Iterable[Specialization], request: PlanRequest) -> None:
        """Have a plan by its sizes for a call that has one of its own, for which all was measured; see `prefers`."""
        key = CallPattern.of(call).key
        self._preferred.discard(key)
        for member, _ in self._new(call, traits, planned, request):
            self._made[key] = member
            return

    def _new(
        self, call: Sample, traits: ModuleTraits, planned: Iterable[Specialization], request: PlanRequest
    ) -> Iterator[tuple[Specialization, Runner]]:
        """Plans for `call` and what runs it first, of one family after the other: it may take the branch of any."""
        pattern = CallPattern.of(call)
        for members in self._by_graph(one for one in planned if _may_be_family(one, pattern, traits)):
            if pattern.key in self._refused:
                return
            plans = self._plans_of(members)
            member = None if plans is None else self._of_family(plans, members, call, request)
            if member is None or member.gradients_mismatch() is not None:
                continue
            assert isinstance(member.planned, PlanOfSize)
            runner = member.planned.runner_for(self._model, member.measured, member.bound_settings, checked=True)
            if runner.mismatch(call, traits) is None:
                yield member, runner

    def _has_siblings(
        self, call: Sample, traits: ModuleTraits, planned: Iterable[Specialization], request: PlanRequest
    ) -> bool:
        """Measure smaller calls, so many as lack to a family that `call` may be of; whether that was done."""
        pattern = CallPattern.of(call)
        if pattern.key in self._refused or has_other_ranks():
            return False
        for members in self._by_graph(one for one in planned if _may_be_family(one, pattern, traits)):
            largest = max(members, key=lambda one: one.measured.problem.keep_all_time_ms)
            lacking = LEAST_MEMBERS - len(_members_of(members))
            if lacking <= 0 or largest in self._siblings:
                continue
            self._siblings[largest] = []
            samples = siblings(call, largest.measured.pattern, min(lacking, LEAST_MEMBERS - 1))
            if samples and lacking == LEAST_MEMBERS:  # what was measured is of code for its sizes alone
                samples = [resized(call, {}), *samples]
            alone = replace(request, progress=no_progress, chosen_kernels=largest.measured.kernels)
            if largest.measured.regions is not None:
                alone = replace(alone, chosen_regions=largest.measured.regions, of_any_size=True)
            # The module may take no such sizes; what is warned of was told of the plan.
            with contextlib.suppress(Exception), self._told.once(), planning(self._model):
                self._siblings[largest] = [measure(self._model, sample, alone, largest.measured) for sample in samples]
            if self._siblings[largest]:
                self._told.tell(
                    f"{type(self._model).__name__} is called with other sizes than its plan is for: from here on such "
                    "calls have plans made of what was measured of others, within the same budget, and none is told of "
                    "any more. `plans` lists them."
                )
                return True
        return False

    def _first_run(
        self, member: Specialization, runner: Runner, call: Sample, double_backward: DoubleBackward
    ) -> tuple[bool, Any]:
        """Each shape, and all that autograd saves, is compared with what was computed. Where something differs, or the
        data take another branch, nothing has happened.
        """
        key = member.measured.pattern.key
        try:
            output = runner.run(call, double_backward)
        except SizeMismatch:
            self._refuse(key)
            return False, None
        except GuardError:
            return False, None
        self.improvements.watch(member, output)
        member.uses += 1
        self._made[key] = member
        if len(self._made) > _MOST:
            self._made.popitem(last=False)
        return True, output

    def used(self, member: Specialization) -> None:
        """`member` has run another call."""
        member.uses += 1
        self._made.move_to_end(member.measured.pattern.key)

    def _by_graph(self, members: Iterable[Specialization]) -> list[list[Specialization]]:
        """Those of the same operations and decisions; of the same plans as before, what was found then."""
        members = tuple(members)
        known, found = self._grouped
        if len(known) != len(members) or any(map(operator.is_not, known, members)):
            found = _by_graph(members)
            self._grouped = members, found
        return found

    def _refuse(self, key: Hashable) -> None:
        if len(self._refused) > _MOST_REFUSED:
            self._refused.clear()
        self._refused.add(key)

    def _of_family(
        self, plans: FamilyPlans, members: Sequence[Specialization], call: Sample, request: PlanRequest
    ) -> Specialization | None:
        budget = request.budget
        budget_bytes = budget if isinstance(budget, int) else members[0].plan.budget_bytes
        for _ in range(_ATTEMPTS):
            found = plans.plan_for(call, request, budget_bytes)
            if found is None:
                return None
            measured, planned = found
            if planned.plan.peak_bytes > budget_bytes:
                why = "between forward and backward more is taken than was assumed, as no loss was given"
                self._told.of_loss(type(self._model).__name__, budget_bytes, why)
            member = Specialization(self._model, measured, planned, _settings=members[0].runner.settings)
            if plans.is_new_ground(planned):
                is_within = self._is_within(member, call, request, budget_bytes, compared=plans.is_new)
                if is_within is None:
                    return None
                if not is_within:
                    plans.drop(planned)
                    continue
                is_news = plans.is_new and all(given is not plans for _, given in self._given)
                plans.was_seen(planned)
                if is_news and self._use_cache:
                    with contextlib.suppress(Exception):  # what is not kept is made again
                        keep_family(self._model, call, request, lambda: self.file_of(members[0], members, request))
            self.improvements.ask_for_family(plans, budget_bytes, request)
            return member
        return None

    def _is_within(
        self, member: Specialization, call: Sample, request: PlanRequest, budget_bytes: int, compared: bool
    ) -> bool | None:
        """Whether a real step is within the budget, and the memory suffices for it; None where it is `compared` with
        the module's own, and differs."""
        measured, planned = member.measured, member.planned
        with planning(self._model):
            sample = make_sample(self._model, call)

            def step() -> int | None:
                if compared and not gives_the_same(self._model, member.runner, measured, sample, request.loss):
                    return None
                return step_bytes(self._model, member.runner, measured, sample, request.loss)

            try:
                taken = if_it_fits(lambda: [step()])
            except GuardError:  # the data are of another branch
                return None
            except Exception:  # noqa: BLE001  such as where memory cannot be measured now: such a call by itself tells
                self._refuse(measured.pattern.key)
                return None
        if taken is None:
            return False
        taken_bytes = taken[0]
        if taken_bytes is None:
            self._refuse(measured.pattern.key)
            return None
        planned.plan = replace(planned.plan, measured_peak_bytes=taken_bytes)
        return taken_bytes <= budget_bytes

    def _plans_of(self, members: Sequence[Specialization]) -> FamilyPlans | None:
        """The family of these plans, and of smaller calls that were measured beside; None where they are none."""
        by_sizes = {tuple(traits.shape for traits in one.measured.pattern.traits): one for one in members}
        ordered = [by_sizes[sizes] for sizes in sorted(by_sizes)]  # in whichever order they were used
        count = min(len(ordered), _MOST_MEASURED)
        chosen = [ordered[place * (len(ordered) - 1) // max(1, count - 1)] for place in range(count)]
        measured = [one.measured for one in _members_of(chosen)]
        beside = [found for one in members for found in self._siblings.get(one, ())]
        beside = beside[: max(0, LEAST_MEMBERS - len(measured))]
        given = next((plans for graphs, plans in self._given for one in chosen if one.measured.graphs is graphs), None)
        if given is not None and len(measured) + len(beside) < LEAST_MEMBERS:
            return given
        key = tuple(map(id, (*chosen, *beside)))
        if key not in self._families:
            family = family_of([*measured, *beside])
            alike = [one for one in chosen if family is not None and _is_plan_of(family, one)]
            plans = None if family is None else FamilyPlans(family, [one.decisions for one in alike])
            if plans is not None:
                plans.look_at_losses(one.measured for one in chosen)
            self._families[key] = plans, chosen  # which lives as long, so that no other one has its place
        return self._families[key][0]


def _may_be_family(one: Specialization, pattern: CallPattern, traits: ModuleTraits) -> bool:
    measured = one.measured
    if measured.residents is not None or one.plan.bounds_reserved or measured.traits != traits:
        return False  # of what is measured of a step, sizes tell nothing
    mine = measured.pattern
    if mine.skeleton != pattern.skeleton or len(mine.traits) != len(pattern.traits):
        return False
    return all(a.but_for_sizes == b.but_for_sizes for a, b in zip(mine.traits, pattern.traits, strict=True))


def _is_plan_of(family: Family, one: Specialization) -> bool:
    """Whether what a plan repeats are operations of the family: compiled parts that are for one size are none."""
    return [op.name for op in one.measured.graphs.D_graph] == [op.name for op in family.base.graphs.D_graph]


def _members_of(members: Sequence[Specialization]) -> list[Specialization]:
    """Those of plans of one graph by which something is known of other sizes."""
    return [one for one in members if not has_parts_of_one_size(one.measured.graphs.D_graph)]


def _by_graph(members: Iterable[Specialization]) -> list[list[Specialization]]:
    """Those of the same operations and decisions."""
    found: list[tuple[Any, list[Specialization]]] = []
    for one in members:
        measured = one.measured
        asked = (*(measured.graphs.B_graph.questions or ()), *(measured.asked_sizes or ()))
        answers = [question.answer for question in asked]
        operations = [(op.name, code_of(op)) for op in measured.graphs.D_graph]
        facts = (operations, answers, measured.settings.by_place, measured.pinned)
        group = next((group for known, group in found if known == facts), None)
        if group is None:
            found.append((facts, group := []))
        group.append(one)
    return [group for _, group in found]
