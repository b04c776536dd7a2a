"""The plans of one module: one for each kind of call, made when such a call first comes, all under one budget."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from rkgb import GuardError, RockmateError, Sample, TraceError, make_sample
from rkgb.first_call import FirstCall, is_lazy_module, left_as_it_was
from rkgb.measuring.measure import MeasuredBlocks
from rkgb.state import autocast_in_force, for_planning, module_devices
from rkgb.surroundings import profiler_is_taken
from rkgb.turns import TURNS, TurnsOf, warnings_collected
from rockmate.errors import (
    CheckpointingWarning,
    ExportWarning,
    NothingToTrain,
    PlanMismatch,
    ReplanWarning,
    ShapesError,
)
from rockmate.member import Member, Untrained
from rockmate.memory.budget import AboveResidents
from rockmate.memory.optimizer_state import with_parameters
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.restore import restore
from rockmate.plan_files.reuse import plan_above, plan_or_reuse
from rockmate.planning.follow import Decisions
from rockmate.planning.measured import Measured
from rockmate.planning.planner import Planned
from rockmate.planning.request import PlanRequest
from rockmate.progress import Progress, progress_display
from rockmate.running.checkpointing import OwnCheckpointing
from rockmate.running.flags import flags_in_force
from rockmate.running.module_traits import ModuleTraits, TraitsReader
from rockmate.running.pattern import CallPattern
from rockmate.running.transforms import reason_to_run_unplanned, refuse_transforms
from rockmate.units import format_bytes

Shapes = Literal["replan", "nearest", "eager", "error"]
"""What happens to a call that no plan holds for."""

SHAPES: tuple[str, ...] = get_args(Shapes)

# Enough for every length that a collator pads to; what has not been used for longest goes.
_MOST_PLANS = 64
# A module that reads something else out of every batch would be planned for ever.
_MOST_BRANCHES = 8
# Plans for one kind of call, each for steps before which other gradients are there.
_MOST_GRADIENTS = 4
# Calls that find all gradients there, before they are worth a plan of their own: one or two are no habit.
_HABIT = 4
_OWN_CODE = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


def check_shapes(shapes: object) -> None:
    """Raise `ShapesError` for no answer to a call of another shape."""
    if shapes not in SHAPES:
        raise ShapesError(
            f'shapes is {shapes!r}; say what to do with a call unlike those that were planned: "replan", "nearest" '
            '(plan it, but follow the decisions of the plan next in size), "eager" or "error".'
        )


class PlanFamily:
    """Runs a module's calls by their plans, and makes those that are missing."""

    def __init__(
        self,
        model: torch.nn.Module,
        request: PlanRequest,
        shapes: Shapes,
        progress: bool | Progress,
        use_cache: bool = False,
    ) -> None:
        check_shapes(shapes)
        self.request = replace(request, may_branch=shapes != "error")
        self.shapes: Shapes = shapes
        self.progress = progress
        self.use_cache = use_cache
        self.members: list[Member] = []  # the one used last comes first
        self._model = model
        self._signature = inspect.signature(model.forward)
        self._reader: TraitsReader | None = None  # there once the module has been planned: then all its parts are known
        self._known: dict[Any, MeasuredBlocks] = {}  # by flags and threads, under which blocks were measured
        self._told: set[str] = set()
        self._expected: list[tuple[CallPattern, Decisions]] = []
        self._own_checkpointing = OwnCheckpointing(model)
        self._untrained: list[Untrained] = []
        self._turns = TurnsOf(model)
        self._made = 0  # plans so far
        self._told_of_numbers = False
        self._given: PlanFile | None = None  # the plan of a file, for the first call
        self._first_makes = ""  # what the module's first call makes, while that call is to come: it has no plan

    def copy_for(self, model: torch.nn.Module) -> PlanFamily:
        """The same plans for a copy of the module."""
        paths = {part: path for path, part in self._model.named_modules()}
        pins = tuple(model.get_submodule(paths[pin]) if pin in paths else pin for pin in self.request.pin)
        optimizer = self.request.optimizer
        others = {id(held): model.get_parameter(path) for path, held in self._model.named_parameters()}
        if any(id(other) != held for held, other in others.items()):
            optimizer = with_parameters(optimizer, others)
        request = replace(self.request, pin=pins, optimizer=optimizer)
        twin = PlanFamily(model, request, self.shapes, self.progress, self.use_cache)
        twin._known = self._known  # what blocks take does not depend on which module has them
        twin._given = self._given
        twin._expected = self._expected
        twin._first_makes = self._first_makes
        for member in reversed(self.members):
            if member.measured.settings.have_tensors and model is not self._model:  # of these, a copy has others
                twin._expected = [(member.measured.pattern, member.decisions), *twin._expected]
            else:
                twin.adopt(Member(model, member.measured, member.planned))
        return twin

    def decisions(self) -> list[tuple[CallPattern, Decisions]]:
        """Of all plans, for `expect`: what is left of them when they are saved."""
        return [*((one.measured.pattern, one.decisions) for one in self.members), *self._expected]

    def expect(self, decisions: list[tuple[CallPattern, Decisions]]) -> None:
        """Follow these decisions when such calls come, if they fit, in place of a search."""
        self._expected = list(decisions)

    def take(self, plan_file: PlanFile) -> None:
        """Plan the first call by that plan, and later ones within its budget."""
        asked, budget_bytes = plan_file.asked, plan_file.promise.whole_budget_bytes
        self.request = replace(
            self.request, budget=budget_bytes, scope=asked.scope, opaque=asked.opaque, pin=asked.pinned
        )
        self._given = plan_file

    def adopt(self, member: Member) -> None:
        """Take in a plan, as the one used last."""
        self.members = [member, *self.members[: _MOST_PLANS - 1]]
        self._made += 1
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
        return traits

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Within this context no other thread plans the module, which holds other parameters meanwhile."""
        return self._turns.running()

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Within this context no other thread runs or plans the module: for who holds other parameters in it."""
        return self._turns.planning()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A training forward, by the plan that holds for it; planned first, if there is none."""
        bound = self._signature.bind(*args, **kwargs)
        call = Sample(bound.args, bound.kwargs)
        refuse_transforms(self._model, call.tensors)
        if torch.is_inference_mode_enabled():  # with gradients switched on in it: there are none all the same
            return self._by_the_module(call)
        around = reason_to_run_unplanned(self._model)
        if around is not None:
            self._tell(f"{type(self._model).__name__} runs without a plan, and without a budget: {around}.")
            return self._by_the_module(call)
        self._tell_of_own_checkpointing()
        if self._is_first_call():
            return self._by_the_module(call)
        with self._turns.running():
            made = self._made
            ran, output, refusal = self._by_a_plan(call)
        return output if ran else self._unplanned(call, refusal, made)

    def _by_a_plan(self, call: Sample) -> tuple[bool, Any, RockmateError | None]:
        """Whether a plan holds for `call`, and what the module returns by it; or why the first plan does not."""
        refusal: RockmateError | None = None
        traits = self._traits()
        # The plan for most gradients that are there has most room for the rest.
        for member in sorted(self.members, key=lambda one: -len(one.measured.gradients)):
            assert traits is not None
            mismatch = self._mismatch(member, call, traits) or member.gradients_mismatch()
            if mismatch is None:
                if self.shapes != "error" and member.is_due_for_another(_HABIT):
                    return False, None, None
                try:
                    output = member.runner.run(call)
                except GuardError as error:
                    refusal = error  # more telling than that other plans are for other shapes
                else:
                    self._used(member)
                    return True, output, None
            elif refusal is None:
                refusal = mismatch
        return False, None, refusal

    def member_for(self, call: Sample) -> Member:
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

    def plan_for(self, call: Sample, refusal: RockmateError | None = None) -> Member:
        """Plan such calls, whether or not there is a plan for them. Raises as planning does."""
        if isinstance(refusal, GuardError):
            self._refuse_more_branches(refusal)
        self._tell_of_own_checkpointing()
        with progress_display(self.progress) as tell:
            request = replace(self.request, progress=tell, follow=self._decisions_for(call))
            with self._told_once(), left_as_it_was(self._model, call) as first, first.told():
                member = self._after_first_call(call, request, first)
        if profiler_is_taken():
            self._tell(
                f"{type(self._model).__name__} was planned while a profiler runs: the operations of planning are not "
                "in the profile, and what they take was measured apart from it."
            )
        if not self.members and not isinstance(self.request.budget, AboveResidents):
            self.request = replace(self.request, budget=member.plan.whole_budget_bytes)
        self.members = [other for other in self.members if not member.covers(other)]
        self.adopt(member)
        return member

    def _after_first_call(self, call: Sample, request: PlanRequest, first: FirstCall) -> Member:
        """Measure and plan, where need be on the state that the first call of the module makes."""
        if not first.is_structure:
            try:
                return Member.of(self._model, *self._measured_and_planned(call, request))
            except (TraceError, PlanMismatch):
                if not first.made:
                    raise
        with first.done():
            measured, planned = self._measured_and_planned(call, request)
            # Its code may read parts that are not there before that call; tensors in attributes are bound to those now.
            make = Member.of if measured.settings.have_tensors else Member
            member = make(self._model, measured, planned)
        self._first_makes = first.words
        return member

    def _measured_and_planned(self, call: Sample, request: PlanRequest) -> tuple[Measured, Planned]:
        if self._given is None:
            flags, threads = flags_in_force(torch.cuda.is_available()), torch.get_num_threads()
            known = self._known.setdefault((flags, threads), {})
            earlier = [
                (member.measured, member.planned)
                for member in self.members
                if member.measured.was_measured_as_now()  # else what it takes may be another now
            ]
            return plan_or_reuse(self._model, call, request, known, self.use_cache, earlier)
        found = restore(self._model, call, request, self._given)
        self._given = None
        return found

    # ---- calls without a plan ----------------------------------------------------------------------

    def _unplanned(self, call: Sample, refusal: RockmateError | None, made: int) -> Any:
        if refusal is not None and self.shapes == "error":
            raise refusal
        alike = None if isinstance(refusal, GuardError) else self._alike(call)
        if refusal is not None and self.shapes == "eager" and alike is None:
            self._tell_of_eager(refusal)
            return self._by_the_module(call)
        with self._turns.planning():
            if made != self._made:  # by another thread, while this one waited for its turn
                ran, output, refusal = self._by_a_plan(call)
                if ran:
                    return output
                alike = None if isinstance(refusal, GuardError) else self._alike(call)
            if alike is not None:
                try:
                    return self._planned_above(alike, call, refusal).runner.run(call)
                except GuardError as error:
                    refusal = error  # the data are of another branch than those that the plan was made of
            first = not self.members
            try:
                member = self._trained_plan_for(call, refusal)
            except NothingToTrain:
                pass
            else:
                if not first:
                    self._tell_of_plan(member, refusal)
                if not self._first_makes:
                    return member.runner.run(call)
                self._is_first_call()
        return self._by_the_module(call)

    def _alike(self, call: Sample) -> Member | None:
        """A plan for such calls, whatever gradients are there before their steps."""
        traits = self._traits()
        if traits is None:
            return None
        return next((one for one in self.members if self._mismatch(one, call, traits) is None), None)

    def _mismatch(self, member: Member, call: Sample, traits: ModuleTraits) -> RockmateError | None:
        """Why the plan of `member` does not hold for `call`, whatever gradients are there."""
        mismatch = member.mismatch(call, traits)
        if mismatch is None and self.shapes in ("replan", "nearest"):  # for others it holds, but for its promise
            return member.threads_mismatch()
        return mismatch

    def _planned_above(self, alike: Member, call: Sample, refusal: RockmateError | None) -> Member:
        """A plan for such calls as `alike` is for, before whose steps other gradients are there.

        Without a `refusal` that plan holds, too, and stays where no other one can be made.
        """
        gradients = alike.gradients_now()
        known = {one.measured.gradients for one in self.members if one.is_for_calls_of(alike)}
        if len(known) >= _MOST_GRADIENTS:
            gradients = frozenset()  # a plan that makes them all holds whichever are there
        with progress_display(self.progress) as tell, self._told_once():
            request = replace(self.request, progress=tell, follow=None)
            try:
                found = plan_above(self._model, alike.measured, make_sample(self._model, call), request, gradients)
            except Exception:
                if refusal is not None:
                    raise
                return alike  # no call fails for the sake of a better plan
        member = Member.of(self._model, *found)
        self.adopt(member)
        if refusal is not None:
            self._tell_of_plan(member, refusal)
        return member

    def _is_first_call(self) -> bool:
        """Whether the module itself is to run, as its first call makes state that no plan makes; told, and once."""
        makes = self._first_makes
        if not self._made and is_lazy_module(self._model):
            makes = "the shapes of its parameters"
        if not makes:
            return False
        self._first_makes = ""
        self._tell(
            f"the first training call of {type(self._model).__name__} runs without a plan, and without a budget: it "
            f"makes {makes}. The plan is for all later calls. Where that one takes too much memory, call the module "
            "once under torch.no_grad(), on a first batch or a part of it, before it is planned."
        )
        return True

    def _by_the_module(self, call: Sample) -> Any:
        with self._turns.running():
            return self._model.forward(*call.args, **call.kwargs)

    def _trained_plan_for(self, call: Sample, refusal: RockmateError | None) -> Member:
        """Raises `NothingToTrain` for what trains nothing, and traces it but once."""
        if self._untrained:
            traits = TraitsReader(self._model).read()
            if any(untrained.holds(call, traits) for untrained in self._untrained):
                raise NothingToTrain
        try:
            return self.plan_for(make_sample(self._model, call), refusal)
        except NothingToTrain:
            self._untrained.append(Untrained.of(self._model, call))
            raise

    def _decisions_for(self, call: Sample) -> Decisions | None:
        """Those to follow for `call`: its own, made before the module was saved, or those of the plan next in size."""
        pattern = CallPattern.of(call, autocast_in_force(module_devices(self._model, call.tensors)))
        for expected, decisions in self._expected:
            if replace(expected, flags=None) == pattern:  # measured anew, under whichever flags
                return decisions
        larger = self._next_larger(call) if self.shapes == "nearest" else None
        return larger.decisions if larger is not None else None

    def _next_larger(self, call: Sample) -> Member | None:
        """Of the plans for calls that are nowhere smaller than `call`, the nearest in size."""
        found: list[tuple[float, int, Member]] = []
        cast = autocast_in_force(module_devices(self._model, call.tensors))
        for index, member in enumerate(self.members):
            ratios = member.measured.pattern.size_ratios(call)
            if ratios is not None and all(ratio >= 1 for ratio in ratios) and member.measured.pattern.autocast == cast:
                found.append((sum(map(math.log, ratios)), index, member))
        return min(found)[2] if found else None

    def _refuse_more_branches(self, refusal: GuardError) -> None:
        alike = max((sum(one.is_for_calls_of(other) for other in self.members) for one in self.members), default=0)
        if alike >= _MOST_BRANCHES:
            refusal.add_note(
                f'{alike} plans for such calls are there, each for other data. Say shapes="eager" to run what none '
                "of them holds for without a plan, and without a budget."
            )
            raise refusal

    def _used(self, member: Member) -> None:
        if self.members[0] is not member:  # another list: a thread may be walking this one
            self.members = [member, *(other for other in self.members if other is not member)]

    # ---- messages ----------------------------------------------------------------------------------

    def _tell_of_plan(self, member: Member, refusal: RockmateError | None) -> None:
        if member.planned.is_taken_over:
            self._tell_of_numbers(member, refusal)
            return
        plan, name = member.plan, type(self._model).__name__
        warnings.warn(
            f"{name} was planned once more, in {plan.planning_s:.1f} s, and has {len(self.members)} plans now under "
            f"{format_bytes(plan.budget_bytes)}: {_first_clause(refusal)}. Each is kept for calls like its own; "
            'shapes="nearest", "eager" or "error" does otherwise.',
            ReplanWarning,
            stacklevel=_frames_to_the_user(),
        )

    def _tell_of_numbers(self, member: Member, refusal: RockmateError | None) -> None:
        """Once for all: later values are many, and none of them is measured."""
        if not self._told_of_numbers:
            self._told_of_numbers = True
            self._tell(
                f"{type(self._model).__name__} was traced once more, in {member.plan.planning_s:.1f} s: "
                f"{_first_clause(refusal)}. The graph is the same, and so is the plan."
            )

    def _tell_of_own_checkpointing(self) -> None:
        news = self._own_checkpointing.news()
        if news is not None:
            self._tell(news, CheckpointingWarning)

    def tell_of_tracer(self, tracer: str) -> None:
        """Tell that what `tracer` makes of the module has no plan; not of planning itself, of what holds the module."""
        if not TURNS.is_planner():
            name = type(self._model).__name__
            self._tell(
                f"{tracer} records {name}, which is planned, as the module itself: what it makes of it trains without "
                f"the plan, and without a budget. Record it in eval mode if it is for inference ({name}.eval()), or "
                "train the planned module itself.",
                ExportWarning,
            )

    def _tell_of_eager(self, refusal: RockmateError) -> None:
        self._tell(f"{type(self._model).__name__} runs without a plan, and without a budget: {_first_clause(refusal)}.")

    @contextlib.contextmanager
    def _told_once(self) -> Iterator[None]:
        """What planning warns of comes once, and not for every plan."""
        with warnings_collected() as caught:
            yield
        for told in caught:
            self._tell(str(told.message), told.category)

    def _tell(self, text: str, category: type[Warning] = ReplanWarning) -> None:
        """Once, however often the warning filters would have it."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, category, stacklevel=_frames_to_the_user())


def _frames_to_the_user() -> int:
    """How many calls above the caller there is code that is neither ours nor torch's, as `warnings.warn` counts."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame, level = frame.f_back, level + 1
    return level


def _first_clause(refusal: RockmateError | None) -> str:
    """What differed, without what to do about it."""
    text = str(refusal)
    for end in (
        ": the plan holds",
        ". Put it back",
        ". Plan the module",
        ". Trace with",
        ". Call and plan",
        ": a step that makes",
    ):
        text = text.partition(end)[0]
    return text
