"""The lower bound: below every plan, near the best one where it should be, quick on large problems."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import Chain, Greedy, Oracle, Problem, evaluate, normalise, peak_and_time
from rk_solvers.bound import group_starts, level_sizes, lower_bound_ms
from rk_solvers.oracle import least_peak
from tests.solver.instances import chain_of, gpt2, random_plan, random_problem, resnet50


def assert_below_the_oracle(problem: Problem, budget: int, groups: int) -> None:
    best = Oracle().solve(problem, budget)
    least_ms = best.time_ms if best.status.fits else math.inf
    linear = lower_bound_ms(problem, budget, groups=groups)
    integer = lower_bound_ms(problem, budget, groups=groups, integer=True)
    assert problem.keep_all_time_ms - 1e-9 <= linear.time_ms <= integer.time_ms <= least_ms + 1e-6


def test_below_the_oracle_on_hundreds_of_small_problems():
    for seed in range(150):
        problem = random_problem(seed, 2 + seed % 6, plain=seed % 3 == 0)
        low = peak_and_time(problem, least_peak(problem))[0]
        high = peak_and_time(problem, problem.no_recompute)[0]
        for budget in {low - 1, low, (low + high) // 2}:
            assert_below_the_oracle(problem, budget, 1 + seed % 7)


@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(-2, 60), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_below_the_oracle_at_any_budget(seed, count, budget, groups):
    assert_below_the_oracle(random_problem(seed, count), budget, groups)


@given(st.integers(0, 10**9), st.integers(10, 30), st.floats(0.05, 0.6), st.integers(1, 32))
@settings(max_examples=30, deadline=None)
def test_below_any_plan_on_larger_problems(seed, count, rate, groups):
    problem = random_problem(seed, count)
    plan = normalise(problem, random_plan(problem, seed, rate))
    peak, time_ms = peak_and_time(problem, plan)
    assert lower_bound_ms(problem, peak, groups=groups).time_ms <= time_ms + 1e-6
    found = Greedy(tries=2, rounds=5).solve(problem, peak)
    if found.status.fits:
        assert lower_bound_ms(problem, peak, groups=groups).time_ms <= found.time_ms + 1e-6


def test_exact_where_everything_fits_or_nothing_can():
    problem = chain_of(6)
    high = evaluate(problem, problem.no_recompute).peak_bytes
    assert lower_bound_ms(problem, high).time_ms == problem.keep_all_time_ms
    assert lower_bound_ms(problem, high - 1).time_ms > problem.keep_all_time_ms
    assert lower_bound_ms(problem, 11).time_ms == math.inf


@pytest.mark.parametrize(
    ("build", "share", "gap"), [(resnet50, 0.7, 0.01), (resnet50, 0.5, 0.01), (resnet50, 0.35, 0.02), (gpt2, 0.7, 0.01)]
)
def test_near_the_best_plan_on_real_structures(build, share, gap):
    problem, chain = build()
    budget = int(share * evaluate(problem, problem.no_recompute).peak_bytes)
    found = Greedy(tries=2, rounds=30).solve(problem, budget)
    bound = lower_bound_ms(problem, budget, chain, groups=16, time_limit_s=60)
    assert (1 - gap) * found.time_ms <= bound.time_ms <= found.time_ms


def test_more_groups_are_a_tighter_integer_program():
    problem, chain = gpt2(layers=1, vocabulary=3000)
    budget = int(0.6 * evaluate(problem, problem.no_recompute).peak_bytes)
    coarse, fine = (lower_bound_ms(problem, budget, chain, groups, 60.0, True).time_ms for groups in (1, 4))
    assert coarse <= fine * (1 + 1e-6)


def test_groups_are_nested_and_begin_at_blocks():
    problem, chain = gpt2(layers=3)
    home = chain.backward_block
    edges = {stage for stage in range(1, len(home)) if home[stage] != home[stage - 1]}
    levels = [group_starts(problem, chain, count) for count in level_sizes(32)]
    assert [len(starts) for starts in levels] == [1, 2, 8, 32]
    for coarse, fine in itertools.pairwise(levels):
        assert set(coarse) <= set(fine)
    assert set(levels[1]) <= edges | {0}
    assert edges <= set(levels[-1])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="groups is 0"):
        lower_bound_ms(chain_of(3), 10, groups=0)
    with pytest.raises(ValueError, match="the blocks cover 2"):
        lower_bound_ms(chain_of(3), 10, Chain((range(2),), (0, 0, 0)))


@pytest.mark.slow
def test_a_large_problem_within_the_time_limit():
    problem, chain = gpt2(layers=26)
    assert len(problem.forward) > 440
    budget = int(0.5 * evaluate(problem, problem.no_recompute).peak_bytes)
    start = time.monotonic()
    bound = lower_bound_ms(problem, budget, chain)
    assert time.monotonic() - start < 20  # three more than asked for, for a busy machine
    assert bound.time_ms > 1.02 * problem.keep_all_time_ms
