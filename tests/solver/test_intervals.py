"""Retention intervals: equal to the oracle, honest about proofs and bounds, deterministic, interruptible."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import BackwardOp, Data, ForwardOp, Greedy, Oracle, Problem, Status, check, peak_and_time
from rk_solvers.exact.oracle import least_peak
from rk_solvers.groups import normalise
from rk_solvers.liveness import recompute_of
from rk_solvers.side_process import SideProcess
from tests.solver.instances import chain_of, gpt2, random_plan, random_problem, resnet50

if importlib.util.find_spec("ortools") is None:
    pytest.skip("needs ortools", allow_module_level=True)

from rk_solvers.intervals import solver as intervals
from rk_solvers.intervals.solver import Intervals

pytestmark = pytest.mark.usefixtures("one_process")


def own_process():
    """A process for each search, as users have it."""
    return mock.patch.object(intervals, "SideProcess", SideProcess)


def agrees_with_the_oracle(seed, share):
    problem = random_problem(seed, 2 + seed % 6, plain=seed % 3 == 0)
    high = peak_and_time(problem, problem.no_recompute)[0]
    low = peak_and_time(problem, least_peak(problem))[0]
    budget = low - 1 + round(share * (high - low))
    best = Oracle().solve(problem, budget)
    hint = random_plan(problem, seed)
    found = Intervals(hints=(hint,), computations=len(problem.backward) + 1).bounded(problem, budget)
    assert found.proven
    assert found.solution.status.fits == best.status.fits
    if best.status.fits:
        assert found.solution.status is Status.OPTIMAL
        assert found.solution.time_ms == pytest.approx(best.time_ms, abs=1e-9)
        assert found.lower_bound_ms == pytest.approx(best.time_ms, abs=1e-9)
        check(problem, found.solution.schedule, budget)
    else:
        assert found.solution.smallest_budget_bytes > budget


@given(st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_it_is_as_fast_as_the_oracle(seed, share):
    agrees_with_the_oracle(seed, share)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(0, 1))
@settings(max_examples=500, deadline=None)
def test_it_is_as_fast_as_the_oracle_on_many_problems(seed, share):
    agrees_with_the_oracle(seed, share)


@given(st.integers(0, 10**6))
@settings(max_examples=6, deadline=None)
def test_windows_from_any_plan_never_make_it_slower(seed):
    problem = random_problem(seed, 8)
    plan = normalise(problem, random_plan(problem, seed))
    budget, time_ms = peak_and_time(problem, plan)
    found = Intervals(hints=(plan,), windows=True, effort=0.05, time_limit_s=10).solve(problem, budget)
    assert found.time_ms <= time_ms
    assert found.time_ms >= Oracle().solve(problem, budget).time_ms - 1e-9
    check(problem, found.schedule, budget)


@pytest.mark.parametrize("share", [0.8, 0.4, 0.1])
def test_a_block_is_solved_to_the_proof(share):
    problem, _ = gpt2(1)
    high = peak_and_time(problem, problem.no_recompute)[0]
    low = Greedy().solve(problem, 0).peak_bytes
    budget = round(low + share * (high - low))
    greedy = Greedy().solve(problem, budget)
    found = Intervals(time_limit_s=60).bounded(problem, budget)
    assert found.solution.status is Status.OPTIMAL
    assert found.solution.time_ms <= greedy.time_ms
    assert found.lower_bound_ms == pytest.approx(found.solution.time_ms, rel=1e-9)
    check(problem, found.solution.schedule, budget)


def test_no_operation_is_computed_more_often_than_allowed():
    problem = chain_of(8)
    budget = Oracle(max_forward=8).solve(problem, 0).peak_bytes + 4
    times = []
    for most in (3, 8):
        found = Intervals(hints=(problem.no_recompute,), computations=most).bounded(problem, budget)
        assert found.proven
        count = [sum(group.count(op) for group in recompute_of(problem, found.solution.schedule)) for op in range(8)]
        assert not found.solution.status.fits or max(count) < most
        times.append(found.solution.time_ms if found.solution.status.fits else float("inf"))
    assert times[1] <= times[0]
    assert times[1] == Oracle().solve(problem, budget).time_ms


def test_odd_bytes_count_to_the_last_one():
    # x and y are needed at the end, beside 3 bytes of gradients; sizes of 8 do not divide the budget
    data = (Data("x", 8, 0), Data("y", 8, 1), Data("z", 16, 2))
    forward = (ForwardOp("dear", 5.5, (), (0,)), ForwardOp("cheap", 1.25, (), (1,)), ForwardOp("pass", 1, (), (2,)))
    problem = Problem(data, forward, (BackwardOp("b", 1, (0, 1), 0, 3),), base_bytes=1)
    assert recompute_of(problem, Intervals().solve(problem, 25).schedule) == ((1,),)
    assert recompute_of(problem, Intervals().solve(problem, 24).schedule) == ((0, 1),)
    assert Intervals().solve(problem, 20).status is Status.OPTIMAL
    assert Intervals().solve(problem, 19).smallest_budget_bytes == 20


def test_a_search_that_ends_early_claims_no_optimum_and_a_valid_bound():
    problem = chain_of(24)
    best = Greedy().solve(problem, 40)
    found = Intervals(hints=(best.schedule,), effort=0.01).bounded(problem, 40)
    assert not found.proven
    assert found.solution.status is Status.FEASIBLE
    assert problem.keep_all_time_ms <= found.lower_bound_ms <= found.solution.time_ms <= best.time_ms


def test_a_gap_ends_the_search_and_bounds_the_distance():
    problem, _ = resnet50(layers=(2,))
    budget = peak_and_time(problem, problem.no_recompute)[0] * 3 // 4
    found = Intervals(gap=0.5, time_limit_s=60).bounded(problem, budget)
    exact = Intervals(time_limit_s=60).bounded(problem, budget)
    assert found.solution.time_ms - found.lower_bound_ms <= 0.5 * problem.keep_all_time_ms
    assert found.lower_bound_ms <= exact.solution.time_ms * (1 + 1e-9)
    assert exact.solution.time_ms <= found.solution.time_ms


@pytest.mark.parametrize("windows", [False, True])
def test_the_same_seed_and_effort_give_the_same_plan(windows):
    problem, chain = gpt2(2, vocabulary=2000)
    budget = peak_and_time(problem, problem.no_recompute)[0] * 6 // 10
    hints = (Greedy(rounds=0, tries=2).solve(problem, budget).schedule,)
    solver = Intervals(time_limit_s=60, hints=hints, windows=windows, effort=0.3, chain=chain, seed=3)
    assert solver.solve(problem, budget).schedule == solver.solve(problem, budget).schedule


def interrupted(time_s, problem, budget, **options):
    """The plan found, and how long it took, where the user interrupts after `time_s` seconds."""
    timer = threading.Timer(time_s, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    try:
        with own_process():
            found = Intervals(time_limit_s=100, **options).solve(problem, budget)
    finally:
        timer.cancel()
        timer.join()
    return found, time.monotonic() - start


@pytest.mark.parametrize("windows", [False, True])
def test_the_users_interrupt_keeps_the_best_plan(windows):
    problem, chain = gpt2(6, vocabulary=2000)
    budget = peak_and_time(problem, problem.no_recompute)[0] // 2
    best = Greedy(rounds=0, tries=2).solve(problem, budget)
    handler = signal.getsignal(signal.SIGINT)
    found, taken_s = interrupted(1.5, problem, budget, hints=(best.schedule,), windows=windows, chain=chain)
    assert taken_s < 30
    assert found.status is Status.FEASIBLE
    assert found.time_ms <= best.time_ms
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_was_found_until_the_interrupt_is_kept():
    problem, _ = gpt2(2, vocabulary=2000)
    high = peak_and_time(problem, problem.no_recompute)[0]
    slow = Greedy().solve(problem, 0)  # the plan of lowest peak
    budget = (high + slow.peak_bytes) // 2
    found, taken_s = interrupted(7.0, problem, budget, hints=(slow.schedule,), windows=False)
    assert taken_s < 7.0 + 2 * intervals.STOP_S
    assert found.time_ms < slow.time_ms
    assert found.interrupted or found.status is Status.OPTIMAL  # a fast machine is done before


def test_a_process_that_is_killed_leaves_the_best_plan_known():
    problem = chain_of(24)
    best = Greedy().solve(problem, 40)
    # it takes no argument: the call raises, and ends the process
    with own_process(), mock.patch.object(intervals, "answer_to", os.abort):
        found = Intervals(hints=(best.schedule,), time_limit_s=20).bounded(problem, 40)
    assert not found.proven
    assert found.solution.time_ms == best.time_ms
    assert found.lower_bound_ms == problem.keep_all_time_ms


def test_a_process_finds_what_is_found_without_one():
    problem, _ = gpt2(1, vocabulary=2000)
    budget = peak_and_time(problem, problem.no_recompute)[0] * 6 // 10
    solver = Intervals(time_limit_s=60, effort=0.3, seed=2)
    with own_process():
        apart = solver.bounded(problem, budget)
    with own_process(), mock.patch.object(sys, "executable", "/nowhere/python"):
        assert solver.bounded(problem, budget) == apart


def test_progress_tells_of_each_better_plan():
    problem, _ = gpt2(1)
    high = peak_and_time(problem, problem.no_recompute)[0]
    slow = Greedy().solve(problem, 0)  # the plan of lowest peak
    lines: list[str] = []
    found = Intervals(hints=(slow.schedule,), progress=lines.append).solve(problem, (high + slow.peak_bytes) // 2)
    assert len(lines) >= 2
    assert lines[-1] == str(found)
    assert found.time_ms < slow.time_ms
    assert found.interrupted or found.status is Status.OPTIMAL  # a fast machine is done before


def test_keeping_all_needs_no_search():
    problem = chain_of(5)
    found = Intervals(time_limit_s=0).bounded(problem, peak_and_time(problem, problem.no_recompute)[0])
    assert found.proven
    assert found.solution.status is Status.OPTIMAL
    assert found.lower_bound_ms == found.solution.time_ms == problem.keep_all_time_ms
