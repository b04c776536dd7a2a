"""Retention intervals: the exact solver, and the anytime solver of whole graphs, by constraint programming.

`intervals_model` says what the model is. On a block of some twenty operations one model is solved to the proof. On a
whole graph it is too large; there, large neighbourhood search (P. Shaw, "Using constraint programming and local search
methods to solve vehicle routing problems", CP 1998) frees the recomputations of some operations, keeps all others, and
solves that model, again and again, until the time limit.

Complexity: a model has O(C) variables per operation, and O(C^2) literals per use; solving it is exponential at worst.
Known gaps: the proof covers plans that compute each operation at most `computations` times; the lower bound of a whole
graph is far below the optimum, and with windows it is the time without recomputation. Windows improve a poor plan of a
whole graph, but hardly one that greedy's local search has been at. Needs ortools.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .baselines import baseline_plans
from .evaluate import normalise, peak_and_time
from .greedy import Greedy
from .intervals_cuts import add_cuts
from .intervals_memory import add_hints, add_memory, values_of
from .intervals_model import IntervalModel, Window
from .intervals_windows import Windows
from .problem import Chain, Problem, Recompute
from .rotor import Rotor
from .smallest import lowest_peak_plan
from .solver import Solution, Solver, best_solution, solution_of

SMALL = 32  # forward operations of what is taken for a block: more computations, denser cuts, no windows
BLOCK_CUTS, WHOLE_CUTS, WINDOW_CUTS = 12, 64, 0  # stages with redundant constraints; windows are solved faster without
WINDOW_EFFORT = 0.3  # deterministic time of one window, about seconds
EXACT = 1e-9  # relative difference of times that only rounding makes


@dataclass(frozen=True, slots=True)
class Bounded:
    """A solution, and how much faster another may be."""

    solution: Solution
    lower_bound_ms: float  # no plan that computes each operation at most `computations` times takes less; 0 if unknown
    proven: bool  # whether the search ended with a proof: of the optimum, or that no such plan fits


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model said."""

    plan: Recompute | None  # None: no plan was found
    bound_ms: float  # time of the recomputations, at least
    proven: bool  # the search space is exhausted, or the gap reached
    stopped: bool  # by the user


