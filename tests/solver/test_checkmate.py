"""Checkmate: the oracle's answers on small problems, blocks proven quickly, exact bytes and times.

`PROGRAM` is the program alone; the sweep that comes before it otherwise has tests of its own.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import Greedy, Oracle, Problem, Status, check, evaluate, peak_and_time, smallest_budget
from rk_solvers.exact import checkmate
from rk_solvers.exact.checkmate import Checkmate, build, saved_bytes_of
from rk_solvers.exact.oracle import _groups, least_peak
from rk_solvers.liveness import recompute_of
from rk_solvers.milp import BackendUnavailable, solve
from rk_solvers.problem import Recompute
from tests.solver.instances import chain_of, gpt2, random_problem, random_step, resnet50

PROGRAM = Checkmate(most_states=0)


def budgets_of(problem: Problem) -> list[int]:
    """Below the least peak, at it, and between it and what keep-all takes."""
    low = peak_and_time(problem, least_peak(problem))[0]
    high = peak_and_time(problem, problem.no_recompute)[0]
    return sorted({low - 1, low, (3 * low + high) // 4, (low + high) // 2})


def assert_as_the_oracle(problem: Problem, budget: int) -> None:
    found, best = PROGRAM.solve(problem, budget), Oracle().solve(problem, budget)
    assert found.status is best.status
    checked = check(problem, found.schedule, budget if best.status.fits else None)
    assert checked.peak_bytes == found.peak_bytes
    if best.status.fits:
        assert found.time_ms == pytest.approx(best.time_ms, abs=1e-6)
    else:
        assert found.smallest_budget_bytes == best.smallest_budget_bytes == checked.peak_bytes
        assert PROGRAM.solve(problem, checked.peak_bytes).status is Status.OPTIMAL


@pytest.mark.parametrize("first", range(0, 150, 15))
def test_as_the_oracle_on_hundreds_of_small_problems(first):
    for seed in range(first, first + 15):
        problem = random_problem(seed, 2 + seed % 6, plain=seed % 3 == 0)
        for budget in budgets_of(problem):
            assert_as_the_oracle(problem, budget)


@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(-2, 60))
@settings(max_examples=60, deadline=None)
def test_as_the_oracle_at_any_budget(seed, count, budget):
    assert_as_the_oracle(random_problem(seed, count), budget)


def test_sizes_of_gigabytes_are_exact_to_the_byte():
    for seed in range(40):
        problem = random_problem(seed, 5)
        rng = random.Random(seed)
        data = tuple(replace(item, size_bytes=rng.randrange(1, 3 * 10**9)) for item in problem.data)
        problem = replace(problem, data=data)
        least = peak_and_time(problem, least_peak(problem))[0]
        for budget in (least - 1, least, least + 1):
            assert_as_the_oracle(problem, budget)


def test_the_program_says_what_the_plan_takes():
    for seed in range(60):
        problem = random_problem(seed, 5)
        budget = budgets_of(problem)[-1]
        program = build(problem, budget)
        result = solve(program.model)
        plan = program.plan(result.values)
        peak, time_ms = peak_and_time(problem, plan)
        assert peak <= budget
        assert result.objective * program.unit_ms == pytest.approx(time_ms)
        lowest = build(problem, None)
        result = solve(lowest.model)
        assert result.objective == pytest.approx(peak_and_time(problem, lowest.plan(result.values))[0])


def plans_of(problem: Problem) -> list[Recompute]:
    """Every plan in normal form."""
    stages = range(len(problem.backward))
    return list(itertools.product(*(list(_groups(problem, stage)) for stage in stages)))


def test_saved_bytes_against_all_plans():
    limited = impossible = 0
    for seed in range(60):
        problem = random_problem(seed, 4)
        if math.prod(len(list(_groups(problem, stage))) for stage in range(len(problem.backward))) > 1500:
            continue
        every = [(*peak_and_time(problem, plan), saved_bytes_of(problem, plan)) for plan in plans_of(problem)]
        most = saved_bytes_of(problem, problem.no_recompute)
        least = min(saved for _, _, saved in every)
        budget = peak_and_time(problem, problem.no_recompute)[0]
        for saved in {least - 1, least, (least + most) // 2}:
            found = Checkmate(saved_bytes=saved).solve(problem, budget)
            times = [time_ms for peak, time_ms, bytes_ in every if peak <= budget and bytes_ <= saved]
            if times:
                limited += saved < most
                assert found.status is Status.OPTIMAL
                assert saved_bytes_of(problem, recompute_of(problem, found.schedule)) <= saved
                assert found.time_ms == pytest.approx(min(times))
                continue
            assert found.status is Status.INFEASIBLE
            peaks = [peak for peak, _, bytes_ in every if bytes_ <= saved]
            impossible += not peaks
            assert found.smallest_budget_bytes == (min(peaks) if peaks else None)
    assert limited > 10
    assert impossible > 10


BLOCKS = {
    "decoder": gpt2(layers=1, vocabulary=3000)[0],
    "bottlenecks": resnet50(layers=(1, 1))[0],
    "chain": chain_of(12),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_proven(name):
    problem = BLOCKS[name]
    low = smallest_budget(problem).budget_bytes
    high = evaluate(problem, problem.no_recompute).peak_bytes
    times = []
    for share in (0.25, 0.5, 0.75, 1.0):
        budget = int(low + share * (high - low))
        found = PROGRAM.solve(problem, budget)
        assert found.status is Status.OPTIMAL
        assert check(problem, found.schedule, budget).time_ms == pytest.approx(found.time_ms)
        assert found.time_ms <= Greedy(tries=2, rounds=20).solve(problem, budget).time_ms + 1e-6
        times.append(found.time_ms)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("most_states", [200, 800_000])
def test_the_sweep_and_the_program_find_the_same_times(most_states):
    """Also where the sweep gives up, so that the program is searched after it."""
    proven = 0
    for seed in range(12):
        problem = random_step(seed, 9 + seed % 4)[0]
        high = peak_and_time(problem, problem.no_recompute)[0]
        for budget in (high // 2, 3 * high // 4, 9 * high // 10):
            solver = Checkmate(most_states=most_states)
            found, best = solver.solve(problem, budget), PROGRAM.solve(problem, budget)
            proven += found.status is Status.OPTIMAL
            assert found.status is best.status
            if found.status.fits:
                assert found.time_ms == pytest.approx(best.time_ms)
                assert check(problem, found.schedule, budget).time_ms == pytest.approx(found.time_ms)
    assert proven > 12


def test_the_program_is_searched_only_where_the_sweep_gives_up(monkeypatch):
    problem, searched = chain_of(12), []
    monkeypatch.setattr(checkmate, "build", lambda *limits: searched.append(limits) or build(*limits))
    best = Checkmate().solve(problem, 20)
    assert not searched
    assert Checkmate(most_states=10).solve(problem, 20).time_ms == pytest.approx(best.time_ms)
    assert len(searched) == 1


def test_the_least_peak_of_a_block_is_proven():
    problem = BLOCKS["decoder"]
    found = Checkmate().solve(problem, 1)
    assert found.status is Status.INFEASIBLE
    assert found.smallest_budget_bytes <= smallest_budget(problem).budget_bytes
    assert found.binding_op is not None
    for solver in (Checkmate(), PROGRAM):
        assert solver.solve(problem, found.smallest_budget_bytes).status is Status.OPTIMAL
        assert not solver.solve(problem, found.smallest_budget_bytes - 1).status.fits


def test_a_time_limit_ends_the_search_without_a_claim():
    problem, _ = gpt2(layers=4)
    budget = int(0.7 * evaluate(problem, problem.no_recompute).peak_bytes)
    start_s = time.process_time()
    found = Checkmate(time_limit_s=2.0).solve(problem, budget)
    assert time.process_time() - start_s < 20
    assert found.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert check(problem, found.schedule, budget).time_ms == pytest.approx(found.time_ms)


def test_a_gap_is_kept_and_not_called_optimal():
    problem = BLOCKS["bottlenecks"]
    high = evaluate(problem, problem.no_recompute).peak_bytes
    best = Checkmate().solve(problem, high // 2)
    found = Checkmate(gap=0.1, most_states=0).solve(problem, high // 2)
    assert best.time_ms <= found.time_ms <= best.time_ms / (1 - 0.1) + 1e-9
    assert found.status is Status.FEASIBLE or found.time_ms == pytest.approx(best.time_ms)


def test_a_back_end_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gurobipy", None)
    with pytest.raises(BackendUnavailable, match="scipy"):
        Checkmate(backend="gurobi").solve(chain_of(6), 16)
