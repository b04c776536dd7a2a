"""Retention intervals: the exact solver, and the anytime solver of whole graphs, by constraint programming.

`intervals_model` says what the model is. On a block of some twenty operations one model is solved to the proof. On a
whole graph it is too large; there, large neighbourhood search (P. Shaw, "Using constraint programming and local search
methods to solve vehicle routing problems", CP 1998) frees the recomputations of some operations, keeps all others, and
solves that model, again and again, until the time limit.

Complexity: a model has O(C) variables per operation, and O(C^2) literals per use; solving it is exponential at worst.
Known gaps: the proof covers plans that compute each operation at most `computations` times; the lower bound of a whole
graph is far below the optimum, and with windows it is the time without recomputation. Windows improve a poor plan of a
whole graph, but hardly one that greedy's local search has been at. Needs ortools.

CP-SAT runs in a process of its own (`side_process`): in this one it would take the keyboard's interrupt from Python.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rk_solvers.baselines.both import baseline_plans
from rk_solvers.chain.rotor import Rotor
from rk_solvers.groups import normalise
from rk_solvers.intervals.cuts import add_cuts
from rk_solvers.intervals.memory import add_hints, add_memory, values_of
from rk_solvers.intervals.model import IntervalModel, Window
from rk_solvers.intervals.windows import Windows
from rk_solvers.liveness import peak_and_time, recompute_of
from rk_solvers.local.greedy import Greedy
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.milp import BackendUnavailable
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.side_process import SideProcess
from rk_solvers.solver import Solution, Solver, best_solution, solution_of

SMALL = 32  # forward operations of what is taken for a block: more computations, denser cuts, no windows
BLOCK_CUTS, WHOLE_CUTS, WINDOW_CUTS = 12, 64, 0  # stages with redundant constraints; windows are solved faster without
WINDOW_EFFORT = 0.3  # deterministic time of one window, about seconds
STOP_S = 5.0  # after the interrupt, until CP-SAT must have answered
OVERTIME_S = 10.0  # beyond its time limit, likewise
START_S = 60.0  # at most, until the process is ready
EXACT = 1e-9  # relative difference of times that only rounding makes


@dataclass(frozen=True, slots=True)
class Bounded:
    """A solution, and how much faster another may be."""

    solution: Solution
    lower_bound_ms: float  # no plan that computes each operation at most `computations` times takes less; 0 if unknown
    proven: bool  # whether the search ended with a proof: of the optimum, or that no such plan fits


@dataclass(frozen=True, slots=True)
class Question:
    """One model to solve."""

    problem: Problem
    budget_bytes: int
    plan: Recompute  # hinted; kept outside the window
    computations: int
    window: Window | None
    cuts: int
    limit_s: float
    gap_ms: float
    parameters: dict[str, Any]  # of CP-SAT


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model said."""

    plan: Recompute | None = None  # None: no plan was found
    bound_ms: float = 0.0  # time of the recomputations, at least
    proven: bool = False  # the search space is exhausted, or the gap reached
    effort: float = 0.0  # spent, in deterministic time
    error: str = ""  # why CP-SAT refuses the model


