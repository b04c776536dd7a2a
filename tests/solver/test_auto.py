"""Auto: the best of the solvers, and the smallest budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import Auto, Chen, Greedy, Problem, Rotor, check, evaluate, peak_and_time, smallest_budget
from rk_solvers.exact.oracle import least_peak
from tests.solver.instances import chain_of, gpt2, random_problem, resnet50

QUICK = Auto(tries=2, rounds=10)


def test_keep_all_where_it_fits():
    solution = QUICK.solve(chain_of(4), 100)
    assert (solution.solver, solution.time_ms) == ("keep-all", chain_of(4).keep_all_time_ms)


@pytest.mark.parametrize("build", [gpt2, resnet50])
def test_never_slower_than_its_parts(build):
    problem, chain = build()
    budget = int(0.5 * evaluate(problem, problem.no_recompute).peak_bytes)
    best = Auto(chain, gap=0.002).solve(problem, budget)
    check(problem, best.schedule, budget)
    for part in (Greedy(tries=2, rounds=10), Chen(chain), Rotor(chain)):
        assert best.time_ms * (1 - 0.002) <= part.solve(problem, budget).time_ms


@pytest.mark.ci
def test_more_memory_never_costs_time():
    problem, _ = gpt2(layers=3)
    most = evaluate(problem, problem.no_recompute).peak_bytes
    times = [QUICK.solve(problem, int(share * most)).time_ms for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    assert times == sorted(times, reverse=True)


@given(st.integers(0, 10**6), st.integers(0, 60))
@settings(max_examples=40, deadline=None)
@pytest.mark.ci
def test_schedules_pass_the_checker(seed, budget):
    problem = random_problem(seed, 1 + seed % 7)
    solution = QUICK.solve(problem, budget)
    check(problem, solution.schedule, budget if solution.status.fits else None)
    if not solution.status.fits:
        assert solution.smallest_budget_bytes == solution.peak_bytes
        assert QUICK.solve(problem, solution.peak_bytes).status.fits


@pytest.mark.slow
def test_the_smallest_budget_is_that_of_the_oracle_on_nearly_all_small_problems():
    equal = 0
    for seed in range(60):
        problem = random_problem(seed, 2 + seed % 5)
        smallest = smallest_budget(problem)
        least = peak_and_time(problem, least_peak(problem))[0]
        assert smallest.budget_bytes >= least
        equal += smallest.budget_bytes == least
    assert equal >= 55


@pytest.mark.ci
def test_the_smallest_budget_is_feasible_and_names_its_operation():
    problem, chain = resnet50(layers=(1, 1, 1, 1))
    smallest = smallest_budget(problem, chain)
    assert smallest.binding_op.split()[0] in ("compute", "backward")
    assert Auto(chain, tries=1, rounds=0).solve(problem, smallest.budget_bytes).status.fits


@pytest.mark.slow
@pytest.mark.ci
def test_the_same_seed_gives_the_same_plan():
    problem, chain = gpt2(layers=2, vocabulary=3000)
    budget = int(0.6 * evaluate(problem, problem.no_recompute).peak_bytes)
    solver = Auto(chain, rounds=10, gap=0.002)
    assert solver.solve(problem, budget) == solver.solve(problem, budget)


@pytest.mark.ci
def test_progress_is_reported():
    lines: list[str] = []
    problem, chain = gpt2(layers=2, vocabulary=3000)
    budget = int(0.6 * evaluate(problem, problem.no_recompute).peak_bytes)
    Auto(chain, rounds=1, progress=lines.append).solve(problem, budget)
    assert lines


def test_empty_problems_are_solved():
    assert QUICK.solve(Problem((), (), ()), 0).status.fits
    assert not QUICK.solve(Problem((), (), (), base_bytes=1), 0).status.fits