@dataclass(frozen=True, slots=True)
class Intervals(Solver):
    """Constraint programming with ortools' CP-SAT; raises `ModuleNotFoundError` where ortools is not installed.

    Deterministic for a given seed and `effort` where the time limit is not reached. The keyboard's interrupt ends the
    search and keeps the best plan.
    """

    time_limit_s: float = 30.0
    gap: float = 0.0  # stop when proven to be within this part of the whole step's time
    seed: int = 0
    hints: tuple[Recompute, ...] = ()  # plans to start from; greedy makes one where none is given
    workers: int = 2
    chain: Chain | None = None  # its blocks are what windows free, and rotor gives a hint
    progress: Callable[[str], None] | None = None  # called with one line after each better plan
    computations: int | None = None  # of each operation, at most; None: 3 on blocks, 2 on whole graphs
    windows: bool | None = None  # large neighbourhood search; None: on whole graphs
    effort: float | None = None  # limit in CP-SAT's deterministic time, about seconds; None: none

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "intervals"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest schedule found within `budget_bytes`, or the one of lowest peak known."""
        return self.bounded(problem, budget_bytes).solution

    def bounded(self, problem: Problem, budget_bytes: int) -> Bounded:
        """As `solve`, with the lower bound. Raises as `solve`, and `ValueError` for a hint that is no plan."""
        if importlib.util.find_spec("ortools") is None:
            raise ModuleNotFoundError("the solver Intervals needs OR-tools; install it: pip install ortools")
        if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
            solution = solution_of(problem, budget_bytes, problem.no_recompute, self.name)
            return Bounded(solution, solution.time_ms, proven=True)
        return _Search(self, problem, budget_bytes).run()


class _Search:
    """One run: the best plan so far, and how long to go on."""

    def __init__(self, options: Intervals, problem: Problem, budget_bytes: int) -> None:
        self.options, self.problem, self.budget_bytes = options, problem, budget_bytes
        self.deadline = time.monotonic() + options.time_limit_s
        self.whole = len(problem.forward) > SMALL
        self.computations = options.computations or (2 if self.whole else 3)
        self.effort = 0.0  # spent, in deterministic time
        self.best = best_solution(problem, budget_bytes, [("", plan) for plan in self._starts()])
        self._report()

    def run(self) -> Bounded:
        """Search until the proof, the limit or the user's interrupt."""
        windows = self.whole if self.options.windows is None else self.options.windows
        base_ms = self.problem.keep_all_time_ms
        answer = Answer(None, 0.0, proven=False, stopped=False)
        try:
            if not (windows and self.best.status.fits):  # a window without a plan would mean nothing
                answer = self._ask(None, self.deadline - time.monotonic(), self._effort_left())
            if windows and not answer.proven and not answer.stopped:
                self._improve()
        except KeyboardInterrupt:
            pass
        if not self.best.status.fits:
            plan = lowest_peak_plan(self.problem, [self.best.recompute], self.options.chain, self.deadline)
            self._take(plan)
            return Bounded(self._final(optimal=False), base_ms + answer.bound_ms, answer.proven)
        bound_ms = min(base_ms + answer.bound_ms, self.best.time_ms)
        optimal = answer.proven and self.best.time_ms - bound_ms <= EXACT * self.best.time_ms
        return Bounded(self._final(optimal), bound_ms, answer.proven)

    def _starts(self) -> list[Recompute]:
        options = self.options
        if options.hints:
            return [self.problem.no_recompute, *(normalise(self.problem, plan) for plan in options.hints)]
        limit_s = options.time_limit_s / 4
        greedy = Greedy(options.seed, time_limit_s=limit_s).solve(self.problem, self.budget_bytes).recompute
        starts = [greedy, *baseline_plans(self.problem, options.chain)]
        if options.chain is not None:
            starts.append(Rotor(options.chain).solve(self.problem, self.budget_bytes).recompute)
        return starts

    def _effort_left(self) -> float | None:
        return None if self.options.effort is None else self.options.effort - self.effort

    def _improve(self) -> None:
        """Large neighbourhood search from the best plan."""
        source = Windows(self.problem, self.options.seed, self.options.chain)
        while True:
            left_s, effort = self.deadline - time.monotonic(), self._effort_left()
            if left_s <= 0.05 or (effort is not None and effort <= 0) or not any(self.best.recompute):
                return
            given = WINDOW_EFFORT if effort is None else min(WINDOW_EFFORT, effort)
            before = self.effort
            answer = self._ask(source.next(self.best.recompute), left_s, given)
            source.learn(answer.proven, (self.effort - before) / WINDOW_EFFORT)
            if answer.stopped:
                return

    def _ask(self, window: Window | None, limit_s: float, effort: float | None) -> Answer:
        """Solve one model and take its plan where it is better."""
        problem, plan = self.problem, self.best.recompute
        model = IntervalModel(problem, self.budget_bytes, plan, self.computations, window)
        if not model.fits:
            return Answer(None, 0.0, proven=True, stopped=False)
        values = values_of(model)
        add_memory(model, values)
        cuts = WINDOW_CUTS if window else WHOLE_CUTS if self.whole else BLOCK_CUTS
        if cuts:
            add_cuts(model, values, cuts)
        add_hints(model)
        solver = self._solver(model, limit_s, effort)
        status, stopped = run(solver, model.cp)
        self.effort += solver.response_proto.deterministic_time
        found = None
        if status in ("OPTIMAL", "FEASIBLE"):
            found = model.recompute(solver.value)
            self._take(found)
        elif status == "MODEL_INVALID":
            raise RuntimeError(f"CP-SAT refuses the model: {model.cp.validate()}")
        proven = status in ("OPTIMAL", "INFEASIBLE")
        bound = 0.0 if status == "INFEASIBLE" else max(0.0, solver.best_objective_bound)
        return Answer(found, bound * model.units.time_ms, proven, stopped)

    def _solver(self, model: IntervalModel, limit_s: float, effort: float | None) -> Any:
        from ortools.sat.python import cp_model  # optional, and slow to import

        solver = cp_model.CpSolver()
        parameters = solver.parameters
        parameters.max_time_in_seconds = max(limit_s, 0.01)
        if effort is not None:
            parameters.max_deterministic_time = max(effort, 1e-3)
        parameters.num_workers = self.options.workers
        parameters.interleave_search = True  # the same answer for the same seed
        parameters.random_seed = self.options.seed
        parameters.catch_sigint_signal = False  # it would end the search but then lose Python's handler
        parameters.absolute_gap_limit = self.options.gap * self.problem.keep_all_time_ms / model.units.time_ms
        return solver

    def _take(self, plan: Recompute) -> None:
        """Keep `plan` if it is better, by the one judge of plans."""
        known, found = self.best, solution_of(self.problem, self.budget_bytes, plan, self.options.name)
        if found.status.fits and known.status.fits:
            better = found.time_ms < known.time_ms - 1e-12 * known.time_ms
        elif found.status.fits or known.status.fits:
            better = found.status.fits
        else:
            better = found.peak_bytes < known.peak_bytes
        if better:
            self.best = found
            self._report()

    def _report(self) -> None:
        if self.options.progress is not None:
            self.options.progress(str(self.best))

    def _final(self, optimal: bool) -> Solution:
        return solution_of(self.problem, self.budget_bytes, self.best.recompute, self.options.name, optimal=optimal)


def run(solver: Any, model: Any) -> tuple[str, bool]:
    """Solve in a thread, so that the keyboard's interrupt reaches this one: the status' name, and whether it did."""
    names: list[str] = []
    errors: list[BaseException] = []
    done = threading.Event()  # not `Thread.join`: interrupted, it may take a running thread for an ended one

    def work() -> None:
        try:
            names.append(solver.status_name(solver.solve(model)))
        except BaseException as error:  # noqa: BLE001  # raised below, in the caller's thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="cp-sat", daemon=True).start()
    stopped = False
    while not done.is_set():
        try:
            if stopped:
                solver.stop_search()  # again and again: the solver may not have started
            done.wait(0.1 if stopped else None)
        except KeyboardInterrupt:
            stopped = True
    if errors:
        raise errors[0]
    return names[0], stopped