@dataclass(frozen=True, slots=True)
class Intervals(Solver):
    """Constraint programming with ortools' CP-SAT; raises `BackendUnavailable` where ortools is not installed.

    Deterministic for a given seed and `effort` where the time limit is not reached. The keyboard's interrupt ends the
    search and keeps the best plan, once the first plans are made.
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
            raise BackendUnavailable("the solver Intervals needs OR-tools; install it: pip install ortools")
        if peak_and_time(problem, problem.no_recompute)[0] <= budget_bytes:
            solution = solution_of(problem, budget_bytes, problem.no_recompute, self.name)
            return Bounded(solution, solution.time_ms, proven=True)
        with SideProcess() as process:
            return _Search(self, problem, budget_bytes, process).run()


class _Search:
    """One run: the best plan so far, and how long to go on."""

    def __init__(self, options: Intervals, problem: Problem, budget_bytes: int, process: SideProcess) -> None:
        self.options, self.problem, self.budget_bytes, self.process = options, problem, budget_bytes, process
        process.start(START_S, load)  # while the first plans are made here
        self.deadline = time.monotonic() + options.time_limit_s
        self.whole = len(problem.forward) > SMALL
        self.computations = options.computations or (2 if self.whole else 3)
        self.effort = 0.0  # spent, in deterministic time
        self.stopped = False  # by the user
        self.best = best_solution(problem, budget_bytes, [("", plan) for plan in self._starts()])
        self._report()

    def run(self) -> Bounded:
        """Search until the proof, the limit or the user's interrupt."""
        windows = self.whole if self.options.windows is None else self.options.windows
        base_ms = self.problem.keep_all_time_ms
        answer = Answer()
        try:
            self.process.wait(None)
            if not (windows and self.best.status.fits):  # a window without a plan would mean nothing
                answer = self._ask(None, self.deadline - time.monotonic(), self._effort_left())
            if windows and not answer.proven and not self.stopped:
                self._improve()
        except KeyboardInterrupt:
            self.stopped = True
            self.process.close()
            self.deadline = time.monotonic()
        if not self.best.status.fits:
            plan = min_peak_plan(self.problem, [self._best_plan], self.options.chain, self.deadline)
            self._take(plan)
            return Bounded(self._final(optimal=False), base_ms + answer.bound_ms, answer.proven)
        bound_ms = min(base_ms + answer.bound_ms, self.best.time_ms)
        optimal = answer.proven and self.best.time_ms - bound_ms <= EXACT * self.best.time_ms
        return Bounded(self._final(optimal), bound_ms, answer.proven)

    @property
    def _best_plan(self) -> Recompute:
        return recompute_of(self.problem, self.best.schedule)

    def _starts(self) -> list[Recompute]:
        options = self.options
        if options.hints:
            hints = (recompute_of(self.problem, plan) for plan in options.hints)
            return [self.problem.no_recompute, *(normalise(self.problem, plan) for plan in hints)]
        limit_s = options.time_limit_s / 4
        greedy = Greedy(options.seed, time_limit_s=limit_s).plan(self.problem, self.budget_bytes)
        starts = [greedy, *baseline_plans(self.problem, options.chain)]
        if options.chain is not None:
            rotor = Rotor(options.chain).solve(self.problem, self.budget_bytes)
            starts.append(recompute_of(self.problem, rotor.schedule))
        return starts

    def _effort_left(self) -> float | None:
        return None if self.options.effort is None else self.options.effort - self.effort

    def _improve(self) -> None:
        """Large neighbourhood search from the best plan."""
        source = Windows(self.problem, self.options.seed, self.options.chain)
        while True:
            left_s, effort = self.deadline - time.monotonic(), self._effort_left()
            if left_s <= 0.05 or (effort is not None and effort <= 0) or not self.best.schedule.recomputations:
                return
            given = WINDOW_EFFORT if effort is None else min(WINDOW_EFFORT, effort)
            before = self.effort
            answer = self._ask(source.next(self._best_plan), left_s, given)
            source.learn(answer.proven, (self.effort - before) / WINDOW_EFFORT)
            if self.stopped:
                return

    def _ask(self, window: Window | None, limit_s: float, effort: float | None) -> Answer:
        """Solve one model and take its plan where it is better."""
        options, problem = self.options, self.problem
        parameters: dict[str, Any] = {
            "num_workers": options.workers,
            "interleave_search": True,  # the same answer for the same seed
            "random_seed": options.seed,
        }
        if effort is not None:
            parameters["max_deterministic_time"] = max(effort, 1e-3)
        cuts = WINDOW_CUTS if window else WHOLE_CUTS if self.whole else BLOCK_CUTS
        gap_ms, plan = options.gap * problem.keep_all_time_ms, self._best_plan
        question = Question(
            problem, self.budget_bytes, plan, self.computations, window, cuts, limit_s, gap_ms, parameters
        )
        answer = self._answer(question)
        if answer.error:
            raise RuntimeError(f"CP-SAT refuses the model: {answer.error}")
        self.effort += answer.effort
        if answer.plan is not None:
            self._take(answer.plan)
        return answer

    def _answer(self, question: Question) -> Answer:
        """The process' answer to `question`; an empty one if it failed twice, or ended late."""
        lost = Answer(effort=question.parameters.get("max_deterministic_time", 0.0))
        limit = time.monotonic() + question.limit_s
        answer = lost
        try:
            for _ in range(2):  # native code may crash, now and then
                if answer is not lost or time.monotonic() >= limit:
                    break
                left_s = limit - time.monotonic()
                self.process.start(left_s + OVERTIME_S, answer_to, replace(question, limit_s=left_s), os.getpid())
                answer = self.process.wait(lost)
        except KeyboardInterrupt:
            self.stopped = True
            self.process.interrupt(STOP_S)
            answer = self.process.wait(lost)
            self.deadline = time.monotonic()
        return answer

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
        solution = solution_of(self.problem, self.budget_bytes, self.best.schedule, self.options.name, optimal=optimal)
        return replace(solution, interrupted=self.stopped)


def load() -> None:
    """Import what `answer_to` needs."""
    from ortools.sat.python import cp_model  # noqa: F401  # optional, and slow to import


def answer_to(question: Question, caller: int) -> Answer:
    """Build and solve a model, asked for by the process of that number."""
    from ortools.sat.python import cp_model

    limit = time.monotonic() + question.limit_s
    problem = question.problem
    model = IntervalModel(problem, question.budget_bytes, question.plan, question.computations, question.window)
    if not model.fits:
        return Answer(proven=True)
    values = values_of(model)
    add_memory(model, values)
    if question.cuts:
        add_cuts(model, values, question.cuts)
    add_hints(model)
    solver = cp_model.CpSolver()
    for name, value in question.parameters.items():
        setattr(solver.parameters, name, value)
    solver.parameters.max_time_in_seconds = max(limit - time.monotonic(), 0.01)
    solver.parameters.absolute_gap_limit = question.gap_ms / model.units.time_ms
    # the interrupt ends the search with its best plan; but in the caller's process Python would lose its handler
    solver.parameters.catch_sigint_signal = os.getpid() != caller
    status = solver.status_name(solver.solve(model.cp))
    if status == "MODEL_INVALID":
        return Answer(error=model.cp.validate())
    plan = model.recompute(solver.value) if status in ("OPTIMAL", "FEASIBLE") else None
    bound = 0.0 if status == "INFEASIBLE" else max(0.0, solver.best_objective_bound)
    proven = status in ("OPTIMAL", "INFEASIBLE")
    return Answer(plan, bound * model.units.time_ms, proven, solver.response_proto.deterministic_time)
