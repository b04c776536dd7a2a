"""What steps of a module itself take: measured, or told from those of calls of other sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rkgb import Sample
from rkgb.devices.registry import device_of
from rkgb.process.ranks import has_other_ranks
from rkgb.state.module_state import main_device, module_devices
from rockmate.calls.specialization import Specialization
from rockmate.guards.inputs import CallPattern
from rockmate.guards.module import ModuleTraits
from rockmate.memory.split import Residents
from rockmate.planning.costs import LossFunction
from rockmate.planning.trying.real_step import own_step_bytes

_MOST = 64  # steps that are remembered
# Attention grows with the square of a length; no usual operation grows faster.
_GROWTH = 2


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step of the module itself."""

    fits: bool  # the budget
    peak_bytes: int | None  # about; None where it is not known, or where there is not so much memory


@dataclass(frozen=True, eq=False, slots=True)
class Situation:
    """A call, and all that decides what its step takes."""

    call: Sample
    pattern: CallPattern
    traits: ModuleTraits
    budget_bytes: int | None  # of the step
    residents: Residents | None  # where the budget is for all of training


class OwnSteps:
    """Remembers what steps of `model` took."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._measured: list[tuple[CallPattern, ModuleTraits, int]] = []

    def about(self, now: Situation, members: Iterable[Specialization], loss: LossFunction | None) -> OwnStep:
        """What the step takes, told from others if they tell enough; else it is run once, and measured."""
        known = self._known(now, members)
        if now.budget_bytes is None:
            return OwnStep(False, None)
        same = [peak for growth, is_smaller, peak in known if growth == 1 and is_smaller]  # other data, other branches
        most_bytes = (
            max(same) if same else min((round(peak * growth**_GROWTH) for growth, _, peak in known), default=None)
        )
        if most_bytes is not None and most_bytes <= now.budget_bytes:
            return OwnStep(True, most_bytes)
        least_bytes = max((peak for _, is_smaller, peak in known if is_smaller), default=0)
        if least_bytes > now.budget_bytes:
            return OwnStep(False, least_bytes)
        likely_bytes = min((round(peak * growth) for growth, _, peak in known), default=0)
        return self._run(now, loss, likely_bytes)

    def _known(self, now: Situation, members: Iterable[Specialization]) -> list[tuple[float, bool, int]]:
        """Of steps that differ in sizes alone: how much larger this one is, whether nowhere smaller, and their peak."""
        steps = [(one.measured.pattern, one.measured.traits, one.plan.baseline_peak_bytes) for one in members]
        found = []
        for pattern, traits, peak_bytes in (*steps, *self._measured):
            ratios = pattern.size_ratios(now.pattern)
            if ratios is not None and all(ratios) and traits == now.traits:
                growth = math.prod(1 / ratio for ratio in ratios if ratio < 1)
                found.append((growth, all(ratio <= 1 for ratio in ratios), peak_bytes))
        return found

    def _run(self, now: Situation, loss: LossFunction | None, likely_bytes: int) -> OwnStep:
        """A step of the module itself, which is left as it was."""
        device = main_device(module_devices(self._model, now.call.tensors))
        if has_other_ranks() or (device_of(device).overcommits and likely_bytes > device_of(device).available_bytes()):
            # Others would not be there for what they do together; and where a system promises more memory than it
            # has, trying would end the process.
            return OwnStep(False, likely_bytes or None)
        try:
            peak_bytes = own_step_bytes(self._model, now.call, loss, device, now.residents)
        except Exception:  # noqa: BLE001  whatever it is: the module raises it, if it is its own, when it runs
            return OwnStep(False, None)
        if peak_bytes is None:
            return OwnStep(False, None)
        self._measured = [*self._measured[1 - _MOST :], (now.pattern, now.traits, peak_bytes)]
        return OwnStep(now.budget_bytes is not None and peak_bytes <= now.budget_bytes, peak_bytes)
