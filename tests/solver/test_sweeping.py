"""The bound that sweeps from the end: exact with room for all states, never above the oracle with less."""

from __future__ import annotations

import gc
import math
import random

import pytest

from rk_solvers import Limits, Oracle, Problem, lower_bound_ms, peak_and_time, smallest_budget, solver_named
from rk_solvers.bounds import sweeping
from rk_solvers.bounds.narrowing import Narrowing
from rk_solvers.bounds.refinement import Refinement, Target
from rk_solvers.bounds.relaxation import UNITS, Relaxation
from rk_solvers.bounds.sweeping import Proven, starts_before, swept
from rk_solvers.exact.oracle import least_peak
from rk_solvers.exact.state_sweep import sweep_states
from rk_solvers.liveness import alive_before, recompute_of
from rk_solvers.milp import BackendLimits, Outcome, relaxation_bound, solve
from rk_solvers.problem import Recompute
from tests.solver.instances import gpt2, random_problem, resnet50


def cases(count: int) -> list[tuple[Problem, int, float]]:
    """Small problems, budgets between the least peak and keep-all's, and the least time of any plan."""
    found = []
    for seed in range(count):
        problem = random_problem(seed, 2 + seed % 6, plain=seed % 3 == 0)
        low = peak_and_time(problem, least_peak(problem))[0]
        high = peak_and_time(problem, problem.no_recompute)[0]
        for budget in {low, (low + high) // 2}:
            found.append((problem, budget, Oracle().solve(problem, budget).time_ms))
    return found


def proven(problem: Problem, budget: int, enough_ms: float, seconds: float = 20.0) -> Proven:
    starts = tuple(range(0, len(problem.backward), 2))
    return swept(Refinement(problem, budget, spans=True), starts, Target(enough_ms, seconds))


@pytest.mark.parametrize("many", [0, 10**9])
def test_the_plan_of_least_time_is_found_or_there_is_none_below_what_is_asked_for(monkeypatch, many):
    """With `many` 0, linear programs drop states before each stage."""
    monkeypatch.setattr(sweeping, "MANY", many)
    for problem, budget, least_ms in cases(60):
        if not problem.backward:
            continue
        found = proven(problem, budget, least_ms * 1.1 + 1)
        assert found.plan is not None
        assert peak_and_time(problem, found.plan) <= (budget, least_ms + 1e-9)
        assert least_ms * (1 - 1e-5) <= found.bound_ms <= least_ms
        asked_ms = problem.keep_all_time_ms + 0.7 * (least_ms - problem.keep_all_time_ms)
        less = proven(problem, budget, asked_ms)
        if asked_ms < least_ms - 1e-6:
            assert less.plan is None
            assert asked_ms - 1e-5 * problem.keep_all_time_ms <= less.bound_ms <= asked_ms


def test_what_is_proven_of_a_sweep_that_gives_up_is_below_the_oracle(monkeypatch):
    monkeypatch.setattr(sweeping, "MANY", 0)
    given_up = 0
    for number, (problem, budget, least_ms) in enumerate(cases(60)):
        if not problem.backward:
            continue
        monkeypatch.setattr(sweeping, "MOST_STATES", 1 + 3 * (number % 5))
        found = proven(problem, budget, least_ms + 1)
        given_up += found.plan is None
        assert found.bound_ms <= least_ms
    assert given_up > 20


def test_a_sweep_without_time_proves_what_the_linear_program_does():
    problem, chain = gpt2(layers=2)
    budget = int(0.8 * peak_and_time(problem, problem.no_recompute)[0])
    starts = (0, len(problem.backward) // 2)
    found = swept(Refinement(problem, budget, chain, spans=True), starts, Target(2 * problem.keep_all_time_ms, 0.0))
    whole = relaxation_bound(Relaxation(problem, budget, list(starts), spans=True).model).bound
    assert found.plan is None
    expected_ms = problem.keep_all_time_ms * (1 + whole / UNITS)
    assert found.bound_ms == pytest.approx(expected_ms, rel=1e-4)
    assert found.bound_ms <= expected_ms


def test_nothing_is_asked_of_a_relaxation_that_stops_but_what_comes_before():
    """Whatever a plan has alive at a place costs it, before that, at least what the stopped relaxation says."""
    rng = random.Random(5)
    asked = 0
    for problem, budget, _ in cases(200):
        if len(problem.backward) < 2:
            continue
        plan = sweep_states(problem, budget).recompute
        assert plan is not None
        stage = rng.randrange(1, len(problem.backward))
        starts = sorted({0, *rng.sample(range(stage), min(3, stage))})
        relaxation = Relaxation(problem, budget, starts, spans=True, stop=stage)
        there = set(alive_before(problem, plan, stage))
        for item, variable in relaxation.alive[-1].items():
            relaxation.model.lower[variable] = float(item in there)
        times = relaxation.live.time
        spent = sum(times[index] for group in plan[:stage] for index in group) / problem.keep_all_time_ms * UNITS
        linear = relaxation_bound(relaxation.model)
        relaxation.model.integer = relaxation.integer
        integer = solve(relaxation.model, "scipy", BackendLimits(20))
        assert (linear.outcome, integer.outcome) == (Outcome.OPTIMAL, Outcome.OPTIMAL)
        assert linear.bound <= integer.bound + 1e-6 <= spent + 2e-6 * UNITS
        asked += linear.bound > 0
    assert asked > 20


def test_groups_for_a_sweep_are_those_before_its_stage_and_the_known_ones_behind_it():
    problem, chain = resnet50(layers=(1, 1, 1, 1))
    budget = smallest_budget(problem, chain, 3.0).budget_bytes
    last = len(problem.backward) - 1
    stage = last // 2
    refinement = Refinement(problem, budget, chain, starts=(0, 3, last))
    starts = starts_before(refinement, stage, problem.no_recompute, 1.0)
    assert starts[0] == 0
    assert starts[-1] == last
    assert list(starts) == sorted(set(starts))
    assert all(start < stage for start in starts[:-1])


def test_a_sweep_comes_first_where_the_narrowest_stage_is_late_and_again_for_a_faster_plan():
    problem, chain = resnet50(layers=(1, 1, 1, 1))
    found = smallest_budget(problem, chain, 3.0)
    budget = found.budget_bytes
    plan = plan_of(problem, budget)
    narrow = Narrowing.of(Refinement(problem, budget, chain).solved(Target(math.inf, 5.0, integer=False)))
    behind = narrow._behind()
    assert behind > len(problem.backward) / 2
    assert narrow.share(plan) > 0.5
    target = Target(peak_and_time(problem, plan)[1] * 0.99, 10.0)
    prepared = narrow.advanced(plan, target)
    assert prepared.swept_starts
    assert not prepared.is_begun
    done = prepared.advanced(plan, target)
    assert prepared.bound_ms < done.bound_ms <= peak_and_time(problem, plan)[1]
    assert done.share(plan) < 0.5  # asked for once
    assert not done.is_begun
    assert done.advanced(plan, target).is_begun or done.bound_ms >= target.enough_ms


def test_there_is_no_sweep_for_a_plan_that_does_not_fit_or_where_the_loss_is_the_narrowest():
    problem, chain = resnet50(layers=(1, 1, 1, 1))
    budget = smallest_budget(problem, chain, 3.0).budget_bytes
    assert Narrowing.of(Refinement(problem, budget, chain)).share(problem.no_recompute) < 0.5
    words, chain = gpt2(layers=2)
    budget = smallest_budget(words, chain, 3.0).budget_bytes
    narrow = Narrowing.of(Refinement(words, budget, chain))
    assert narrow._behind() < len(words.backward) / 2
    assert narrow.share(plan_of(words, budget)) < 0.5


def test_garbage_is_collected_again_after_a_sweep():
    problem = random_problem(3, 5)
    sweep_states(problem, peak_and_time(problem, problem.no_recompute)[0])
    assert gc.isenabled()
    gc.disable()
    try:
        sweep_states(problem, peak_and_time(problem, problem.no_recompute)[0])
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_bound_with_sweeps_is_below_a_plan_of_a_network_for_images():
    problem, chain = resnet50(layers=(1, 1, 1, 1))
    budget = smallest_budget(problem, chain, 3.0).budget_bytes
    plan = plan_of(problem, budget)
    bound_ms = lower_bound_ms(problem, budget, chain, 20.0, integer=True, plan=plan)
    assert bound_ms <= peak_and_time(problem, plan)[1]


def plan_of(problem: Problem, budget: int) -> Recompute:
    """A plan that fits, as the search finds it."""
    solution = solver_named("auto", Limits().within(4.0), None).solve(problem, budget)
    return recompute_of(problem, solution.schedule)
