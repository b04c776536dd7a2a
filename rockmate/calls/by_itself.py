"""Calls that the module itself runs, as they cannot be planned within the budget: why, and for which calls it is so."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from rkgb import RockmateError, Sample
from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.process.autocast import Autocast
from rockmate.calls.own_steps import OwnStep, Situation
from rockmate.errors import FallbackWarning
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits
from rockmate.units import format_bytes

_MOST_SETTLED = 256  # kinds of calls of which it is remembered that they run by themselves
_MOST_MODES = 8  # of the module, for each of these
_MOST_SHOWN = 300  # characters of somebody else's message
_RAISED = "raised at "
_ADVICE = (
    ": the plan holds",
    ". Put it back",
    ". Plan the module",
    ". Trace with",
    ". Call and plan",
    ": planned steps",
    ". Raise the budget",
    ": a step that makes",
)


@dataclass(eq=False, slots=True)
class ByItself:
    """Why a call runs as the module itself does."""

    cause: Exception
    now: Situation | None = None  # of such calls; None where it is not to be remembered
    step: OwnStep | None = None  # None where nobody asked
    more: str = ""  # beside what the cause says
    instead_of_plans: bool = False  # of which there are some: trying them all takes longer than it may gain
    told: str = ""  # in place of `text`, where that would say less

    def text(self, name: str) -> str:
        """What the user is told of the first such call of the module called `name`."""
        calls = "" if self.now is None else f" such as {self.now.pattern}"
        more = f"{self.more}. " if self.more else ""
        return (
            f"{name} runs by itself, without a plan, in calls{calls}: {reason_of(self.cause)}. {more}"
            f"{self._of_its_step()}Such calls are counted in `fallbacks`."
        )

    def warning(self, name: str) -> FallbackWarning:
        """What comes with the first such call."""
        warning = FallbackWarning(self.told or self.text(name))
        warning.__cause__ = self.cause
        return warning

    def _of_its_step(self) -> str:
        if self.now is None or self.step is None or self.now.budget_bytes is None:
            return ""
        budget, peak_bytes = format_bytes(self.now.budget_bytes), self.step.peak_bytes
        if peak_bytes is None:
            return f"What its own step takes could not be measured; the budget is {budget}. "
        relation = "within" if self.step.fits else "above"
        return f"Its own step takes about {format_bytes(peak_bytes)}, {relation} the budget of {budget}. "


class SettledCalls:
    """Remembers which calls run by themselves: what failed for them once is not tried again each time."""

    def __init__(self) -> None:
        self._settled: OrderedDict[Hashable, tuple[ByItself, ...]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._settled)

    def about(self, key: Hashable) -> tuple[ByItself, ...]:
        """Those for calls that look so; see `CallPattern.key`."""
        return self._settled.get(key, ())

    def find(self, call: Sample, traits: ModuleTraits, autocast: Autocast) -> ByItself | None:
        """Why a call like that one runs by itself on the module as it is, if it is known to."""
        for one in self.about(CallPattern.of(call).key):
            now = one.now
            if now is not None and now.pattern.autocast == autocast and now.traits == traits:
                if now.pattern.mismatch(call) is None:
                    return one
        return None

    def remember(self, why: ByItself) -> None:
        """Calls like that one run by themselves from now on. Their tensors are the user's to free."""
        if why.now is None:
            return
        key = why.now.pattern.key
        others = self._settled.pop(key, ())
        if why not in others:
            why.now = replace(why.now, call=Sample((), {}))
            others = (why, *others[: _MOST_MODES - 1])
        self._settled[key] = others
        while len(self._settled) > _MOST_SETTLED:
            self._settled.popitem(last=False)

    def forget(self, key: Hashable) -> None:
        """Try again to plan calls that look so."""
        self._settled.pop(key, None)


def without_frames(error: Exception) -> Exception:
    """`error` without what it would keep alive: the tensors of a step, and the module."""
    places = traceback.extract_tb(error.__traceback__)
    if places and not isinstance(error, RockmateError) and not is_out_of_memory(error):
        last = places[-1]
        error.add_note(f"{_RAISED}{Path(last.filename).name}:{last.lineno}, in {last.name}")
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error


def reason_of(error: Exception) -> str:
    """What happened, in a clause: of our own errors without the advice, of others with their class and place."""
    if isinstance(error, RockmateError):
        return first_clause(error)
    lines = str(error).splitlines() or [""]
    places = [f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED)]
    return f"{type(error).__name__}: {lines[0][:_MOST_SHOWN]}" + "".join(places[:1])


def first_clause(refusal: Exception | None) -> str:
    """What differed, without what to do about it."""
    text = str(refusal)
    for end in _ADVICE:
        text = text.partition(end)[0]
    return text.rstrip(".")
