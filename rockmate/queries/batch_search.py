"""The search for the largest batch that fits a budget, in few measurements."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import torch

from rk_solvers import Chain, Problem, Schedule, schedule_of
from rkgb import Sample, make_sample
from rkgb.devices.out_of_memory import collect_failed, is_out_of_memory
from rkgb.devices.registry import device_of
from rkgb.errors import TraceError
from rkgb.ir.dgraph import forward_peak_bytes
from rkgb.replay.first_call import left_as_it_was
from rockmate.choices.module_layout import as_asked
from rockmate.errors import BudgetError, BudgetTooSmall
from rockmate.memory.budget import RESERVE, resolve_budget
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.record import plan_file_of
from rockmate.planning.graph_solver import memory_for
from rockmate.planning.measured import Measured, measure
from rockmate.planning.plan import Plan
from rockmate.planning.planner import make_plan, planning
from rockmate.planning.request import PlanRequest
from rockmate.queries.batches import MakeBatch, interpolated
from rockmate.queries.low_peaks import LowPeaks

_AFTER_A_LACK = 4  # the next batch is so much smaller: by one part in so many of what is open
_GUESSES = 8  # such searches before a batch is measured


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch that was measured and planned."""

    batch: int
    plan: Plan | None  # None where it does not fit
    why: str  # what it does not fit; "" where it does
    eager_peak_bytes: int | None  # None where it could not be measured
    took_s: float
    lacks_memory: bool = False  # whether it was memory to plan with that was not enough, and not the budget

    @property
    def fits(self) -> bool:
        """Whether a plan was found, and its real step measured within the budget."""
        return self.plan is not None


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch found for a budget."""

    batch: int
    budget_bytes: int
    plan_file: PlanFile
    trials: tuple[Trial, ...]  # in the order in which they were made
    is_largest: bool  # whether the next larger batch was tried, and does not fit
    ended: str  # why no larger one was tried, in words
    eager_batch: int | None  # the largest that would fit without a plan, by interpolation; None where that is not known
    found: str  # how the batch was varied


@dataclass(frozen=True, slots=True)
class _Known:
    """What is kept of a batch that was measured."""

    batch: int
    problem: Problem
    chain: Chain
    step_budget_bytes: int  # what the budget leaves to the step
    eager_bytes: int
    given_bytes: int  # of the data, which are copied for what is run of the model
    forward_bytes: int  # of what a forward takes that saves nothing
    available_bytes: int  # for planning
    schedule: Schedule | None = None  # of its plan, if it has one
    excess_bytes: int = 0  # what a real step took beyond its prediction


class BatchSearch:
    """Measures and plans batches until one fits and the next one does not, or so many were measured."""

    def __init__(
        self, make: MakeBatch, request: PlanRequest, among: Sequence[int], measurements: int | None = None
    ) -> None:
        self._make = make
        self._request = request
        self._among = among  # the batches that may be tried, ascending
        self._measurements = measurements
        self._most = among[-1]
        self._trials: list[Trial] = []
        self._known: list[_Known] = []
        self._best: PlanFile | None = None
        self._refused: BudgetTooSmall | None = None
        self._largest = 0  # of the batches that fit
        self._smallest = self._most + 1  # of those that do not, or may not be tried
        self._checked: tuple[torch.nn.Module, Measured] | None = None  # whose trace was compared with the module
        self._low_peaks = LowPeaks(None, min(request.limits.guess_s, request.limits.longest_s))

    def run(self, start: int, found: str) -> LargestBatch:
        """Search from `start` on. Raises `BudgetTooSmall` where no batch fits that can be planned."""
        batch = self._allowed(start)
        while not self._largest and self._smallest > self._among[0]:
            self._try(batch)
            batch = self._allowed(batch // 2)
        if self._best is None:
            assert self._refused is not None
            smallest = min(trial.batch for trial in self._trials)
            self._refused.add_note(f"with a batch of {smallest}, the smallest that was tried")
            raise self._refused
        in_a_row = 0  # trials that moved the same end by what was expected of them: the next goes further
        last = None
        while self._is_open() and (self._measurements is None or len(self._trials) < self._measurements):
            fits = self._try(self._next(2**in_a_row if in_a_row > 1 else 1, last))
            in_a_row = in_a_row + 1 if fits == last else 0
            last = fits
        return LargestBatch(
            batch=self._largest,
            budget_bytes=self._budget_bytes,
            plan_file=self._best,
            trials=tuple(self._trials),
            is_largest=self._smallest <= self._most and not self._is_open(),
            ended=self._ended(),
            eager_batch=self._eager_batch(),
            found=found,
        )

    def _ended(self) -> str:
        if self._is_open():
            most = "" if self._smallest > self._most else f", fewer than {self._smallest - self._largest} rows"
            return f"after {len(self._trials)} measurements; a little more may fit{most}"
        return f"{self._smallest} does not fit" if self._smallest <= self._most else "the largest that may be tried"

    @property
    def _budget_bytes(self) -> int:
        assert isinstance(self._request.budget, int)  # since the first trial
        return self._request.budget

    # ---- trials --------------------------------------------------------------------------------------

    def _try(self, batch: int) -> bool:
        """Measure and plan a batch; whether it fits."""
        started = time.perf_counter()
        plan, why, eager_bytes, lacks = None, "", None, False
        try:
            plan, eager_bytes = self._planned(batch)
        except BudgetTooSmall as error:
            self._refused, why = error, f"needs {error.smallest_budget_bytes} bytes"
            eager_bytes = self._learn_refusal(batch, error)
        except BudgetError as error:  # more than the machine has
            why = str(error)
        except Exception as error:
            if is_out_of_memory(error):
                why, lacks = "there is not enough memory to measure it", True
            elif self._refused is not None and not self._largest:  # some layers cannot be trained on one row
                why = f"{type(error).__name__}: {error}"
            else:
                error.add_note(f"with a batch of {batch}")
                raise
        if plan is None and self._refused is None:
            self._refused = BudgetTooSmall(f"a batch of {batch} cannot be planned: {why}", 0, "", 0)
        self._trials.append(Trial(batch, plan, why, eager_bytes, time.perf_counter() - started, lacks))
        if plan is None:
            collect_failed()  # the next one is measured with all the memory that there is
            self._smallest = batch
        else:
            self._largest = batch
        return plan is not None

    def _planned(self, batch: int) -> tuple[Plan, int]:
        made = self._make(batch)
        model, sample, loss = (*made, self._request.loss)[:3]
        request = replace(self._request, loss=loss)
        call = make_sample(model, sample)
        # What a forward writes into parameters is given back; what only the first call makes is told with an error.
        with (
            as_asked(model, call, request) as request,
            planning(model),
            left_as_it_was(model, call) as first,
            first.told(),
        ):
            measured = self._measured(model, call, request)
            self._resolve(measured)
            request = replace(request, budget=self._request.budget)
            self._low_peaks = replace(self._low_peaks, memory=memory_for(request, measured))
            self._learn(batch, measured)
            plan = make_plan(measured, request, model).plan
        assert plan.measured_peak_bytes is not None
        self._known[-1] = replace(
            self._known[-1],
            schedule=plan.schedule,
            excess_bytes=max(0, plan.measured_peak_bytes - plan.peak_bytes),
        )
        self._best = plan_file_of(model, measured, plan, request)
        return plan, measured.eager_peak_bytes

    def _measured(self, model: torch.nn.Module, call: Sample, request: PlanRequest) -> Measured:
        """What planning needs to know of a batch. The trace is compared with the module for the first of them.

        The others' are the same operations: so little else is run of them that there is memory for it where there is
        for the plan's step. Whoever follows the plan compares.
        """
        if self._checked is not None and self._checked[0] is model:
            known = self._checked[1]
            alike = request if known.regions is None else replace(request, chosen_regions=known.regions)
            try:
                found = measure(model, call, alike, known)
            except TraceError as error:  # another way, which may be traced otherwise
                if is_out_of_memory(error):
                    raise
            else:
                if _names(found.problem) == _names(known.problem):
                    return found
        found = measure(model, call, request)
        self._checked = (model, replace(found, sample=None))
        return found

    def _resolve(self, measured: Measured) -> None:
        """Bytes for all trials, where the budget is the free memory."""
        if isinstance(self._request.budget, int):
            return
        present = 0 if measured.residents is None else measured.residents.present_bytes
        budget = resolve_budget(self._request.budget, measured.eager_peak_bytes, measured.device, present)
        self._request = replace(self._request, budget=budget)

    def _learn(self, batch: int, measured: Measured) -> None:
        step_bytes = self._budget_bytes - (0 if measured.residents is None else measured.residents.total_bytes)
        sample, graph = measured.sample, measured.graphs.D_graph
        given_bytes = 0 if sample is None else sum(tensor.nbytes for tensor in sample.tensors)
        known = _Known(
            batch,
            measured.problem,
            measured.chain,
            step_bytes,
            measured.eager_peak_bytes,
            given_bytes,
            forward_peak_bytes(graph),
            round(device_of(measured.device).available_bytes() * (1 - RESERVE)),
        )
        self._known.append(known)

    def _learn_refusal(self, batch: int, error: BudgetTooSmall) -> int:
        """How far real steps are above predictions where nothing fits. Returns the eager peak."""
        known = self._known[-1]
        assert known.batch == batch  # nothing is refused before it is measured
        needed_bytes = error.smallest_budget_bytes - (self._budget_bytes - known.step_budget_bytes)
        excess_bytes = max(0, needed_bytes - self._least_bytes(known))
        self._known[-1] = replace(known, excess_bytes=excess_bytes)
        return known.eager_bytes

    def _least_bytes(self, known: _Known) -> int:
        """The lowest peak that is predicted for a batch that was measured, after a short search."""
        plans = [one.schedule for one in self._known if one.schedule is not None and _are_alike(one, known)]
        plan = self._low_peaks.lowest(known.problem, plans, known.chain)
        return self._low_peaks.peak_bytes(known.problem, plan)

    # ---- what to try next ----------------------------------------------------------------------------

    def _next(self, stride: int, last: bool | None) -> int:
        """The batch to try: what others tell, but at least `stride` from the end that moved last."""
        low, high = self._largest + 1, self._smallest - 1
        if self._is_for_lack():  # of which no prediction tells: a quarter less, then half of what is left
            in_a_row = len(list(takewhile(lambda trial: trial.lacks_memory, reversed(self._trials))))
            share = _AFTER_A_LACK if in_a_row == 1 else 2
            return self._allowed(min(max(high + 1 - (high + 1 - self._largest) // share, low), high), low)
        guess = self._expected()
        if guess is None:
            guess = self._leap() if self._smallest > self._most else (low + high) // 2
        elif guess < low:
            guess = low  # to prove that it is the largest
        if last is True and stride > 1:
            guess = max(guess, self._largest + stride)
        elif last is False and stride > 1:
            guess = min(guess, self._smallest - stride)
        return self._allowed(min(max(guess, low), high), low)

    def _is_for_lack(self) -> bool:
        """Whether it was memory to plan with that the smallest batch that does not fit lacks, and not the budget."""
        return any(trial.lacks_memory for trial in self._trials if trial.batch == self._smallest)

    def _allowed(self, batch: int, least: int = 0) -> int:
        """The largest batch up to this one that may be tried, or the smallest of at least `least`."""
        place = bisect_right(self._among, batch) - 1
        found = self._among[max(0, place)]
        return found if found >= least else self._among[bisect_left(self._among, least)]

    def _is_open(self) -> bool:
        """Whether there is a batch between those that fit and those that do not."""
        return bisect_right(self._among, self._largest) < bisect_left(self._among, self._smallest)

    def _expected(self) -> int | None:
        """The largest batch that is expected to fit; None where less than two were measured, or they are unlike."""
        pair = self._nearest()
        if pair is None:
            return None
        one = pair[0]
        if self._between(one.batch, pair) is None:
            return max(self._largest, self._last(partial(self._eager_fits, pair)))
        plans = [known.schedule for known in self._known if known.schedule is not None and _are_alike(known, one)]
        plans.append(schedule_of(one.problem, {}))
        low = max(self._last(partial(self._fits, pair, plan)) for plan in plans)
        for _ in range(_GUESSES):
            if low + 1 >= self._smallest:
                break
            better = self._searched(low + 1, pair, plans)
            if better is None:
                break
            low = self._last(partial(self._fits, pair, better))
            plans.append(better)
        return low

    def _last(self, fits: Callable[[int], bool]) -> int:
        """The last batch for which `fits` holds, of those that may still be tried; it holds up to some batch."""
        low, high = self._largest, self._smallest
        step = max(1, low)
        while low + step < high and fits(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _fits(self, pair: tuple[_Known, _Known], plan: Schedule, batch: int) -> bool:
        problem = self._between(batch, pair)
        traced_bytes = _on_line(batch, pair, lambda known: known.given_bytes + known.forward_bytes)
        return (
            problem is not None
            and traced_bytes <= pair[0].available_bytes
            and self._low_peaks.peak_bytes(problem, plan) <= self._allowed_bytes(batch, pair)
        )

    def _searched(self, batch: int, pair: tuple[_Known, _Known], plans: list[Schedule]) -> Schedule | None:
        """A plan that is expected to fit a batch; None where a short search finds none."""
        problem = self._between(batch, pair)
        allowed_bytes = self._allowed_bytes(batch, pair)
        if problem is None or allowed_bytes <= 0:
            return None
        plan = self._low_peaks.lowest(problem, plans, pair[0].chain, allowed_bytes)
        return plan if self._low_peaks.peak_bytes(problem, plan) <= allowed_bytes else None

    def _between(self, batch: int, pair: tuple[_Known, _Known]) -> Problem | None:
        one, other = pair
        return interpolated(batch, (one.batch, one.problem), (other.batch, other.problem))

    def _allowed_bytes(self, batch: int, pair: tuple[_Known, _Known]) -> int:
        """What a step may take by prediction, if real ones take as much more as that of the nearer batch."""
        nearer = min(pair, key=lambda known: abs(known.batch - batch))
        step_bytes = _on_line(batch, pair, lambda known: known.step_budget_bytes)
        # Blocks are measured beside a copy of what they are given.
        planning_bytes = nearer.available_bytes - _on_line(batch, pair, lambda known: known.given_bytes)
        return round(min(step_bytes, planning_bytes)) - nearer.excess_bytes

    def _eager_fits(self, pair: tuple[_Known, _Known], batch: int) -> bool:
        return _on_line(batch, pair, lambda known: known.eager_bytes) <= self._allowed_bytes(batch, pair)

    def _leap(self) -> int:
        """A batch that fits if all bytes grow with it, as some do not: far enough to learn much from it."""
        known = max(self._known, key=lambda known: known.batch)
        return max(
            2 * known.batch,
            min(
                known.batch * known.step_budget_bytes // max(1, self._least_bytes(known)),
                known.batch * known.available_bytes // max(1, known.given_bytes + known.forward_bytes),
            ),
        )

    def _nearest(self) -> tuple[_Known, _Known] | None:
        """Two batches that were measured: the largest that fits and the smallest that does not, or the two largest."""
        below = sorted((known for known in self._known if known.batch <= self._largest), key=lambda known: known.batch)
        above = [known for known in self._known if known.batch >= self._smallest]
        if below and above:
            return below[-1], min(above, key=lambda known: known.batch)
        return (below[-2], below[-1]) if len(below) > 1 else None

    def _eager_batch(self) -> int | None:
        """The largest batch that fits without a plan, if the eager peak grows as between two that were measured."""
        pair = self._nearest()
        if pair is None:
            return None
        one, other = pair
        slope = (other.eager_bytes - one.eager_bytes) / (other.batch - one.batch)
        if slope <= 0:
            return None
        return max(0, int(one.batch + (one.step_budget_bytes - one.eager_bytes) / slope))


def _are_alike(one: _Known, other: _Known) -> bool:
    """Whether a plan of one is a plan of the other."""
    return _names(one.problem) == _names(other.problem)


def _names(problem: Problem) -> tuple[list[str], list[str]]:
    return [op.name for op in problem.forward], [op.name for op in problem.backward]


def _on_line(batch: int, pair: Sequence[_Known], value: Callable[[_Known], int]) -> float:
    one, other = pair
    share = (batch - one.batch) / (other.batch - one.batch)
    return value(one) + share * (value(other) - value(one))
