"""Knapsack: its choices are what they promise, and its plans keep what was chosen and recompute nothing twice."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import Chen, KeepAll, KeepNone, Oracle, Status, check, evaluate
from rk_solvers.baselines.knapsack import Item, Knapsack, by_density, by_table, items_of, keeping_plan
from tests.solver.instances import chain_of, gpt2, random_problem, resnet50

ITEMS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=8)


def items_from(numbers: list[tuple[int, int]]) -> list[Item]:
    return [Item(index, size, float(value)) for index, (size, value) in enumerate(numbers)]


def worth(items: list[Item], kept: set[int]) -> float:
    return sum(item.value_ms for item in items if item.data in kept)


@given(ITEMS, st.integers(0, 60))
def test_the_table_keeps_what_is_worth_most(numbers, capacity):
    items = items_from(numbers)
    kept = by_table(items, 1000)(capacity)
    subsets = itertools.chain.from_iterable(itertools.combinations(items, count) for count in range(len(items) + 1))
    best = max(
        sum(item.value_ms for item in subset)
        for subset in subsets
        if sum(item.size_bytes for item in subset) <= capacity
    )
    assert worth(items, kept) == best
    assert sum(items[index].size_bytes for index in kept) <= capacity


@given(ITEMS, st.integers(0, 60), st.integers(1, 7))
def test_no_choice_is_above_its_capacity(numbers, capacity, slots):
    items = items_from(numbers)
    for choice in (by_density(items), by_table(items, slots)):
        assert sum(items[index].size_bytes for index in choice(capacity)) <= capacity
        assert choice(100) == {item.data for item in items}


@given(st.integers(0, 10**6), st.data())
def test_a_plan_keeps_what_it_is_told_and_recomputes_nothing_twice(seed, draw):
    problem = random_problem(seed)
    candidates = [item.data for item in items_of(problem)]
    kept = set(draw.draw(st.lists(st.sampled_from(candidates), unique=True))) if candidates else set()
    plan = keeping_plan(problem, kept)
    again = [index for group in plan for index in group]
    assert len(again) == len(set(again))
    assert all(not kept.issuperset(problem.forward[index].outputs) for index in again)
    assert not any(keeping_plan(problem, set(candidates)))


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_nothing_is_recomputed_twice_within_a_window(seed, length):
    problem = random_problem(seed)
    plan = keeping_plan(problem, set(), length)
    for start in range(0, len(plan), length):
        again = [index for group in plan[start : start + length] for index in group]
        assert len(again) == len(set(again))


@given(seed=st.integers(0, 10**6), budget=st.integers(0, 60))
@settings(max_examples=60)
def test_schedules_pass_the_checker_and_never_beat_the_oracle(seed, budget):
    problem = random_problem(seed, 5)
    solution = Knapsack().solve(problem, budget)
    check(problem, solution.schedule, budget if solution.status.fits else None)
    assert not solution.status.fits or Oracle().solve(problem, budget).time_ms <= solution.time_ms + 1e-9


def test_what_fits_entirely_is_kept_entirely():
    problem = chain_of(5)
    solution = Knapsack().solve(problem, KeepAll().solve(problem, 0).peak_bytes)
    assert solution.status is Status.OPTIMAL
    assert not solution.schedule.recomputations


@pytest.mark.parametrize(
    "build", [lambda: gpt2(layers=4), lambda: resnet50(layers=(2, 2, 2, 2))], ids=["gpt2", "resnet"]
)
@pytest.mark.parametrize("share", [0.8, 0.7])
def test_it_is_faster_than_the_plainer_baselines(build, share):
    problem, _ = build()
    budget = int(share * evaluate(problem, problem.no_recompute).peak_bytes)
    found = Knapsack().solve(problem, budget)
    assert found.status.fits
    for solver in (Chen(), KeepNone()):
        rival = solver.solve(problem, budget)
        assert not rival.status.fits or found.time_ms <= rival.time_ms + 1e-9
