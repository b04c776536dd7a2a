"""The layout of one planned module: chosen with its first plan, and had by it from then on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rkgb import Sample
from rkgb.profile.measure import MeasuredBlocks
from rockmate.choices.layout import choose_layout
from rockmate.errors import BudgetTooSmall, LayoutError
from rockmate.layouts.data_parallel import HELD, is_held
from rockmate.layouts.option import ChosenLayout
from rockmate.layouts.weights import give_back, lay_out, layout_kept, lies_so
from rockmate.nn.chunked_logits import chunks_of, logits_made
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured
from rockmate.planning.request import PlanRequest

Planned = tuple[Measured, LoweredPlan]
Make = Callable[[PlanRequest], Planned]


class ModuleLayout:
    """What layout a module has under its plans; `chosen` is None until there is one, and where none was asked for."""

    def __init__(self, model: torch.nn.Module, request: PlanRequest, use_cache: bool) -> None:
        self._model = model
        self._asked = request.layout
        self._use_cache = use_cache
        self._is_planned = request.chosen_layout is not None
        self.chosen: ChosenLayout | None = request.chosen_layout

    def copy_for(self, model: torch.nn.Module, request: PlanRequest) -> ModuleLayout:
        """The same for a copy of the module."""
        twin = ModuleLayout(model, request, self._use_cache)
        twin.chosen, twin._is_planned = self.chosen, self._is_planned
        return twin

    def planned(self, call: Sample, request: PlanRequest, known: MeasuredBlocks, make: Make) -> Planned:
        """What `make` gives in the layout, which is chosen first if it is not yet.

        Where no first plan can be made, the module is as it was given; under "auto" that is tried instead, if it is
        the budget that is too small in channels_last. Raises as `choose_layout` and `make` do.
        """
        if self._is_planned:
            self.put_back()
            return make(replace(request, chosen_layout=self.chosen))
        started = time.perf_counter()
        try:
            self._choose(call, request, known)
            choosing_s = time.perf_counter() - started
            measured, planned = self._in_chosen_or_given(request, make)
        except BaseException:
            self.chosen = None
            self._give_back()
            raise
        self._is_planned = True
        planned.plan = replace(planned.plan, planning_s=planned.plan.planning_s + choosing_s)
        return measured, planned

    def _in_chosen_or_given(self, request: PlanRequest, make: Make) -> Planned:
        try:
            return make(replace(request, chosen_layout=self.chosen))
        except BudgetTooSmall as error:
            if self._asked != "auto" or self.chosen is None or not self.chosen.weights:
                raise
            told = str(error).partition(". ")[0]
        self._give_back()
        kept = tuple(replace(region, channels_last=False) for region in self.chosen.regions)
        self.chosen = ChosenLayout(kept, refused=f"no plan was found in channels_last: {told}")
        return make(replace(request, chosen_layout=self.chosen))

    @property
    def is_another(self) -> bool:
        """Whether something put the module into another layout than its plans are for."""
        return self._is_planned and not lies_so(self._model, self._weights)

    def put_back(self) -> None:
        """Have the module in the layout of its plans."""
        if self.is_another and not is_held(self._model):
            give_back(self._model)
            lay_out(self._model, self._weights)

    @property
    def _weights(self) -> tuple[str, ...]:
        return () if self.chosen is None else self.chosen.weights

    def _give_back(self) -> None:
        if not is_held(self._model):
            give_back(self._model)

    def _choose(self, call: Sample, request: PlanRequest, known: MeasuredBlocks) -> None:
        if is_held(self._model):
            if self._asked == "channels_last":
                raise LayoutError(f"{type(self._model).__name__} stays in its layout: {HELD}.")
            self.chosen = None if self._asked == "as given" else ChosenLayout(refused=HELD)
            return
        give_back(self._model)  # what another plan of the module has done
        if self._asked == "as given":
            return
        self.chosen = choose_layout(self._model, call, request, self._asked, known, self._use_cache)
        lay_out(self._model, self.chosen.weights)


@contextlib.contextmanager
def as_asked(model: torch.nn.Module, sample: Any, request: PlanRequest) -> Iterator[PlanRequest]:
    """Context in which `model` is in the layout that is asked for, chosen on `sample`, and given back afterwards.

    So is how it makes its logits. For questions about plans that nobody follows yet. Yields the request with what was
    chosen. Raises as `choose_layout` and `chunk_logits`.
    """
    rows = request.loss_chunks or chunks_of(model)
    with logits_made(model, rows), _in_asked_layout(model, sample, request) as request:
        yield request


@contextlib.contextmanager
def _in_asked_layout(model: torch.nn.Module, sample: Any, request: PlanRequest) -> Iterator[PlanRequest]:
    if is_held(model) or (request.layout == "as given" and lies_so(model, ())):
        yield request
        return
    with layout_kept(model):  # a plan of the module may have laid it out
        give_back(model)
        if request.layout != "as given":
            chosen = choose_layout(model, sample, request, request.layout, {})
            lay_out(model, chosen.weights)
            request = replace(request, chosen_layout=chosen)
        yield request
