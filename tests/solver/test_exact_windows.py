"""Windows: exact programs for a few stages of a plan, which make it faster or leave it as it is."""

from __future__ import annotations

import itertools
import random

import pytest

from rk_solvers import Greedy, Oracle, Problem, peak_and_time
from rk_solvers.exact.oracle import least_peak
from rk_solvers.exact.windows import LONGEST, ExactWindows
from rk_solvers.groups import normalise
from rk_solvers.milp import BackendLimits, solve
from rk_solvers.problem import Recompute
from tests.solver.instances import gpt2, random_plan, random_problem, resnet50


def through(problem: Problem, budget: int, plan: Recompute, most: int = 30) -> list[Recompute]:
    """The plan, and those that windows make of it, one by one, until there is no other or `most` have been seen."""
    windows = ExactWindows(problem, budget)
    plans = [plan]
    for _ in range(most):
        program = windows.next(plans[-1])
        if program is None:
            break
        values = solve(program.model, "scipy", BackendLimits(5.0)).values
        if values is not None:
            plans.append(normalise(problem, program.plan(values)))
    return plans


def test_each_plan_is_faster_and_fits_and_none_is_better_than_the_best():
    rng = random.Random(0)
    better = 0
    for seed in range(80):
        problem = random_problem(seed, 4 + seed % 5)
        budget = (peak_and_time(problem, least_peak(problem))[0] + peak_and_time(problem, problem.no_recompute)[0]) // 2
        drawn = (normalise(problem, random_plan(problem, rng.randrange(10**6), 0.5)) for _ in range(40))
        fitting = [plan for plan in drawn if peak_and_time(problem, plan)[0] <= budget]
        if not fitting:
            continue
        plans = through(problem, budget, max(fitting, key=lambda plan: peak_and_time(problem, plan)[1]))
        costs = [peak_and_time(problem, plan) for plan in plans]
        times = [time_ms for _, time_ms in costs]
        assert all(peak <= budget for peak, _ in costs)
        assert times == sorted(set(times), reverse=True)
        assert times[-1] >= Oracle().solve(problem, budget).time_ms - 1e-6
        better += len(plans) > 1
    assert better >= 20


@pytest.mark.parametrize("share", [0.5, pytest.param(0.4, marks=pytest.mark.slow)])
@pytest.mark.ci
def test_other_stages_leave_out_alone(share):
    problem, _ = resnet50(layers=(2, 2, 2, 2))
    budget = int(share * peak_and_time(problem, problem.no_recompute)[0])
    plan = Greedy(tries=1, rounds=0).plan(problem, budget)
    plans = through(problem, budget, plan, most=12)
    assert len(plans) > 1
    for before, after in itertools.pairwise(plans):
        more = [stage for stage, group in enumerate(after) if not set(group) <= set(before[stage])]
        assert not more or max(more) - min(more) < LONGEST
    assert peak_and_time(problem, plans[-1])[0] <= budget


def test_a_window_is_looked_at_once_until_the_plan_near_it_is_another():
    problem, _ = resnet50(layers=(2, 2, 2, 2))
    budget = int(0.4 * peak_and_time(problem, problem.no_recompute)[0])
    plan = Greedy(tries=1, rounds=0).plan(problem, budget)
    windows = ExactWindows(problem, budget)
    count = 0
    while windows.next(plan) is not None:
        count += 1
    assert 0 < count <= 2 * len(plan)
    last = max(stage for stage, group in enumerate(plan) if group)
    assert windows.next(tuple(() if stage == last else group for stage, group in enumerate(plan))) is not None


def test_a_plan_of_too_many_recomputations_has_no_window(monkeypatch):
    problem, _ = gpt2(layers=2)
    budget = int(0.4 * peak_and_time(problem, problem.no_recompute)[0])
    plan = Greedy(tries=1, rounds=0).plan(problem, budget)
    monkeypatch.setattr("rk_solvers.exact.windows.MOST_BINARIES", sum(map(len, plan)) - 1)
    assert ExactWindows(problem, budget).next(plan) is None
    assert ExactWindows(problem, budget).next(problem.no_recompute) is None
