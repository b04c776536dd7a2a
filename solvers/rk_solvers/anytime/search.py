"""An anytime search over the whole graph: the best plan so far, what is proven, and the ways to get on with both.

Plans come from greedy tries, from rotor along the chain, from the coarse-to-fine relaxation (`refinement`), repaired to
the budget, from destroying and repairing parts of good plans (`local_search`), and from the best of several together
(`combine`). Bounds come from the relaxation, and those of chains from `chain_bound`. Programs are solved in a process
of their own; meanwhile a fixed amount of the other work is done here, so that the result does not depend on the clock
unless the time limit ends the search.

A second wind follows if a plan may still be much faster then, in the extra time, or in the second half of the time
where there is none: the same, but what is done here is first of all to combine plans, and to improve the best one by
exact programs for a few stages (`exact_windows`), for as long as the relaxation takes. That is one for small budgets
then (`narrowing`). On two cores both would leave greedy tries too little at first.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rk_solvers.baselines.both import baseline_plans
from rk_solvers.bounds.chain_bound import chain_bound_ms
from rk_solvers.bounds.narrowing import Narrowing
from rk_solvers.bounds.refinement import Refinement, Target, left_s
from rk_solvers.chain.rotor import Rotor
from rk_solvers.exact.checkmate import Program
from rk_solvers.exact.combine import MOST_BINARIES, combination
from rk_solvers.exact.windows import ExactWindows
from rk_solvers.groups import normalise
from rk_solvers.limits import Limits
from rk_solvers.liveness import PlanState, Tables, peak_and_time
from rk_solvers.local.greedy import attempts
from rk_solvers.local.local_search import improve, improve_nearby, polish, weights_for
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.local.repair import repair
from rk_solvers.milp import BackendLimits, Outcome, Result, solve
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.side_process import SideProcess
from rk_solvers.solver import SAME

_LOG = logging.getLogger(__name__)

POOL = 12  # plans kept for combination
PATIENCE = 6  # parts of work without a better plan, once the relaxation cannot be refined, before the search ends
HOPELESS = 3  # groupings without a plan that fits, before the search ends
MEANWHILE = 6  # parts of work while an integer program is solved
FAR = 0.02  # a gap that is worth a second wind
WIDE = 0.05  # a gap, after the first grouping, with which that begins at once
FIRST = 10  # parts of work that are done before windows and combinations, where it does
LONG = 600  # forward operations above which rotor comes first, and plans are improved piece by piece
HUGE = 2000  # forward operations above which there is no second wind, but all of the time from the start
BINARIES = 400  # of a combination in the second wind, at first; fewer where that takes too long
WINDOW_GAP = 0.01  # of the recomputation's time, that it may leave
POLISH = 0.15  # of the time left, at most, to drop what is redundant of a large plan, and to improve it
ROUND_S = 5.0  # of the second wind, at least
LATE_S = 0.5  # by which one may be late
POLL_S = 0.01  # between two looks at what is computed aside
GRACE_S = 3.0  # beyond its limit, before a back end that overlooks it is ended


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A plan that fits the budget."""

    time_ms: float
    peak_bytes: int
    recompute: Recompute
    solver: str = field(compare=False)


