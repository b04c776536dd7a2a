"""Many random problems under many budgets: what every solver promises, and sweeps over the budgets of one problem."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest

from rk_solvers import (
    Auto,
    Chain,
    Chen,
    Greedy,
    KeepAll,
    KeepNone,
    Knapsack,
    Limits,
    Oracle,
    Problem,
    Rotor,
    Solution,
    Solver,
    Status,
    check,
    evaluate,
    peak_and_time,
    solver_named,
)
from rk_solvers.anytime.sweep import solve_sweep
from rk_solvers.liveness import least_bytes
from rk_solvers.problem import Recompute
from rk_solvers.solver import best_solution
from tests.solver.instances import chain_of, gpt2, random_problem, random_step

SHARES = (0.0, 0.15, 0.35, 0.6, 0.85)  # from below the least that one operation holds up to keep-all's peak
PROBLEMS, BATCHES = 1000, 20
TOLERANCE = 1 + 1e-9  # of sums in another order
UNLIMITED_S = 1e4


def budgets_of(problem: Problem, shares: tuple[float, ...] = SHARES) -> list[int]:
    low, high = least_bytes(problem) - 1, peak_and_time(problem, problem.no_recompute)[0]
    return [round(low + share * (high - low)) for share in shares]


def quick_solvers(seed: int, chain: Chain) -> dict[str, Solver]:
    """Those that take milliseconds, of small effort; some problems have more, and rotor, whose table takes longer."""
    more = seed % 20 == 0
    solvers: dict[str, Solver] = {
        "greedy": Greedy(seed, tries=2, rounds=10 if more else 2, time_limit_s=UNLIMITED_S),
        "chen": Chen(chain) if more else Chen(chain, max_tries=6),
        "keep-all": KeepAll(),
        "keep-none": KeepNone(),
        "knapsack": Knapsack() if more else Knapsack(slots=200, tries=5, windows=(1, 4)),
    }
    return solvers | ({"rotor": Rotor(chain, slots=100, grid=2, internal=3)} if more else {})


def check_promises(seed: int) -> None:
    """All solvers, all budgets, one problem: valid schedules, useful refusals, and no plan below the bound."""
    problem, chain = random_step(seed)
    for budget in budgets_of(problem):
        fitting_ms: dict[str, float] = {}
        bounds_ms = {"no recomputation": problem.keep_all_time_ms}
        for name, solver in quick_solvers(seed, chain).items():
            place = f"random_step({seed}), {budget} bytes, {name}"
            solution = solver.solve(problem, budget)
            replayed = check(problem, solution.schedule, budget if solution.status.fits else None)
            assert replayed.peak_bytes == solution.peak_bytes, place
            assert replayed.time_ms == pytest.approx(solution.time_ms), place
            if solution.status.fits:
                fitting_ms[name] = solution.time_ms
            else:
                check_refusal(problem, solver, solution, place)
            if solution.lower_bound_ms is not None:
                bounds_ms[name] = solution.lower_bound_ms
        for (name, time_ms), (source, bound_ms) in itertools.product(fitting_ms.items(), bounds_ms.items()):
            assert bound_ms <= TOLERANCE * time_ms, f"random_step({seed}), {budget} bytes: {source} bounds {name}"


def check_refusal(problem: Problem, solver: Solver, solution: Solution, place: str) -> None:
    """What does not fit names a budget that the same solver then meets, and the operation that needs it."""
    smallest = solution.smallest_budget_bytes
    assert smallest == solution.peak_bytes, place
    kind, name = (solution.binding_op or "").split()
    assert name in {op.name for op in (problem.forward if kind == "compute" else problem.backward)}, place
    again = solver.solve(problem, smallest)
    assert again.status.fits, place
    check(problem, again.schedule, smallest)


@pytest.mark.slow
def test_every_solver_keeps_its_promises():
    for seed in range(20):
        check_promises(seed)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_solver_keeps_its_promises_on_a_thousand_problems(batch):
    for seed in range(20 + batch, PROBLEMS, BATCHES):
        check_promises(seed)


def check_auto_is_best(seed: int) -> None:
    """Given time, auto is at least as fast as others alone; given next to none, its plan and its bound are true."""
    problem, chain = random_step(seed, count=3 + seed % 16)
    limits = Limits(seed=seed).within(UNLIMITED_S)
    for budget in budgets_of(problem)[1:4]:
        place = f"random_step({seed}, {3 + seed % 16}), {budget} bytes"
        best = solver_named("auto", limits, chain).solve(problem, budget)
        hasty = Auto(chain, seed, time_limit_s=0.05).solve(problem, budget)
        for solution in (best, hasty):
            check(problem, solution.schedule, budget if solution.status.fits else None)
        for name in ("greedy", "knapsack", "rotor"):
            part = solver_named(name, limits, chain).solve(problem, budget)
            if part.status.fits:
                assert best.status.fits, f"{place}: {name} fits"
                assert best.time_ms <= TOLERANCE * part.time_ms, f"{place}: {name}"
                assert (hasty.lower_bound_ms or 0.0) <= TOLERANCE * part.time_ms, f"{place}: {name}"


@pytest.mark.parametrize("seed", range(3))
def test_auto_is_never_slower_than_its_parts(seed):
    check_auto_is_best(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 27))
def test_auto_is_never_slower_than_its_parts_on_many_problems(seed):
    check_auto_is_best(seed)


# ---- sweeps ------------------------------------------------------------------------------------------


EIGHT = tuple(number / 8 for number in range(1, 9))


def check_sweep(problem: Problem, budgets: list[int], solver: Solver) -> list[Solution]:
    """More memory is never slower, and each solution is one for its own budget."""
    solutions = solve_sweep(problem, budgets, solver)
    for budget, solution in zip(budgets, solutions, strict=True):
        check(problem, solution.schedule, budget if solution.status.fits else None)
        assert solution.status.fits == (solution.peak_bytes <= budget)
        assert (solution.binding_op is None) == (solution.smallest_budget_bytes is None) == solution.status.fits
        alone = solver.solve(problem, budget)
        assert solution.status.fits >= alone.status.fits
        if alone.status.fits:
            assert solution.time_ms <= alone.time_ms
        if alone.status is Status.OPTIMAL:
            assert solution.status is Status.OPTIMAL
    ordered = sorted(zip(budgets, solutions, strict=True), key=lambda pair: pair[0])
    for (_, smaller), (_, larger) in itertools.pairwise(ordered):
        assert larger.status.fits >= smaller.status.fits
        if smaller.status.fits:
            assert larger.time_ms <= smaller.time_ms
        if larger.lower_bound_ms is not None:
            assert smaller.lower_bound_ms is not None
            assert smaller.lower_bound_ms >= larger.lower_bound_ms
    return solutions


@pytest.mark.parametrize("seed", range(6))
def test_more_memory_never_costs_time(seed):
    problem, chain = random_step(seed)
    for solver in (Greedy(seed, tries=2, rounds=3), Knapsack(), Chen(chain)):
        check_sweep(problem, budgets_of(problem, EIGHT), solver)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 22))
def test_more_memory_never_costs_time_whatever_the_solver(seed):
    problem, chain = random_step(seed, count=3 + seed % 16)
    rotor = Rotor(chain, slots=100, grid=2)
    for solver in (Greedy(seed), Knapsack(), Chen(chain), rotor, Auto(chain, seed, tries=2, rounds=20)):
        check_sweep(problem, budgets_of(problem, EIGHT), solver)


def test_more_memory_never_costs_time_on_a_model():
    problem, chain = gpt2(layers=2)
    budgets = budgets_of(problem, EIGHT)
    alone = [Chen(chain).solve(problem, budget) for budget in budgets]
    together = check_sweep(problem, budgets, Chen(chain))
    assert all(found.time_ms <= own.time_ms for found, own in zip(together, alone, strict=True) if own.status.fits)


@dataclass(frozen=True)
class Erratic(Solver):
    """For each budget one plan, good or bad, as a solver may find that runs out of time."""

    plans: dict[int, Recompute]

    @property
    def name(self) -> str:
        return "erratic"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        return best_solution(problem, budget_bytes, [(self.name, self.plans[budget_bytes])])


def test_a_plan_serves_every_budget_that_it_fits():
    problem = chain_of(6)
    plans = [plan for budget in range(12, 30) if (plan := Oracle().solve(problem, budget).schedule)]
    costs = {peak_and_time(problem, plan): plan for plan in plans}
    assert len(costs) >= 3
    (peak, time_ms), (_, better_ms) = sorted(costs)[:2]
    lean, quick = costs[peak, time_ms], costs[sorted(costs)[1]]
    budgets = [peak - 1, peak, peak + 100, sorted(costs)[1][0], peak - 2]
    # The smaller budgets get a plan that exceeds them, the largest one the leanest: all of them find their own.
    given = dict(zip(budgets, [quick, quick, lean, quick, quick], strict=True))
    found = check_sweep(problem, budgets, Erratic(given))
    assert [solution.status.fits for solution in found] == [False, True, True, True, False]
    assert [solution.time_ms for solution in found[1:4]] == [time_ms, better_ms, better_ms]
    for refused in (found[0], found[4]):
        assert refused.smallest_budget_bytes == peak
        assert refused.binding_op == evaluate(problem, lean).peak_at


def test_what_is_best_for_more_memory_is_best_for_less_where_it_fits():
    problem = next(found for seed in range(50) if any((found := random_problem(seed, 5, plain=True)).backward))
    solver = Oracle()
    most = peak_and_time(problem, problem.no_recompute)[0]
    solutions = check_sweep(problem, list(range(least_bytes(problem), most + 1)), solver)
    assert all(solution.status is Status.OPTIMAL for solution in solutions if solution.status.fits)
    assert solutions[-1].time_ms == problem.keep_all_time_ms
    assert not math.isnan(solutions[0].time_ms)


def test_a_budget_may_be_named_twice_and_none_at_all():
    problem = chain_of(5)
    assert solve_sweep(problem, [], KeepAll()) == []
    twice = solve_sweep(problem, [12, 30, 12], Greedy())
    assert twice[0] == twice[2]
    assert twice[1].status is Status.OPTIMAL
