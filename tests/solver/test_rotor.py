"""Rotor: equal to the oracle on persistent chains, one table for many budgets, names of its operations."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import Chain, Oracle, Rotor, check, evaluate, peak_and_time
from rk_solvers.blocks import blocks_of
from rk_solvers.sequence import format_sequence
from tests.solver.instances import chain_of, gpt2, random_problem, resnet50


def unit_chain(count: int) -> Chain:
    """Each operation a block; the first backward operation plays the loss."""
    return Chain(tuple(range(i, i + 1) for i in range(count)), tuple(reversed(range(count))))


@pytest.mark.parametrize("budget", range(12, 33, 4))
def test_a_chain_of_unit_blocks_is_solved_as_by_the_oracle(budget):
    problem = chain_of(7)
    found, best = Rotor(unit_chain(7)).solve(problem, budget), Oracle().solve(problem, budget)
    assert found.status.fits == best.status.fits
    assert found.time_ms == pytest.approx(best.time_ms)
    check(problem, found.schedule, budget)


def test_the_sequence_bears_the_usual_names():
    table = Rotor(unit_chain(4)).prepare(chain_of(4), 20)
    words = {operation.kind for operation in table.sequence(12)}
    assert {"Fe", "B"} <= words <= {"Fck", "Fng", "Fe", "B"}
    assert format_sequence(table.sequence(table.table.numbers.slots)).startswith("Fe 0.0; Fe 1.0")
    with pytest.raises(ValueError, match="does not fit"):
        table.sequence(0)


def test_equal_blocks_are_solved_once():
    problem, chain = gpt2(layers=4)
    blocks = blocks_of(problem, chain)
    assert blocks[1].options is blocks[3].options
    assert all(option.saved_bytes <= blocks[1].options[0].saved_bytes for option in blocks[1].options)


@pytest.mark.parametrize("build", [gpt2, resnet50])
def test_one_table_serves_all_smaller_budgets(build):
    problem, chain = build()
    most = evaluate(problem, problem.no_recompute).peak_bytes
    table = Rotor(chain, rounds=3).prepare(problem, int(0.7 * most))
    previous = 0.0
    for share, overhead in ((0.7, 0.05), (0.5, 0.12), (0.4, 0.22)):
        solution = table.solve(int(share * most))
        checked = check(problem, solution.schedule, int(share * most))
        assert previous < checked.overhead <= overhead
        previous = checked.overhead


def test_too_small_a_budget_names_one_that_works():
    problem, chain = gpt2(layers=2)
    solver = Rotor(chain, rounds=0)
    small = solver.solve(problem, 1 << 20)
    assert not small.status.fits
    assert small.smallest_budget_bytes == peak_and_time(problem, small.recompute)[0]
    assert solver.solve(problem, small.smallest_budget_bytes).status.fits


@given(st.integers(0, 10**6), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_schedules_of_any_partition_pass_the_checker_and_never_beat_the_oracle(seed, budget):
    rng = random.Random(seed)
    problem = random_problem(seed, 1 + seed % 6)
    count = len(problem.forward)
    cuts = sorted({0, count, *(rng.randrange(count) for _ in range(2))})
    blocks = tuple(range(a, b) for a, b in itertools.pairwise(cuts))
    stages = sorted((rng.randint(0, len(blocks)) for _ in problem.backward), reverse=True)
    solver = Rotor(Chain(blocks, tuple(stages)), slots=100, rounds=2)
    solution = solver.solve(problem, budget)
    check(problem, solution.schedule, budget if solution.status.fits else None)
    best = Oracle().solve(problem, budget)
    assert not solution.status.fits or best.time_ms <= solution.time_ms + 1e-9


def test_a_hundred_blocks_are_quick():
    problem, chain = gpt2(layers=98, batch=32)
    assert len(chain.blocks) == 100
    budget = int(0.6 * evaluate(problem, problem.no_recompute).peak_bytes)
    solution = Rotor(chain, rounds=0).solve(problem, budget)
    check(problem, solution.schedule, budget)