@dataclass(slots=True)
class Search:
    """The state of a search. `plans` are those that fit, the fastest first."""

    problem: Problem
    budget_bytes: int
    chain: Chain | None
    limits: Limits
    say: Callable[[str], None]
    process: SideProcess  # for the relaxation, and for combinations before the second wind
    aside: SideProcess  # for windows and combinations in the second wind, beside the relaxation
    tries: int = 6  # of greedy
    improvements: int = 120  # rounds of local search, in four parts, on each plan
    bound_ms: float = 0.0
    plans: list[Candidate] = field(default_factory=list)
    others: list[Recompute] = field(default_factory=list)  # that do not fit
    enough: float = field(init=False)  # the gap to reach
    first_deadline: float = field(init=False)  # of `time.monotonic`, without extra time
    deadline: float = field(init=False)  # of what is done now
    second_wind: bool = False
    refinement: Refinement | Narrowing = field(init=False)
    windows: ExactWindows = field(init=False)
    tables: Tables = field(init=False)
    rng: random.Random = field(init=False)
    _combined: tuple[Recompute, ...] = ()
    _first: int = 0  # parts of work still to be done before windows and combinations
    _is_refining: bool = False  # whether the relaxation is refined in its process
    _binaries: float = MOST_BINARIES  # of the next combination, at most
    _work: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        started, extra_s = time.monotonic(), self.limits.extra_s
        self.enough, self.first_deadline = max(self.limits.gap, SAME), started + self.limits.search_s
        self.deadline = self.first_deadline if extra_s > 0 else started + self.limits.search_s / 2
        if self.is_huge:
            # What a second wind does is for smaller problems; here, the first one needs all of the time.
            self.enough, self.deadline = max(self.enough, FAR if extra_s else 0.0), self.first_deadline + extra_s
        self.refinement = Refinement(self.problem, self.budget_bytes, self.chain)
        self.windows = ExactWindows(self.problem, self.budget_bytes)
        self.tables = Tables(self.problem)
        self.rng = random.Random(self.limits.seed)
        self.bound_ms = chain_bound_ms(self.problem, self.budget_bytes)
        self._work = self._all_work()

    @property
    def gap(self) -> float:
        """The share of the best plan's time that a better one could save at most."""
        if not self.plans:
            return 1.0
        best_ms = self.plans[0].time_ms
        return max(0.0, 1 - self.bound_ms / best_ms) if best_ms > 0 else 0.0  # nothing takes less than no time

    @property
    def is_huge(self) -> bool:
        """Whether there is no second wind."""
        return len(self.problem.forward) > HUGE

    def done(self) -> bool:
        """Whether the gap or the time limit is reached, or no plan can fit."""
        near = bool(self.plans) and self.gap <= self.enough
        return near or self.bound_ms == float("inf") or time.monotonic() >= self.deadline

    def add(self, solver: str, plan: Recompute) -> bool:
        """Take note of a plan; whether it is the best so far."""
        plan = normalise(self.problem, plan)
        peak_bytes, time_ms = peak_and_time(self.problem, plan)
        if peak_bytes > self.budget_bytes:
            self.others.append(plan)
            return False
        found = Candidate(time_ms, peak_bytes, plan, solver)
        if any(found.recompute == other.recompute for other in self.plans):
            return False
        self.plans = sorted([*self.plans, found])[:POOL]
        best = self.plans[0] is found
        if best:
            self.report()
        return best

    def prove(self, bound_ms: float) -> None:
        """Take note of a bound."""
        if bound_ms > self.bound_ms:
            self.bound_ms = bound_ms
            if self.plans:
                self.report()

    def report(self) -> None:
        """Say how far the search is."""
        best, least = self.plans[0], self.problem.keep_all_time_ms or 1.0
        self.say(f"{100 * (best.time_ms / least - 1):+.2f} % by {best.solver}, gap {100 * self.gap:.2f} %")

    def work(self, parts: int = 1) -> None:
        """Some parts of the work beside the relaxation: in the second wind programs aside, as long as there are any."""
        for _ in range(parts):
            if self.done():
                return
            if self.second_wind and not self._first and (self._combine() or self._improve_in_window()):
                continue
            next(self._work, None)
            self._first = max(0, self._first - 1)

    def run_rounds(self, rounds: int) -> None:
        """Search for so many rounds here, without the relaxation and other programs."""
        for _ in range(rounds):
            self.work()

    def run(self) -> None:
        """Search until the gap or the limit is reached, or nothing more is to be expected."""
        if self.problem.backward:
            self._refine()  # the first plans meanwhile
        if not self.plans and not self.done():
            limit = time.monotonic() + 0.3 * (self.deadline - time.monotonic())
            self.add("smallest", min_peak_plan(self.problem, self.others, self.chain, limit, self.budget_bytes))
        if self.plans and self.gap > WIDE and self.tables.count <= LONG:
            self._first = FIRST
            self._narrow()
            self._begin_refining()
        self._go_on()
        if self.is_huge:
            return
        if self.plans and self.gap > max(self.enough, FAR):
            self._begin_second_wind()
        elif self.limits.extra_s > 0:
            return
        # What is told is extra time from now on, even where the first part has ended before its time.
        extra_s = self.limits.extra_s
        self.deadline = time.monotonic() + extra_s if extra_s > 0 else self.first_deadline
        self._go_on()

    def _begin_second_wind(self) -> None:
        """From here on what is for gaps that do not close."""
        if self.limits.extra_s > 0:
            self.enough = max(self.enough, FAR)
            self.say(f"gap {100 * self.gap:.2f} %: the search goes on for {self.limits.extra_s:.0f} s at most")
            # Logged, and so told at once, before the wait that it explains; warnings may be collected until the end.
            _LOG.warning(
                "The plan found so far may be up to %.1f %% slower than the best one: the search goes on for %.0f s at "
                "most. A time limit bounds it (time_limit=15), and Ctrl-C ends it with the best plan so far.",
                100 * self.gap,
                self.limits.extra_s,
            )
        self._narrow()

    def _narrow(self) -> None:
        """From here on relaxations for small budgets, and programs of its own for plans."""
        if self.second_wind:
            return
        self.second_wind, self._binaries = True, BINARIES
        if isinstance(self.refinement, Refinement):
            self.refinement = Narrowing.of(self.refinement)
        self.aside.prepare()
        if self.limits.extra_s == 0:
            self.deadline = self.first_deadline

    def _go_on(self) -> None:
        """Refine and combine, then combine alone, until the search is done or nothing changes any more."""
        before = -1
        while self.refinement.rounds != before and not self.done():
            if self.refinement.plan is not None:
                self.add_repaired("coarse-to-fine", self.refinement.plan)
            self._combine()
            if self.done() or (not self.plans and self.refinement.rounds >= HOPELESS):
                break
            before = self.refinement.rounds
            self._refine()
        idle = 0
        while not self.done() and idle < PATIENCE:
            best = self.plans[:1]
            self.work()
            self._combine()
            idle = idle + 1 if self.plans[:1] == best else 0

    def add_repaired(self, solver: str, plan: Recompute, rounds: int = 0) -> None:
        """Take note of a plan once its excess is repaired, and what is redundant dropped."""
        state = PlanState(self.tables, plan)
        weights = weights_for(state, self.rng, 1.0, 0.0)
        if not repair(state, self.budget_bytes, weights, self.deadline):
            self.others.append(normalise(self.problem, state.recompute()))
            return
        if self.tables.count <= LONG:
            polish(state, self.budget_bytes, self.deadline)
            improve(state, self.budget_bytes, rounds, self.deadline, self.rng)
        else:
            polish(state, self.budget_bytes, time.monotonic() + POLISH * self._left_s())
            improve_nearby(state, self.budget_bytes, rounds, time.monotonic() + POLISH * self._left_s(), self.rng)
        self.add(solver, state.recompute())

    def _refine(self) -> None:
        """The next grouping of the relaxation, with its bound noted, and other work meanwhile.

        In the second wind as many as there is time for, as long as there is one.
        """
        rounds = self.refinement.rounds
        if not self._is_refining:
            self._begin_refining()
        if self.second_wind:
            while self._is_refining and not self.done():
                self.work()
                self._go_on_refining()
        else:
            self.work(MEANWHILE if rounds else 1 if self.tables.count > LONG else 2)
        if self.second_wind and self.done() and self._left_s() > LATE_S:  # near enough: no more has to be proven
            self.process.close()
            self._is_refining = False
        if self._is_refining:
            self._end_refining()

    def _begin_refining(self) -> None:
        """Have the relaxation refined, in a process of its own."""
        best, rounds = self.plans[0] if self.plans else None, self.refinement.rounds
        incumbent = best.recompute if best else self.problem.no_recompute
        least_ms = self.problem.keep_all_time_ms
        overhead = best.time_ms / least_ms - 1 if best and least_ms > 0 else 1.0
        gap = min(0.05, 0.25 * self.limits.gap / max(overhead, 1e-9))  # of the recomputation's time
        limit_s = max(1.0, (0.4 if rounds or self.tables.count > LONG else 0.1) * self._left_s())
        if isinstance(self.refinement, Narrowing):
            share = self.refinement.share(incumbent)
            limit_s = max(1.0, share * self._left_s(), min(ROUND_S, self._left_s() - LATE_S))
        target = Target(best.time_ms * (1 - self.enough) if best else float("inf"), limit_s, gap)
        self.process.start(self._left_s(), self.refinement.advanced, incumbent, target)
        self._is_refining = True

    def _end_refining(self) -> None:
        """Take note of the refined relaxation's bound."""
        self.refinement = self.process.wait(self.refinement)
        self._is_refining = False
        self.prove(self.refinement.bound_ms)

    def _go_on_refining(self) -> None:
        """Once the relaxation is refined, take note of it, and have it refined further if there is anything to do."""
        if not self._is_refining or not self.process.answered():
            return
        before = self.refinement.rounds
        self._end_refining()
        if self.refinement.rounds != before and not self.done():
            self._begin_refining()
            if self.refinement.plan is not None:
                self.add_repaired("coarse-to-fine", self.refinement.plan)

    def _left_s(self) -> float:
        return left_s(self.deadline)

    def _combine(self) -> bool:
        """The best of the plans together, if there are new ones; whether a program was made for that."""
        pool = tuple(candidate.recompute for candidate in self.plans)
        if self.done() or len(pool) < 2 or pool == self._combined:
            return False
        self._combined = pool
        program = combination(self.problem, self.budget_bytes, pool, int(self._binaries))
        if program is None:
            return False
        limit_s = max(1.0, 0.2 * self._left_s())
        if self.second_wind:
            limit_s = min(self.limits.combination_s, limit_s)
            in_time = self._solved("combination", program, BackendLimits(limit_s), self.aside)
            self._binaries = max(BINARIES / 3, min(MOST_BINARIES, self._binaries * (1.25 if in_time else 0.75)))
        else:
            self._solved("combination", program, BackendLimits(limit_s), self.process, meanwhile=1)
        return True

    def _improve_in_window(self) -> bool:
        """Improve the best plan in one window; whether there is one that has not been looked at."""
        program = self.windows.next(self.plans[0].recompute) if self.plans else None
        if program is None:
            return False
        limits = BackendLimits(min(self.limits.window_s, self._left_s()), WINDOW_GAP)
        self._solved("window", program, limits, self.aside)
        return True

    def _solved(
        self, name: str, program: Program, limits: BackendLimits, process: SideProcess, *, meanwhile: int = 0
    ) -> bool:
        """Take note of the plan that a program finds, with parts of other work meanwhile; whether it ends in time."""
        process.start(limits.time_limit_s + GRACE_S, solve, program.model, "scipy", limits)
        self.work(meanwhile)
        while self.second_wind and not process.answered():
            if not self._first:  # otherwise this is for a plan to go by
                self._go_on_refining()
            time.sleep(POLL_S)
        result: Result | None = process.wait(None)
        if result is not None and result.values is not None:
            self.add_repaired(name, program.plan(result.values))
        return result is not None and result.outcome is not Outcome.LIMIT

    def _all_work(self) -> Iterator[None]:
        """Everything that needs no program, in parts of about equal length."""
        problem = self.problem
        large = self.tables.count > LONG
        # One repair of a large keep-all takes longer than the chain's table, and gives less; of operations that follow
        # each other, that table has the best plans there are, or nearly.
        rotor_first = large or self.bound_ms > problem.keep_all_time_ms
        if rotor_first:
            self._add_of_rotor()
            yield
        baselines = [normalise(problem, plan) for plan in baseline_plans(problem, self.chain)]
        for plan in baselines:
            self.add("baseline", plan)
        if large and self.plans:
            self._add_improved()
            yield
        starts = attempts(self.tables, self.budget_bytes, baselines, self.limits.seed, self.tries, self.first_deadline)
        for number, state in enumerate(starts):
            if state.peak_bytes > self.budget_bytes:
                self.others.append(normalise(problem, state.recompute()))
            else:
                self.add("greedy", state.recompute())
            if number:
                yield
        yield
        if not rotor_first and self.chain is not None:
            self._add_of_rotor()
            yield
        while True:
            if self.plans:
                self._add_improved()
            yield

    def _add_of_rotor(self) -> None:
        """Take note of what rotor plans along the chain, in two thirds of what time is left."""
        if self.chain is None:
            return
        rotor = Rotor(self.chain, time_limit_s=2 / 3 * self._left_s())
        with contextlib.suppress(TimeoutError):
            for plan in rotor.prepare(self.problem, max(self.budget_bytes, 0)).plans(self.budget_bytes):
                self.add("rotor", plan)

    def _add_improved(self) -> None:
        """Take note of what a quarter of the rounds of local search makes of one of the best plans."""
        chosen = self.rng.choice(self.plans[:4])
        self.add_repaired(chosen.solver, chosen.recompute, max(1, self.improvements // 4))
