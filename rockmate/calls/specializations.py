"""The plans of one module: one for each kind of call, made when such a call first comes, all under one budget."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rkgb import GuardError, Sample, TraceError, make_sample
from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.ir.sample import Binding
from rkgb.process.autocast import Autocast
from rkgb.process.garbage import own_garbage_collected
from rkgb.process.surroundings import profiler_is_taken, profiler_looked_for
from rkgb.process.turns import TURNS, TurnsOf
from rkgb.profile.measure import MeasuredBlocks
from rkgb.replay.first_call import FirstCall, is_lazy_module, left_as_it_was
from rkgb.state.attributes import encloses_parts_of
from rkgb.state.module_state import for_planning
from rockmate.calls.by_itself import ByItself, SettledCalls, first_clause, reason_of, without_frames
from rockmate.calls.by_size import PlansBySize
from rockmate.calls.fallbacks import FallbackCounts
from rockmate.calls.given import GivenPlans, Planned
from rockmate.calls.improvements import Better
from rockmate.calls.lookup import SpecializationIndex
from rockmate.calls.own_steps import OwnStep, OwnSteps, Situation
from rockmate.calls.remembered import RememberedCalls
from rockmate.calls.resting import RestingParameters
from rockmate.calls.specialization import InferenceCall, Specialization
from rockmate.calls.told import Told
from rockmate.choices.kernels import plan_by_faster_kernels
from rockmate.choices.module_layout import ModuleLayout
from rockmate.errors import (
    BudgetTooSmall,
    NothingToTrain,
    PlanMismatch,
    TransformError,
)
from rockmate.guards.checkpointing import OwnCheckpointing
from rockmate.guards.flags import BackEndFlags
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits, TraitsReader
from rockmate.guards.sharded import refuse_what_spans_ranks
from rockmate.guards.transforms import reason_to_run_unplanned, refuse_transforms
from rockmate.memory.budget import AboveResidents, Budget, check_budget
from rockmate.memory.optimizer_state import with_parameters
from rockmate.options import Shapes
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.restore import request_of
from rockmate.plan_files.reuse import plan_above, plan_again
from rockmate.planning.background import hurried
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.plan import Plan
from rockmate.planning.request import PlanRequest
from rockmate.planning.share import Share, asked_now
from rockmate.progress import ProgressCallback, progress_display
from rockmate.runtime.double_backward import DoubleBackward
from rockmate.units import format_bytes

# Enough for every length that a collator pads to; what has not been used for longest goes.
_MOST_PLANS = 64
# What reads something else out of every batch would be planned for ever: what fits the budget runs without a plan then.
_MOST_BRANCHES = 8  # plans for calls that are alike but for what the module reads
_MOST_UNUSED = 16  # plans that no later call has used
_MOST_FAILED = 8  # plannings that failed for one call after another
_MOST_KNOWN = 4096  # measured blocks
_MOST_GRADIENTS = 4  # plans for one kind of call, each for steps before which other gradients are there
_HABIT = 4  # calls that find all gradients there, before they are worth a plan of their own


class Specializations:
    """Runs a module's calls by their plans, and makes those that are missing."""

    def __init__(
        self,
        model: torch.nn.Module,
        request: PlanRequest,
        shapes: Shapes,
        progress: bool | ProgressCallback,
        use_cache: bool = False,
    ) -> None:
        self.request = replace(request, may_branch=shapes != "error")
        self.shapes: Shapes = shapes
        self.progress = progress
        self.use_cache = use_cache
        self.members = SpecializationIndex()
        self.fallbacks = FallbackCounts()
        self._model = model
        self._binding = Binding(model)
        self._reader: TraitsReader | None = None  # there once the module has been planned: then all its parts are known
        self._known: dict[Any, MeasuredBlocks] = {}  # by flags and threads, under which blocks were measured
        self._told = Told()
        self._own_checkpointing = OwnCheckpointing(model)
        self._double_backward = DoubleBackward(model)
        self._untrained: list[InferenceCall] = []
        self._turns = TurnsOf(model)
        self._by_size = PlansBySize(model, self._told, use_cache)
        self._resting = RestingParameters(model)
        self._remembered = RememberedCalls(model, self.members, self.request)
        self._made = 0  # plans so far
        self._was_planned = False  # here, or what this is a copy of: from then on training goes on
        self._settled = SettledCalls()
        self._own_steps = OwnSteps(model)
        self._failures: list[tuple[ModuleTraits, Exception]] = []  # since planning last succeeded
        self._kept_open: set[str] = set()  # submodules that cannot be one operation
        self._given = GivenPlans(may_be_cached=use_cache)
        self._first_makes = ""  # what the module's first call makes, while that call is to come: it has no plan
        self._layout = ModuleLayout(model, request, use_cache)
        self._share: Share | None = None  # what the budget is a fraction of, if it was given as one

    def copy_for(self, model: torch.nn.Module) -> Specializations:
        """The same plans for a copy of the module."""
        paths = {part: path for path, part in self._model.named_modules()}
        pins = tuple(model.get_submodule(paths[pin]) if pin in paths else pin for pin in self.request.pin)
        optimizer = self.request.optimizer
        others = {id(held): model.get_parameter(path) for path, held in self._model.named_parameters()}
        if any(id(other) != held for held, other in others.items()):
            optimizer = with_parameters(optimizer, others)
        request = replace(self.request, pin=pins, optimizer=optimizer)
        twin = Specializations(model, request, self.shapes, self.progress, self.use_cache)
        twin._known = self._known  # what blocks take does not depend on which module has them
        twin._given, twin._layout = self._given.copy(), self._layout.copy_for(model, request)
        twin._first_makes, twin._share = self._first_makes, self._share
        twin._was_planned = self._was_planned
        twin.fallbacks = FallbackCounts(self.fallbacks.records)
        pairs, enclosed = list[tuple[Specialization, Specialization]](), encloses_parts_of(model, self._model)
        for member in reversed(self.members):
            if model is not self._model and (enclosed or member.measured.settings.have_tensors):  # bound to others
                twin._given.decisions.insert(0, (member.measured.pattern, member.decisions))
            else:
                other = Specialization(model, member.measured, member.planned, uses=member.uses, ahead=member.ahead)
                twin.adopt(other)
                pairs.append((member, other))
        self._by_size.copy_for(twin._by_size, pairs)
        return twin

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those that were made, the one used last first; then those of sizes that were not measured."""
        return (*(one.plan for one in self.members), *(one.plan for one in reversed(tuple(self._by_size))))

    def decisions(self) -> list[tuple[CallPattern, PortablePlan]]:
        """Of all plans, for `expect`: what is left of them when they are saved."""
        return [*((one.measured.pattern, one.decisions) for one in self.members), *self._given.decisions]

    def expect(self, decisions: list[tuple[CallPattern, PortablePlan]], saved: PlanFile | None = None) -> None:
        """Follow these decisions when such calls come, if they fit, in place of a search; first the `saved` plan."""
        self._given = GivenPlans(saved, decisions, is_asked_for=False)
        self._was_planned = self._was_planned or bool(decisions)

    def plan_file_of(self, member: Specialization) -> PlanFile:
        """All that is known of a plan, and by it of calls of other sizes."""
        return self._by_size.file_of(member, self.members, self.request)

    def saved(self) -> PlanFile | None:
        """The plan by which others of other sizes are known, if one is: for `expect`."""
        return self._by_size.saved(tuple(self.members), self.request) or self._given.file

    def take(self, plan_file: PlanFile) -> None:
        """Plan the first call by that plan, and later ones within its budget."""
        self.request = request_of(plan_file, self.request)
        self._given = GivenPlans(plan_file)
        self._remembered.request = self.request
        self._layout = ModuleLayout(self._model, self.request, self.use_cache)

    def replan(self, budget: Budget) -> None:
        """Plan calls within another budget when they come next, by what was measured. Raises `BudgetError`."""
        check_budget(budget)
        with self._turns.planning():
            self._remembered.keep()
            self.members.remove(self.members)
            self._by_size.forget()
            self._resting.wake()
            self.request = replace(self.request, budget=budget)
            self._was_planned, self._share, self._given = False, None, GivenPlans()
            self._settled, self._failures = SettledCalls(), []

    def adopt(self, member: Specialization) -> None:
        """Take in a plan, as the one used last."""
        self._resting.follow(member, self.request)
        dropped = self.members.add(member, _MOST_PLANS)
        self._made += 1
        self._was_planned = True
        self._failures = []
        if dropped:
            self._told.tell(
                f"{type(self._model).__name__} has {_MOST_PLANS} plans, as many as are kept: each new one takes the "
                "place of the one that was not used for longest. Pad batches to fewer sizes."
            )
        if self._reader is None:
            self._reader = TraitsReader(self._model)

    def _traits(self) -> ModuleTraits | None:
        """Of the module as it is; None where it was never planned."""
        if self._reader is None:
            return None
        walks = self._reader.walks
        traits = self._reader.read()
        if self._reader.walks != walks:
            self._own_checkpointing.look(self._model)
            for member in self.members:
                member.let_go()
            self._by_size.forget()
        return traits

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Within this context no other thread plans the module, which holds other parameters meanwhile."""
        return self._turns.running()

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Within this context no other thread runs or plans the module: for who holds other parameters in it."""
        return self._turns.planning()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A training forward, by the plan that holds for it; planned first, if there is none."""
        try:
            call = self._binding.sample(args, kwargs)
        except TypeError:
            with self._turns.running():
                return self._model.forward(*args, **kwargs)  # which raises it in its own words
        transform = self._transform_around(call)
        if transform is not None:
            return self._by_itself(call, ByItself(transform))
        if torch.is_inference_mode_enabled():  # with gradients switched on in it: there are none all the same
            return self._by_the_module(call)
        if (around := reason_to_run_unplanned(self._model)) is not None:
            return self._by_itself(call, ByItself(TransformError(around), told=self._unbudgeted(around)))
        self._told.of_checkpointing(self._own_checkpointing)
        if self._is_first_call():
            return self._by_the_module(call)
        with self._turns.running():
            made = self._made
            settled = self._settled_for(call)
            in_vain = settled is not None and settled.instead_of_plans
            ran, output, refusal = (False, None, None) if in_vain else self._by_a_plan(call)
        if not ran and self._put_in_its_layout():
            ran, output, refusal = self._by_a_plan(call)
        if ran:
            return output
        return self._unplanned(call, refusal, made) if settled is None else self._by_itself(call, settled)

    @property
    def _goes_on(self) -> bool:
        """Whether what cannot be planned runs all the same: before the first plan, and if so asked, it raises."""
        return self._was_planned and self.shapes != "error"

    def _transform_around(self, call: Sample) -> TransformError | None:
        """The transform of `torch.func` under which `call` runs, if any; before the first plan it is raised."""
        try:
            refuse_transforms(self._model, call.tensors)
        except TransformError as error:
            if not self._goes_on:
                raise
            return error
        return None

    def _by_a_plan(self, call: Sample) -> tuple[bool, Any, Exception | None]:
        """Whether a plan holds for `call`, and what the module returns by it; or why the likeliest plan does not."""
        traits = self._traits()
        if traits is None or not self.members or self._has_better(call):
            return False, None, None
        refusal: Exception | None = None
        # The plan for most gradients that are there has most room for the rest.
        alike = sorted(self.members.alike(call), key=lambda one: -len(one.measured.gradients))
        for member in (*self._by_size.alike(call), *alike):
            mismatch = self._mismatch(member, call, traits) or member.gradients_mismatch()
            if mismatch is None:
                if self.shapes != "error" and not member.is_by_size and member.is_due_for_another(_HABIT):
                    return False, None, None
                try:
                    output = member.runner.run(call, self._double_backward)
                except GuardError as error:
                    refusal = error  # more telling than that other plans are for other modes
                else:
                    (self._by_size if member.is_by_size else self.members).used(member)
                    self._ran_by(member, output)
                    return True, output, None
            elif refusal is None:
                refusal = mismatch
        return False, None, refusal or self._mismatch(self.members[0], call, traits)

    def _has_better(self, call: Sample) -> bool:
        """Whether what was found in the background is to be tried for `call`."""
        self._by_size.improvements.look(self.request)
        return self._by_size.improvements.has_better(call) or self._by_size.prefers(call)

    def member_for(self, call: Sample) -> Specialization:
        """The plan that holds for `call` in training, made if there is none. Raises as planning does."""
        with torch.inference_mode(mode=False):
            if any(tensor.is_inference() for tensor in call.tensors):
                call = call.copy()  # autograd refuses those
        with self._turns.planning():
            with for_planning(self._model):
                traits = self._traits()
                for member in self.members:
                    if traits is not None and self._mismatch(member, call, traits) is None:
                        return member
            return self.plan_for(call)

    def plan_for(self, call: Sample) -> Specialization:
        """Plan such calls, whether or not there is a plan for them. Raises as planning does."""
        member = self._plan(call, self.request, self._decisions_for(call))
        member.ahead = True
        self._settled.forget(member.measured.pattern.key)
        self._take_in(member)
        return member

    def _plan(self, call: Sample, request: PlanRequest, follow: PortablePlan | None) -> Specialization:
        refuse_what_spans_ranks(self._model)  # before any part of it runs
        self._told.of_checkpointing(self._own_checkpointing)
        with progress_display(self.progress) as tell:
            request = hurried(asked_now(request, self._share, self._model))
            request = replace(request, progress=tell, follow=follow)
            with profiler_looked_for(), self._told.once(), left_as_it_was(self._model, call) as first, first.told():
                member = self._after_first_call(call, replace(request, is_still=first.is_still), first)
        if profiler_is_taken():
            self._told.tell(
                f"{type(self._model).__name__} was planned while a profiler runs: the operations of planning are not "
                "in the profile, and what they take was measured apart from it."
            )
        return member

    def _take_in(self, member: Specialization) -> None:
        given = self.request.budget
        if not self.members and not isinstance(given, AboveResidents):
            self.request = replace(self.request, budget=member.plan.whole_budget_bytes)
            self._share = Share.of(given, member.measured)
        self.members.remove([other for other in self.members if member.covers(other)])
        self.adopt(member)
        self._by_size.improvements.ask_for(member, self.request)

    def _after_first_call(self, call: Sample, request: PlanRequest, first: FirstCall) -> Specialization:
        """Measure and plan, where need be on the state that the first call of the module makes."""
        if not first.is_structure:
            try:
                return Specialization.of(self._model, *self._measured_and_planned(call, request))
            except (TraceError, PlanMismatch):
                if not first.made:
                    raise
        with first.done():
            measured, planned = self._measured_and_planned(call, request)
            # Its code may read parts that are not there before that call; tensors in attributes are bound to those now.
            make = Specialization.of if measured.settings.have_tensors else Specialization
            member = make(self._model, measured, planned)
        self._first_makes = first.words
        return member

    def _put_in_its_layout(self) -> bool:
        """Whether the module was in another layout than its plans are for; it is in theirs now, if it may."""
        was_another = self._layout.is_another
        if was_another:
            with self._turns.planning():
                self._layout.put_back()
        return was_another

    def _measured_and_planned(self, call: Sample, request: PlanRequest) -> Planned:
        known = self._known.setdefault((BackEndFlags().now(), torch.get_num_threads()), {})
        for digest in list(known)[:-_MOST_KNOWN]:
            del known[digest]
        planned = self._layout.planned(call, request, known, partial(self._planned_in_its_layout, call, known))
        self.request = replace(self.request, chosen_layout=self._layout.chosen)
        return planned

    def _planned_in_its_layout(self, call: Sample, known: MeasuredBlocks, request: PlanRequest) -> Planned:
        if (given := self._given.take_file(self._model, call, request, self._by_size)) is not None:
            return given
        remembered = self._remembered.find(call, request)
        if remembered is not None:
            return plan_again(self._model, remembered, call, request)
        as_now = [member for member in self.members if member.measured.was_measured_as_now()]  # it may take more else
        earlier = [(member.measured, member.planned) for member in as_now]
        return plan_by_faster_kernels(self._model, call, request, known, self.use_cache, earlier)

    # ---- calls without a plan ----------------------------------------------------------------------

    def _unplanned(self, call: Sample, refusal: Exception | None, made: int) -> Any:
        if refusal is not None and self.shapes == "error":
            raise refusal
        alike = None if isinstance(refusal, GuardError) else self._alike(call)
        if refusal is not None and self.shapes == "eager" and alike is None:
            return self._by_itself(call, ByItself(refusal, told=self._unbudgeted(first_clause(refusal))))
        with self._turns.planning():
            how = (self._model, call, self.request, self._trained_plan_for)
            of_file = None if self.members else self._given.planned_first(*how)
            if of_file is not None:
                self._take_in(of_file)
            if self._has_tried_better(call) or made != self._made:  # by another thread, while this one waited
                ran, output, refusal = self._by_a_plan(call)
                if ran:
                    return output
                alike = None if isinstance(refusal, GuardError) else self._alike(call)
            if alike is None and (traits := self._traits()) is not None:
                request = asked_now(self.request, self._share, self._model)
                ran, output = self._by_size.run(call, traits, self.members, request, self._double_backward)
                if ran:
                    return output
            found = None if alike is None else self._planned_above(alike, call, refusal)
            ran, output, guard = self._ran(found, call)
            first = not self.members
            if found is None or guard is not None:  # the data may be of another branch than the plan was made of
                found = self._planned_now(call, guard or refusal)
                ran, output, guard = self._ran(found, call)
            if ran:
                return output
            if guard is not None:  # it reads something else even now
                if first or not self._goes_on:
                    raise guard
                found = self._by_itself_after(self._situation(call), guard)
        return self._by_itself(call, found) if isinstance(found, ByItself) else self._by_the_module(call)

    def _has_tried_better(self, call: Sample) -> bool:
        """Whether what was found in the background for `call` was tried just now, and taken where it is better."""
        found, prefers = self._by_size.improvements.better(call), self._by_size.prefers(call)
        traits = self._traits() if found is not None or prefers else None
        if traits is not None and found is not None and any(one is found.member for one in self.members):
            self._take_better(call, traits, found)
        if traits is None or not self._by_size.prefers(call):
            return found is not None
        self._by_size.make(call, traits, self.members, asked_now(self.request, self._share, self._model))
        return True

    def _take_better(self, call: Sample, traits: ModuleTraits, found: Better) -> None:
        """Follow what was found in place of the plan that is there, if a real step is within the budget."""
        member = found.member
        if self._mismatch(member, call, traits) is not None:
            return
        request = replace(self.request, budget=member.plan.budget_bytes, solver=found.solver)
        try:
            planned = plan_again(self._model, member.measured, call, request, member.measured.gradients)
        except Exception:  # noqa: BLE001  the plan that is there is as good as it was
            return self._told.of_loss(type(self._model).__name__, member.plan.budget_bytes, found.why)
        self.members.remove([member])
        self.adopt(Specialization.of(self._model, *planned))

    def _ran(self, found: Specialization | ByItself | None, call: Sample) -> tuple[bool, Any, GuardError | None]:
        """Whether `call` ran by a plan just made, if it is one, and what came out; or what that plan's guard says."""
        if not isinstance(found, Specialization) or (self._first_makes and self._is_first_call()):
            return False, None, None
        try:
            output = found.runner.run(call, self._double_backward)
        except GuardError as error:
            return False, None, error
        self._ran_by(found, output)
        return True, output, None

    def _alike(self, call: Sample) -> Specialization | None:
        """A plan for such calls, whatever gradients are there before their steps."""
        if (traits := self._traits()) is None:
            return None
        return next((one for one in self.members.alike(call) if self._mismatch(one, call, traits) is None), None)

    def _mismatch(self, member: Specialization, call: Sample, traits: ModuleTraits) -> Exception | None:
        """Why the plan of `member` does not hold for `call`, whatever gradients are there."""
        try:
            mismatch = member.mismatch(call, traits)
            if mismatch is None and self.shapes in ("replan", "nearest"):  # for others it holds, but for its promise
                return member.threads_mismatch()
        except Exception as error:  # noqa: BLE001  such as of arguments that cannot be compared
            return without_frames(error)
        return mismatch

    def _planned_above(
        self, alike: Specialization, call: Sample, refusal: Exception | None
    ) -> Specialization | ByItself:
        """A plan for such calls as `alike` is for, before whose steps other gradients are there.

        Without a `refusal` that plan holds, too, and stays where no other one can be made.
        """
        gradients = alike.gradients_now()
        known = {one.measured.gradients for one in self.members if one.is_for_calls_of(alike)}
        if len(known) >= _MOST_GRADIENTS:
            gradients = frozenset()  # a plan that makes them all holds whichever are there
        now, cause = self._situation(call), None
        with progress_display(self.progress) as tell, self._told.once():
            may_exceed = self._goes_on and refusal is not None
            request = asked_now(self.request, self._share, self._model, alike.measured)
            request = replace(request, progress=tell, follow=None, may_exceed=may_exceed)
            try:
                found = plan_above(self._model, alike.measured, make_sample(self._model, call), request, gradients)
            except Exception as error:  # noqa: BLE001  training goes on, and the user is told which it was
                if refusal is None:
                    return alike  # no call fails for the sake of a better plan
                cause = without_frames(error)
        if cause is not None:
            return self._by_itself_after(now, cause)
        member = Specialization.of(self._model, *found)
        if refusal is None:
            self.adopt(member)
            return member
        return self._taken_in_later(member, now, refusal, told=request.budget == self.request.budget)

    def _planned_now(self, call: Sample, refusal: Exception | None) -> Specialization | ByItself | None:
        """A new plan for `call`, or why the module itself runs; None where there is nothing to train."""
        if not self._goes_on:
            try:
                member = self._trained_plan_for(call, self.request, self._decisions_for(call))
            except NothingToTrain:
                return None
            self._take_in(member)
            return member
        now = self._situation(call)
        self._failures = [failure for failure in self._failures if failure[0] == now.traits]
        if len(self._failures) >= _MOST_FAILED:
            return self._by_itself_after(
                now,
                self._failures[-1][1],
                f"Planning failed for {_MOST_FAILED} kinds of calls in a row, and is not tried for others",
            )
        too_many = self._too_many(now)
        if too_many is not None:
            found = self._instead_of_one_more(now, refusal, too_many)
            if found is not None:
                return found
        follow = self._decisions_for(call, any_near=too_many is not None)
        with own_garbage_collected():  # once an error, which holds what it met, is gone
            try:
                planned = self._trained_plan_for(call, replace(self.request, may_exceed=True), follow)
            except NothingToTrain:
                return None
            except Exception as error:  # noqa: BLE001  training goes on, and the user is told which it was
                planned, cause = None, without_frames(error)
        if planned is not None:
            return self._taken_in_later(planned, now, refusal, told=too_many is None)
        self._failures.append((now.traits, cause))
        return self._by_itself_after(now, cause)

    def _taken_in_later(
        self, member: Specialization, now: Situation, refusal: Exception | None, told: bool
    ) -> Specialization | ByItself:
        """Take in a plan that is not the first, unless it exceeds the budget and the module itself takes no more."""
        plan = member.plan
        if member.exceeds:
            least_bytes = plan.bounded_bytes or 0
            member.why_above = (
                f"no plan was found within the budget of {format_bytes(plan.budget_bytes)}, and the least that was "
                f"found takes {format_bytes(least_bytes)}"
            )
            if plan.baseline_peak_bytes <= least_bytes and not plan.bounds_reserved:
                cause = BudgetTooSmall(member.why_above, least_bytes, "", 0)
                fits = plan.baseline_peak_bytes <= plan.budget_bytes
                return ByItself(cause, now, OwnStep(fits, plan.baseline_peak_bytes))
        alike = [one for one in self.members.alike(now.call) if one.measured.traits == now.traits]
        self.members.remove(alike[_MOST_BRANCHES - 1 :])
        told = told and len(self.members) > 0 and not member.exceeds
        self._take_in(member)
        if told:
            self._told.of_plan(type(self._model).__name__, member, len(self.members), refusal)
        return member

    def _is_first_call(self) -> bool:
        """Whether the module itself is to run, as its first call makes state that no plan makes; told, and once."""
        makes = self._first_makes
        if not self._made and is_lazy_module(self._model):
            makes = "the shapes of its parameters"
        if not makes:
            return False
        self._first_makes = ""
        self._told.tell(
            f"the first training call of {type(self._model).__name__} runs without a plan, and without a budget: it "
            f"makes {makes}. The plan is for all later calls. Where that one takes too much memory, call the module "
            "once under torch.no_grad(), on a first batch or a part of it, before it is planned."
        )
        return True

    def _situation(self, call: Sample) -> Situation:
        traits = self._traits() or TraitsReader(self._model).read()
        pattern = CallPattern.of(call, Autocast.now())
        if self.members:
            one = self.members[0]
            return Situation(call, pattern, traits, one.plan.budget_bytes, one.measured.residents)
        budget = self.request.budget
        is_known = isinstance(budget, int) and self.request.scope == "step"
        return Situation(call, pattern, traits, budget if is_known else None, None)  # type: ignore[arg-type]

    def _too_many(self, now: Situation) -> str | None:
        """Why one more plan for such a call is probably made in vain; None where it is not."""
        alike = [one for one in self.members.alike(now.call) if one.measured.traits == now.traits]
        if len(alike) >= _MOST_BRANCHES:
            return f"{len(alike)} plans for such calls are there, each for other data or settings"
        unused = sum(not one.uses and not one.ahead for one in self.members)
        if unused >= _MOST_UNUSED:
            return f"{_MOST_UNUSED} plans or more are there that no later call has used"  # a text that stays, told once
        return None

    def _instead_of_one_more(
        self, now: Situation, refusal: Exception | None, too_many: str
    ) -> Specialization | ByItself | None:
        """What to do where enough plans were made: None to make one all the same, without a search."""
        if isinstance(refusal, GuardError):
            member = self._with_reader_opaque(now, refusal)
            if member is not None:
                return member
        step = self._own_steps.about(now, self.members, self.request.loss)
        if step.fits and refusal is not None:
            return ByItself(without_frames(refusal), now, step, too_many, instead_of_plans=True)
        name = type(self._model).__name__
        self._told.tell(
            f"{name} is planned for nearly every call now: {too_many}, and its own step does not fit the budget. From "
            "here on such plans follow the decisions of those that are there, and are made without a word. Pad batches "
            "to fewer sizes, let the submodule that reads its data be one operation (opaque=[it]), or say "
            'shapes="eager" to run such calls without a budget.'
        )
        return None

    def _with_reader_opaque(self, now: Situation, refusal: GuardError) -> Specialization | None:
        """A plan in which the submodule that reads its data is one operation, so that it holds for other data, too."""
        path = refusal.path
        if not path or path in self.request.opaque or path in self._kept_open:
            return None
        request = replace(self.request, opaque=(*self.request.opaque, path))
        try:
            member = self._trained_plan_for(now.call, request, None)
        except Exception:  # noqa: BLE001  whatever it is: then it stays as it is
            self._kept_open.add(path)
            return None
        self.request = self._remembered.request = request
        alike = [one for one in self.members.alike(now.call) if one.measured.traits == now.traits]
        self.members.remove(alike)
        self._take_in(member)
        self._told.tell(
            f"submodule {path!r} of {type(self._model).__name__} reads something else out of nearly every batch, and "
            f"is one operation from now on, never recomputed: {first_clause(refusal)}."
        )
        return member

    def _by_itself_after(self, now: Situation, cause: Exception, more: str = "") -> ByItself:
        """How the module itself runs where planning ended with `cause`."""
        return ByItself(cause, now, self._own_steps.about(now, self.members, self.request.loss), more)

    def _settled_for(self, call: Sample) -> ByItself | None:
        """Why calls like that one run by themselves, where that is known."""
        if not self._settled:
            return None
        key = CallPattern.of(call).key
        traits = self._traits() if self._settled.about(key) else None
        if traits is None:
            return None
        return self._settled.find(call, traits, Autocast.now())

    def _by_itself(self, call: Sample, why: ByItself) -> Any:
        """The module's own forward, counted and told; what it raises is raised as it is."""
        try:
            output = self._by_the_module(call)
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(f"{type(self._model).__name__} ran without a plan: {reason_of(why.cause)}.")
            raise
        self._settled.remember(why)
        peak_bytes = None if why.step is None else why.step.peak_bytes
        if self.fallbacks.count(type(why.cause).__name__, reason_of(why.cause), "by itself", peak_bytes):
            self._told.warn(why.warning(type(self._model).__name__))
        return output

    def _by_the_module(self, call: Sample) -> Any:
        with self._turns.running():
            return self._model.forward(*call.args, **call.kwargs)

    def _ran_by(self, member: Specialization, output: Any) -> None:
        self._by_size.improvements.watch(member, output)
        if not member.exceeds:
            return
        plan = member.plan
        if self.fallbacks.count("BudgetTooSmall", member.why_above, "above the budget", plan.bounded_bytes):
            self._told.of_plan_above(type(self._model).__name__, member)

    def _trained_plan_for(self, call: Sample, request: PlanRequest, follow: PortablePlan | None) -> Specialization:
        """Raises `NothingToTrain` for what trains nothing, and traces it but once."""
        if self._untrained:
            traits = TraitsReader(self._model).read()
            if any(untrained.holds(call, traits) for untrained in self._untrained):
                raise NothingToTrain
        try:
            return self._plan(make_sample(self._model, call), request, follow)
        except NothingToTrain:
            self._untrained = [*self._untrained[1 - _MOST_PLANS :], InferenceCall.of(self._model, call)]
            raise

    def _decisions_for(self, call: Sample, any_near: bool = False) -> PortablePlan | None:
        """Those to follow for `call`: its own, made before the module was saved, or those of the plan next in size."""
        decisions = self._given.decisions_for(call)
        if decisions is not None or (self.shapes != "nearest" and not any_near):
            return decisions
        alike = self.members.alike(call) if any_near else ()
        near = next(iter(alike), None) or self.members.next_larger(CallPattern.of(call, Autocast.now()))
        return near.decisions if near is not None else None

    # ---- messages ----------------------------------------------------------------------------------

    def tell_of_tracer(self, tracer: str) -> None:
        """Tell that what `tracer` makes of the module has no plan; not of planning itself, of what holds the module."""
        if not TURNS.is_planner():
            self._told.of_tracer(tracer, type(self._model).__name__)

    def _unbudgeted(self, reason: str) -> str:
        return f"{type(self._model).__name__} runs without a plan, and without a budget: {reason}."
