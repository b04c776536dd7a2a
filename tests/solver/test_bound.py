"""The lower bound and the relaxation behind it: below every plan, near the best one, quick on large problems."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rk_solvers import (
    BackwardOp,
    Chain,
    Data,
    ForwardOp,
    Greedy,
    Oracle,
    Problem,
    evaluate,
    lower_bound_ms,
    peak_and_time,
    smallest_budget,
)
from rk_solvers.bounds.cases import Cases, _fullest_sets, worth
from rk_solvers.bounds.dividing import divided
from rk_solvers.bounds.narrowing import Narrowing
from rk_solvers.bounds.refinement import Refinement, Target
from rk_solvers.bounds.relaxation import UNITS, Limit, Relaxation
from rk_solvers.exact.oracle import least_peak
from rk_solvers.groups import normalise
from rk_solvers.liveness import alive_before, recompute_of
from rk_solvers.milp import BackendLimits, Outcome, relaxation_bound, solve
from tests.solver.instances import chain_of, gpt2, random_plan, random_problem, resnet50


def assert_below_the_oracle(problem: Problem, budget: int) -> None:
    best = Oracle().solve(problem, budget)
    least_ms = best.time_ms if best.status.fits else math.inf
    linear = lower_bound_ms(problem, budget)
    integer = lower_bound_ms(problem, budget, integer=True)
    assert problem.keep_all_time_ms - 1e-9 <= linear <= least_ms + 1e-6
    assert linear <= integer + 1e-6
    assert integer <= least_ms + 1e-6


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_below_the_oracle_on_hundreds_of_small_problems(first):
    for seed in range(first, first + 10):
        problem = random_problem(seed, 2 + seed % 6, plain=seed % 3 == 0)
        low = peak_and_time(problem, least_peak(problem))[0]
        high = peak_and_time(problem, problem.no_recompute)[0]
        for budget in {low - 1, low, (low + high) // 2}:
            assert_below_the_oracle(problem, budget)


@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(-2, 60))
@settings(max_examples=40, deadline=None)
def test_below_the_oracle_at_any_budget(seed, count, budget):
    assert_below_the_oracle(random_problem(seed, count), budget)


def drawn_budget(problem: Problem, rng: random.Random) -> int:
    """Between the least peak of all plans and that of keep-all."""
    low = peak_and_time(problem, least_peak(problem))[0]
    return rng.randint(low, max(low, peak_and_time(problem, problem.no_recompute)[0]))


def both_bounds(relaxation: Relaxation) -> tuple[float, float]:
    """Of the linear and of the integer program, in the unit of the objective."""
    linear = relaxation_bound(relaxation.model)
    relaxation.model.integer = relaxation.integer
    result = solve(relaxation.model, "scipy", BackendLimits(20))
    assert (linear.outcome, result.outcome) == (Outcome.OPTIMAL, Outcome.OPTIMAL)
    assert linear.bound <= result.bound + 1e-6
    return linear.bound, result.bound


@given(st.integers(0, 10**9), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_any_grouping_is_below_the_oracle_and_finer_ones_are_tighter(seed, count):
    problem, rng = random_problem(seed, count), random.Random(seed)
    assume(problem.backward)
    budget = drawn_budget(problem, rng)
    least = Oracle().solve(problem, budget).time_ms
    fine = {0} | {stage for stage in range(len(problem.backward)) if rng.random() < 0.7}
    coarse = {0} | {stage for stage in fine if rng.random() < 0.5}
    bounds = []
    for starts in (coarse, fine):
        _, bound = both_bounds(Relaxation(problem, budget, sorted(starts)))
        bounds.append(problem.keep_all_time_ms * (1 + bound / UNITS))
    assert bounds[0] <= bounds[1] * (1 + 1e-6)
    assert bounds[1] <= least * (1 + 1e-6)


@given(st.integers(0, 10**9), st.integers(2, 7))
@settings(max_examples=60, deadline=None)
def test_spans_of_groups_tighten_both_programs_and_stay_below_the_oracle(seed, count):
    problem, rng = random_problem(seed, count), random.Random(seed)
    assume(problem.backward)
    budget = drawn_budget(problem, rng)
    least = Oracle().solve(problem, budget).time_ms
    starts = sorted({0} | {stage for stage in range(len(problem.backward)) if rng.random() < 0.8})
    bounds = [both_bounds(Relaxation(problem, budget, starts, spans)) for spans in (False, True)]
    assert all(without <= with_spans + 1e-6 for without, with_spans in zip(*bounds, strict=True))
    assert problem.keep_all_time_ms * (1 + bounds[1][1] / UNITS) <= least * (1 + 1e-6)


def test_spans_close_most_of_what_many_groups_lose():
    problem, _ = gpt2(layers=6, vocabulary=3000)
    budget = int(0.3 * evaluate(problem, problem.no_recompute).peak_bytes)
    count = len(problem.backward)

    def bound(groups: int, *, spans: bool) -> float:
        starts = sorted({number * count // groups for number in range(groups)})
        return relaxation_bound(Relaxation(problem, budget, starts, spans).model).bound

    assert bound(12, spans=False) < bound(3, spans=False)
    assert bound(12, spans=True) > bound(3, spans=True)


def with_states(problem: Problem, seed: int) -> Problem:
    """`problem`, in which most operations have a state to be computed again with."""
    rng = random.Random(seed)
    forward = [replace(op, replay_bytes=rng.choice([0, 2, 3, 6])) for op in problem.forward]
    return replace(problem, forward=tuple(forward))


@given(st.integers(0, 10**9), st.integers(2, 7))
@settings(max_examples=60, deadline=None)
def test_below_the_oracle_with_states_and_every_stage_apart(seed, count):
    problem = with_states(random_problem(seed, count), seed)
    assume(problem.backward)
    budget = drawn_budget(problem, random.Random(seed))
    least = Oracle().solve(problem, budget).time_ms
    for spans in (False, True):
        _, bound = both_bounds(Relaxation(problem, budget, list(range(len(problem.backward))), spans))
        assert problem.keep_all_time_ms * (1 + bound / UNITS) <= least * (1 + 1e-6)


def test_a_state_is_resident_for_all_of_what_is_recomputed_in_parts():
    data = (Data("x", 4, 0), Data("y", 4, 1), Data("z", 1, 2))
    forward = (
        ForwardOp("f", 4.0, (), (0,), replay_bytes=4),
        ForwardOp("g", 1.0, (0,), (1,)),
        ForwardOp("h", 1.0, (1,), (2,)),
    )
    # Beside the loss there is room for 3 bytes: for half of z and half of the state, as for half of f before b and c.
    backward = (BackwardOp("loss", 1.0, (), 0, 27), BackwardOp("b", 1.0, (2,), 0, 0), BackwardOp("c", 1.0, (1,), 0, 0))
    problem = Problem(data, forward, backward)
    assert not Oracle().solve(problem, 30).status.fits
    assert relaxation_bound(Relaxation(problem, 30, [0, 1, 2], spans=True).model).outcome is Outcome.INFEASIBLE
    least = (Oracle().solve(problem, 31).time_ms / problem.keep_all_time_ms - 1) * UNITS
    assert both_bounds(Relaxation(problem, 31, [0, 1, 2], spans=True))[1] <= least * (1 + 1e-6)


def test_in_a_stage_what_it_needs_of_earlier_operations_is_beside_a_recomputation():
    data = (Data("u", 6, 0), Data("z", 2, 1))
    forward = (ForwardOp("f", 4.0, (), (0,)), ForwardOp("g", 1.0, (), (1,), workspace_bytes=5))
    backward = (BackwardOp("loss", 1.0, (), 0, 12), BackwardOp("b", 1.0, (0, 1), 0, 0))
    problem = Problem(data, forward, backward)
    assert not Oracle().solve(problem, 12).status.fits
    assert relaxation_bound(Relaxation(problem, 12, [0, 1], spans=True).model).outcome is Outcome.INFEASIBLE
    roomy = replace(problem, backward=(replace(backward[0], peak_bytes=13), backward[1]))
    least = (Oracle().solve(roomy, 13).time_ms / roomy.keep_all_time_ms - 1) * UNITS
    assert both_bounds(Relaxation(roomy, 13, [0, 1], spans=True))[1] <= least * (1 + 1e-6)


@given(st.integers(0, 10**9), st.integers(10, 30), st.floats(0.05, 0.6))
@settings(max_examples=20, deadline=None)
@pytest.mark.slow
def test_below_any_plan_on_larger_problems(seed, count, rate):
    problem = random_problem(seed, count)
    plan = normalise(problem, random_plan(problem, seed, rate))
    peak, time_ms = peak_and_time(problem, plan)
    assert lower_bound_ms(problem, peak) <= time_ms + 1e-6
    assert lower_bound_ms(problem, peak, plan=plan) <= time_ms + 1e-6
    found = Greedy(tries=2, rounds=5).solve(problem, peak)
    if found.status.fits:
        assert lower_bound_ms(problem, peak) <= found.time_ms + 1e-6


def test_exact_where_everything_fits_or_nothing_can():
    problem = chain_of(6)
    high = evaluate(problem, problem.no_recompute).peak_bytes
    assert lower_bound_ms(problem, high) == problem.keep_all_time_ms
    assert lower_bound_ms(problem, high - 1) > problem.keep_all_time_ms
    assert lower_bound_ms(problem, 11) == math.inf


@pytest.mark.parametrize(
    ("build", "share", "gap"), [(resnet50, 0.7, 0.01), (resnet50, 0.5, 0.01), (resnet50, 0.35, 0.02), (gpt2, 0.7, 0.01)]
)
def test_near_the_best_plan_on_real_structures(build, share, gap):
    problem, chain = build()
    budget = int(share * evaluate(problem, problem.no_recompute).peak_bytes)
    found = Greedy(tries=2, rounds=30).solve(problem, budget)
    bound = lower_bound_ms(problem, budget, chain, time_limit_s=60)
    assert (1 - gap) * found.time_ms <= bound <= found.time_ms


def test_refinement_only_tightens_and_names_a_plan():
    problem, chain = resnet50(layers=(2, 2, 2, 2))
    budget = int(0.5 * evaluate(problem, problem.no_recompute).peak_bytes)
    target = Target(math.inf, 5.0)
    found = Refinement(problem, budget, chain, bound_ms=problem.keep_all_time_ms)
    for _ in range(4):
        before, found = found, found.advanced(problem.no_recompute, target)
        assert found.bound_ms >= before.bound_ms
        if found is before:
            break
        assert found.starts[0] == 0
        assert list(found.starts) == sorted(set(found.starts))
        assert found.plan is not None
    assert found.bound_ms > problem.keep_all_time_ms


def test_refinement_with_spans_goes_on_from_where_it_is():
    problem, chain = gpt2(layers=6, vocabulary=3000)
    budget = int(0.25 * evaluate(problem, problem.no_recompute).peak_bytes)
    found = Refinement(problem, budget, chain, bound_ms=problem.keep_all_time_ms)
    for _ in range(2):
        found = found.advanced(problem.no_recompute, Target(math.inf, 60.0, integer=False))
    better = found.with_spans().advanced(problem.no_recompute, Target(math.inf, 60.0, integer=False))
    assert better.bound_ms > found.bound_ms
    enough = found.with_spans().advanced(problem.no_recompute, Target(found.bound_ms, 60.0))
    assert enough.rounds <= found.rounds + 1
    assert enough.bound_ms >= found.bound_ms


def budgets_between(problem: Problem) -> set[int]:
    low, high = peak_and_time(problem, least_peak(problem))[0], peak_and_time(problem, problem.no_recompute)[0]
    return {low, (2 * low + high) // 3}


def test_cases_are_below_the_oracle_wherever_they_are_told():
    told = 0
    for seed in range(60):
        problem = random_problem(seed, 3 + seed % 5, plain=seed % 3 == 0)
        if not problem.backward:
            continue
        for budget in budgets_between(problem):
            best = Oracle().solve(problem, budget)
            whole = Refinement(problem, budget).with_spans(range(len(problem.backward)))
            for stage in range(len(problem.backward)):
                found = Cases.at(whole, stage, 5.0)
                if found is None:
                    continue
                told += 1
                before_ms = found.bound_ms
                for _ in range(3):
                    found = found.advanced(Target(math.inf, 5.0))
                    assert before_ms - 1e-9 <= found.bound_ms <= best.time_ms + 1e-6
                    before_ms = found.bound_ms
                assert found.is_over or found.bound_ms == math.inf
    assert told > 40


def test_a_plan_is_in_a_case_and_no_slower_than_what_is_proven_of_it():
    problem, chain = gpt2(layers=2)
    rng = random.Random(1)
    told = 0
    for _ in range(20):
        plan = normalise(problem, random_plan(problem, rng.randrange(100), 0.1))
        peak, time_ms = peak_and_time(problem, plan)
        stage = rng.randrange(1, len(problem.backward))
        found = Cases.at(Refinement(problem, peak, chain, starts=(0, stage)).with_spans(), stage, 5.0)
        if found is None:
            continue
        told += 1
        alive = set(alive_before(problem, plan, stage))
        assert alive.isdisjoint(found.excluded)
        places = {place for place, item in enumerate(found.items) if item in alive}
        found = found.advanced(Target(time_ms, 1.0))
        own = [case for case, chosen in enumerate(found.sets.tolist()) if places <= set(chosen)]
        assert own
        extra = (time_ms / problem.keep_all_time_ms - 1) * UNITS
        assert all(found.bounds[case] <= extra + 1e-6 for case in own)
    assert told > 5


def test_one_program_proves_of_each_case_no_more_than_its_own_would():
    problem, chain = gpt2(layers=2, vocabulary=3000)
    budget = int(1.05 * smallest_budget(problem, chain, 3.0).budget_bytes)
    stage = len(problem.backward) // 3
    found = Cases.at(Refinement(problem, budget, chain).with_spans({0, stage}), stage, 5.0)
    assert found is not None
    found = found.advanced(Target(math.inf, 2.0))
    rng = random.Random(2)
    for case in rng.sample(range(len(found.sets)), min(12, len(found.sets))):
        chosen = set(found.sets[case].tolist())
        large = tuple((item, float(place in chosen)) for place, item in enumerate(found.items))
        limit = Limit(stage, (*large, *((item, 0.0) for item in found.excluded)))
        own = []
        for starts in found.groupings:
            relaxation = found.refinement.relaxation(starts)
            relaxation.limit(limit)
            own.append(relaxation_bound(relaxation.model).bound)
        assert found.bounds[case] <= max(own) + 1e-6 * UNITS


def test_the_fullest_sets_are_those_without_room_for_more():
    rng = random.Random(3)
    for _ in range(50):
        sizes = [rng.choice((1.0, 2.0, 2.5, 4.0)) for _ in range(rng.randrange(1, 8))]
        room = rng.choice((3.0, 5.0, 7.5))
        found = _fullest_sets(sizes, room)
        assert found is not None
        numbers = range(len(sizes))
        all_sets = [frozenset(n for n in numbers if bits >> n & 1) for bits in range(1 << len(sizes))]
        fitting = [chosen for chosen in all_sets if sum(sizes[n] for n in chosen) <= room]
        fullest = {chosen for chosen in fitting if not any(chosen < other for other in fitting)}
        told = [frozenset(n for n in row if n < len(sizes)) for row in found.tolist()]
        assert set(told) == fullest
        assert len(told) == len(fullest)
    assert _fullest_sets([1.0] * 60, 10.0) is None  # too many to tell apart


def test_cases_are_told_for_a_plan_only_where_they_prove_enough_of_it(monkeypatch):
    problem, chain = gpt2(layers=4, vocabulary=3000)
    budget = int(1.02 * smallest_budget(problem, chain, 3.0).budget_bytes)
    plan = Greedy(tries=2, rounds=30).solve(problem, budget).schedule
    coarse = Refinement(problem, budget, chain).solved(Target(math.inf, 5.0, integer=False))
    recompute = recompute_of(problem, plan)
    assert worth(coarse, range(1, 4), recompute, 10.0) is not None
    assert worth(coarse, range(1, 4), None, 10.0) is not None
    monkeypatch.setattr("rk_solvers.bounds.cases.WORTH", 1.01)
    assert worth(coarse, range(1, 4), recompute, 10.0) is None


def test_what_is_alive_before_groups_is_forgotten_with_them():
    """A program that is not solved in time tells nothing of the groups that it is in."""
    problem, chain = gpt2(layers=2, vocabulary=3000)
    budget = int(0.5 * evaluate(problem, problem.no_recompute).peak_bytes)
    found = Refinement(problem, budget, chain).with_spans({0, 3}).solved(Target(math.inf, 5.0))
    assert list(found.alive) == [0, 3]
    moved = found.with_spans({0, 5}).solved(Target(math.inf, 1e-9))
    assert moved.starts == (0, 5)
    assert not moved.alive
    narrow = Narrowing(found, moved, rounds=1)
    assert narrow.advanced(problem.no_recompute, Target(math.inf, 5.0)).bound_ms >= found.bound_ms


def test_divided_groups_are_below_the_oracle_and_prove_no_less():
    divisions = 0
    for seed in range(60):
        problem = random_problem(seed, 4 + seed % 5, plain=seed % 3 == 0)
        if len(problem.backward) < 3:
            continue
        for budget in budgets_between(problem):
            best = Oracle().solve(problem, budget)
            found = Refinement(problem, budget).with_spans().solved(Target(math.inf, 5.0))
            while found.alive and (starts := divided(found, 5.0)) != set(found.starts):
                assert starts > set(found.starts)
                before_ms, found = found.bound_ms, found.with_spans(starts).solved(Target(math.inf, 5.0))
                assert before_ms <= found.bound_ms <= best.time_ms + 1e-6
                divisions += 1
    assert divisions > 10


def test_cases_raise_the_bound_where_a_loss_leaves_little_room():
    problem, chain = gpt2(layers=4, vocabulary=3000)
    budget = int(1.02 * smallest_budget(problem, chain, 3.0).budget_bytes)
    found = Refinement(problem, budget, chain)
    for _ in range(2):
        found = found.advanced(problem.no_recompute, Target(math.inf, 5.0, integer=False))
    narrow = Narrowing.of(found)
    for _ in range(2):
        narrow = narrow.advanced(problem.no_recompute, Target(math.inf, 10.0))
    assert narrow.cases is not None
    assert narrow.bound_ms > found.bound_ms + 0.01 * problem.keep_all_time_ms
    plan = Greedy(tries=2, rounds=30).solve(problem, budget)
    assert narrow.bound_ms <= plan.time_ms


def test_narrow_stages_apart_raise_the_bound_of_the_integer_program():
    problem, chain = gpt2(layers=6, vocabulary=3000)
    budget = int(1.1 * smallest_budget(problem, chain, 3.0).budget_bytes)
    found = Refinement(problem, budget, chain)
    for _ in range(2):
        found = found.advanced(problem.no_recompute, Target(math.inf, 5.0))
    narrow = Narrowing.of(found)
    for _ in range(3):
        before, narrow = narrow, narrow.advanced(problem.no_recompute, Target(math.inf, 2.0))
        assert narrow.bound_ms >= before.bound_ms
        assert narrow.rounds > before.rounds
    assert narrow.bound_ms > found.bound_ms
    assert narrow.plan is not None


def test_a_plan_of_the_relaxation_that_fits_is_the_best():
    """On small problems: refined to the end, its plan fits, or no stage is left to be set apart."""
    exact = 0
    for seed in range(40):
        problem = random_problem(seed, 3 + seed % 4)
        if not problem.backward:
            continue
        low, high = peak_and_time(problem, least_peak(problem))[0], peak_and_time(problem, problem.no_recompute)[0]
        budget = (low + high) // 2
        best = Oracle().solve(problem, budget)
        found = Refinement(problem, budget, bound_ms=problem.keep_all_time_ms)
        for _ in range(12):
            before, found = found, found.advanced(problem.no_recompute, Target(math.inf, 5.0))
            if found is before or found.bound_ms == math.inf:
                break
            if found.plan is not None and peak_and_time(problem, found.plan)[0] <= budget:
                assert peak_and_time(problem, found.plan)[1] == pytest.approx(best.time_ms, rel=1e-5)
                exact += 1
                break
    assert exact >= 25


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="the blocks cover 2"):
        lower_bound_ms(chain_of(3), 10, Chain((range(2),), (0, 0, 0)))


@pytest.mark.slow
def test_a_large_problem_has_a_bound_within_the_time_limit():
    problem, chain = gpt2(layers=60)
    assert len(problem.forward) > 1000
    budget = int(0.5 * evaluate(problem, problem.no_recompute).peak_bytes)
    bound = lower_bound_ms(problem, budget, chain, time_limit_s=30)
    assert bound > 1.02 * problem.keep_all_time_ms


def test_groups_are_placed_with_fewer_programs_once_it_is_known_where_they_tell_most(monkeypatch):
    problem, chain = gpt2(layers=4, vocabulary=3000)
    budget = int(1.05 * smallest_budget(problem, chain, 3.0).budget_bytes)
    programs = 0

    def counted(model, *rest):
        nonlocal programs
        programs += 1
        return relaxation_bound(model, *rest)

    monkeypatch.setattr("rk_solvers.bounds.refinement.relaxation_bound", counted)
    coarse = Refinement(problem, budget, chain).with_spans()
    first = coarse.placed(Target(math.inf, 60.0, integer=False))
    needed, programs = programs, 0
    again = replace(coarse, gains=first.gains).placed(Target(math.inf, 60.0, integer=False))
    assert first.gains
    assert programs < needed
    value = relaxation_bound(coarse.relaxation(coarse.starts).model).bound
    assert relaxation_bound(again.relaxation(again.starts).model).bound >= value - 1e-6
