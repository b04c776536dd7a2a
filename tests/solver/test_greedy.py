"""Greedy: feasible, near the optimum on small problems, cheap on large ones, deterministic."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import Greedy, Oracle, Status, check, evaluate, improve_plan, peak_and_time, schedule_of
from rk_solvers.baselines.chen import segment_plan
from rk_solvers.exact.oracle import least_peak
from tests.solver.instances import chain_of, gpt2, random_problem, resnet50

QUICK = Greedy(tries=2, rounds=10)


@given(st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_schedules_pass_the_checker_and_never_beat_the_oracle(seed, share):
    problem = random_problem(seed, 2 + seed % 5)
    low = peak_and_time(problem, least_peak(problem))[0]
    high = peak_and_time(problem, problem.no_recompute)[0]
    budget = round(low + share * (high - low))
    solution = QUICK.solve(problem, budget)
    checked = check(problem, solution.schedule, budget if solution.status.fits else None)
    assert checked.time_ms == pytest.approx(solution.time_ms)
    assert solution.peak_bytes >= low
    if solution.status.fits:
        assert solution.time_ms >= Oracle().solve(problem, budget).time_ms - 1e-9
    else:
        assert solution.smallest_budget_bytes is not None
        assert QUICK.solve(problem, solution.smallest_budget_bytes).status.fits


def test_greedy_is_optimal_on_nearly_all_small_problems():
    solved = optimal = 0
    for seed in range(100):
        problem = random_problem(seed, random.Random(seed).randint(2, 6))
        low = peak_and_time(problem, least_peak(problem))[0]
        high = peak_and_time(problem, problem.no_recompute)[0]
        for budget in {low, (low + high) // 2}:
            best, found = Oracle().solve(problem, budget), QUICK.solve(problem, budget)
            solved += 1
            optimal += found.status.fits and found.time_ms <= best.time_ms + 1e-9
    assert optimal >= 0.96 * solved


def test_a_chain_is_solved_as_by_the_oracle():
    for budget in range(12, 37, 4):
        found, best = Greedy().solve(chain_of(8), budget), Oracle().solve(chain_of(8), budget)
        assert found.status.fits
        assert best.time_ms <= found.time_ms <= 1.1 * best.time_ms


@pytest.mark.parametrize(
    ("build", "share", "most"),
    [
        (gpt2, 0.7, 0.03),
        (gpt2, 0.5, 0.09),
        (resnet50, 0.7, 0.04),
        (resnet50, 0.5, 0.08),
        (resnet50, 0.35, 0.135),
    ],
)
def test_overhead_on_real_structures(build, share, most):
    problem, _ = build()
    budget = int(share * evaluate(problem, problem.no_recompute).peak_bytes)
    solution = Greedy(tries=2, rounds=10).solve(problem, budget)
    assert check(problem, solution.schedule, budget).overhead <= most


def test_the_same_seed_gives_the_same_plan():
    problem, _ = gpt2(layers=3)
    budget = int(0.6 * evaluate(problem, problem.no_recompute).peak_bytes)
    assert Greedy(rounds=20).solve(problem, budget) == Greedy(rounds=20).solve(problem, budget)


def test_improving_a_plan_keeps_its_budget():
    problem, _ = gpt2(layers=3)
    plan = segment_plan(problem, (18, 35))
    peak, time_ms = peak_and_time(problem, plan)
    better = improve_plan(problem, peak, plan, rounds=10)
    assert peak_and_time(problem, better)[0] <= peak
    assert peak_and_time(problem, better)[1] < time_ms
    assert improve_plan(problem, peak - 1, plan) == schedule_of(problem, plan)


def test_too_small_a_budget_names_one_that_works():
    problem, _ = gpt2(layers=2)
    small = QUICK.solve(problem, 1 << 20)
    assert small.status is Status.INFEASIBLE
    assert small.binding_op is not None
    assert small.smallest_budget_bytes is not None
    assert QUICK.solve(problem, small.smallest_budget_bytes).status.fits
