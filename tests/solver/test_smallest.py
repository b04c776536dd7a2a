"""The smallest budget: what bounds it, and how long its search may take."""

from __future__ import annotations

import random
import time

import pytest

from benchmarks.random_dags import Size
from benchmarks.random_dags import random_problem as layered_problem
from rk_solvers import check, peak_and_time, smallest_budget
from rk_solvers.exact.oracle import least_peak
from rk_solvers.groups import normalise
from rk_solvers.liveness import PlanState, Tables, least_bytes
from rk_solvers.local.local_search import weights_for
from rk_solvers.local.min_peak_search import min_peak_plan
from rk_solvers.local.repair import repair
from tests.solver.instances import random_plan, random_problem, random_step

UNLIMITED_S = 1e4


@pytest.mark.parametrize("time_limit_s", [0.0, 1.0])
@pytest.mark.ci
def test_the_time_limit_is_kept_on_a_large_graph(time_limit_s):
    problem = layered_problem(Size(700, 3800), seed=0)  # without a limit: more than a minute
    start_s = time.process_time()  # of this process: what else the machine does is not counted
    smallest = smallest_budget(problem, time_limit_s=time_limit_s)
    # The plans that the search starts from take two or three seconds; a slower machine may take thrice as long.
    assert time.process_time() - start_s < time_limit_s + 15
    replayed = check(problem, smallest.schedule, smallest.budget_bytes)
    assert (replayed.peak_bytes, replayed.peak_at) == (smallest.budget_bytes, smallest.binding_op)
    assert smallest.budget_bytes < peak_and_time(problem, problem.no_recompute)[0]


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 10), marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.ci
def test_a_limit_that_is_not_reached_changes_nothing(seeds):
    for seed in seeds:
        problem, chain = random_step(seed)
        unlimited = smallest_budget(problem, chain, time_limit_s=UNLIMITED_S)
        assert smallest_budget(problem, chain, time_limit_s=UNLIMITED_S / 2) == unlimited
        assert least_bytes(problem) <= unlimited.budget_bytes <= peak_and_time(problem, problem.no_recompute)[0]


def test_no_time_leaves_the_best_of_the_plans_given():
    for seed in range(10):
        problem, _ = random_step(seed)
        plans = [random_plan(problem, seed + number) for number in range(3)]
        least = peak_and_time(problem, min_peak_plan(problem, plans, None, deadline=0.0))[0]
        known = [peak_and_time(problem, normalise(problem, plan))[0] for plan in (*plans, problem.no_recompute)]
        assert least <= min(known)


def test_plans_for_a_budget_count_only_where_they_fit_it():
    """From a plan of least peak, the search finds one: it is taken under that budget, under a smaller one not."""
    improved = 0
    for seed in range(12):
        problem = random_problem(seed, 2 + seed % 5)
        plan = least_peak(problem)
        least, deadline = peak_and_time(problem, plan)[0], time.monotonic() + UNLIMITED_S
        alone = min_peak_plan(problem, [], None, deadline)
        assert min_peak_plan(problem, [plan], None, deadline, least - 1) == alone
        fitting = min_peak_plan(problem, [plan], None, deadline, least)
        assert peak_and_time(problem, fitting)[0] == least
        improved += fitting != alone
    assert improved <= 3  # the search alone finds nearly all of them


def test_repair_stops_at_its_deadline_with_a_plan():
    problem = layered_problem(Size(60, 150), seed=1)
    tables = Tables(problem)
    most = peak_and_time(problem, problem.no_recompute)[0]
    state, stopped = PlanState(tables), PlanState(tables)
    weights = weights_for(state, random.Random(0), 1.0, 0.0)
    assert not repair(stopped, most // 2, weights, deadline=time.monotonic())
    assert stopped.recompute() == problem.no_recompute
    assert repair(state, int(0.8 * most), weights, deadline=time.monotonic() + UNLIMITED_S)
    assert peak_and_time(problem, state.recompute())[0] <= int(0.8 * most)
