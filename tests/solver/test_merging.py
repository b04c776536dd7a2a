"""Long chains: blocks are taken together so that a table is within its limits."""

from __future__ import annotations

import time

import pytest

from rk_solvers import Auto, BackwardOp, Chain, Data, ForwardOp, Oracle, Problem, RockmateSolver, Rotor, check
from rk_solvers.bounds.peak_bound import is_infeasible
from rk_solvers.bounds.relaxation import UNITS, Relaxation
from rk_solvers.chain.blocks import blocks_of
from rk_solvers.chain.merging import LEAST_SLOTS, TableLimits, fitted, joined
from rk_solvers.chain.rotor import prepare_table
from rk_solvers.chain.rotor_tables import table_shape
from rk_solvers.liveness import least_bytes, peak_and_time
from rk_solvers.milp import relaxation_bound
from tests.solver.instances import random_problem

SIZE = 1 << 15


def pairs(count: int) -> tuple[Problem, Chain]:
    """`count` operations, a matrix product and an activation by turns, each a block; the loss first in the backward."""
    data = tuple(Data(f"d{i}", SIZE, i) for i in range(count))
    forward = tuple(
        ForwardOp(f"f{i}", 1.0 if i % 2 else 3.0, (i - 1,) if i else (), (i,)) for i in range(count)
    )  # fmt: skip
    backward = [BackwardOp("loss", 0.0, (), 0, SIZE)]
    for i in reversed(range(count)):
        needs = (i,) if i % 2 else (i - 1,) if i else ()
        backward.append(BackwardOp(f"b{i}", 1.5 if i % 2 else 5.0, needs, SIZE, 2 * SIZE))
    chain = Chain(tuple(range(i, i + 1) for i in range(count)), (count, *reversed(range(count))))
    return Problem(data, forward, tuple(backward), frozenset({count - 1})), chain


def share(problem: Problem, part: float) -> int:
    return int(part * peak_and_time(problem, problem.no_recompute)[0])


def test_a_chain_within_the_limits_is_left_as_it_is():
    problem, chain = pairs(100)
    assert fitted(problem, chain, 500, TableLimits()) == (chain, 500)


def test_a_chain_a_little_above_the_limits_has_fewer_slots_first():
    problem, chain = pairs(260)
    same, slots = fitted(problem, chain, 500, TableLimits())
    assert same is chain
    assert 250 <= slots < 500


@pytest.mark.parametrize("table_bytes", [1 << 14, 1 << 20, 1 << 26, 1 << 30])
@pytest.mark.parametrize("count", [3, 60, 400, 3000])
def test_tables_are_within_the_bytes_allowed(count, table_bytes):
    problem, chain = pairs(count)
    limits = TableLimits(table_bytes)
    merged, slots = fitted(problem, chain, 500, limits)
    merged.check(problem)
    assert 2 * 8 * (len(merged.blocks) + 1) ** 2 * (slots + 1) <= table_bytes
    assert (len(merged.blocks) + 1) ** 3 * (slots + 1) // 3 <= limits.sums


def test_what_is_allocated_is_what_the_limits_counted():
    problem, chain = pairs(200)
    limits = TableLimits(table_bytes=8 << 20)
    table = Rotor(chain, limits=limits, rounds=0).prepare(problem, share(problem, 0.5)).table
    assert table.times.shape == table_shape(table.numbers)
    assert table.times.nbytes <= limits.table_bytes


def test_tables_that_other_solvers_fill_are_within_the_limits_too():
    problem, chain = pairs(900)
    first = next(RockmateSolver(chain).blocks(problem, time.monotonic() + 2))
    assert len(first) < 900
    assert TableLimits.here().slots(len(first), LEAST_SLOTS) == LEAST_SLOTS
    problem, chain = pairs(200)
    blocks = blocks_of(problem, chain, 1, 0)
    table = prepare_table(problem, blocks, share(problem, 0.5), limits=TableLimits(table_bytes=4 << 20)).table
    assert table.times.nbytes <= 4 << 20


@pytest.mark.parametrize("together", [2, 3, 7, 59, 60, 61])
def test_joined_blocks_are_few_kinds_of_at_least_that_many(together):
    problem, chain = pairs(60)
    merged = joined(problem, chain, together)
    merged.check(problem)
    assert len(merged.blocks) <= -(-60 // together) + 1
    assert len({len(block) for block in merged.blocks[1:-1]}) <= 1


def brief_bound_ms(problem: Problem, budget: int) -> float:
    """The bound of one grouping, by bytes at the beginnings of its groups alone."""
    model = Relaxation(problem, budget, [0, 2], brief=True).model
    return problem.keep_all_time_ms * (1 + relaxation_bound(model).bound / UNITS)


@pytest.mark.parametrize("part", [0.2, 0.5])
def test_a_merged_chain_has_a_plan_near_the_brief_bound(part):
    problem, chain = pairs(400)
    budget = share(problem, part)
    solution = Rotor(chain, rounds=0).solve(problem, budget)
    assert check(problem, solution.schedule, budget).peak_bytes <= budget
    bound_ms = brief_bound_ms(problem, budget)
    assert bound_ms <= solution.time_ms <= 1.01 * bound_ms


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most"), [(1000, 1.02), (5000, 1.05)])
@pytest.mark.parametrize("part", [0.2, 0.5])
def test_the_default_solver_plans_thousands_of_operations_near_its_bound(count, most, part):
    problem, chain = pairs(count)
    budget = share(problem, part)
    solution = Auto(chain, time_limit_s=15.0, extra_s=45.0).solve(problem, budget)
    assert check(problem, solution.schedule, budget).peak_bytes <= budget
    assert solution.time_ms <= most * solution.lower_bound_ms


def test_a_table_that_takes_too_long_ends_in_a_timeout():
    problem, chain = pairs(100)
    with pytest.raises(TimeoutError, match="within the time limit"):
        Rotor(chain, time_limit_s=0.0).prepare(problem, share(problem, 0.5))


def test_what_is_possible_is_not_tabled_for_thousands_of_operations():
    problem, _ = pairs(3000)
    assert not is_infeasible(problem, least_bytes(problem))
    assert is_infeasible(problem, least_bytes(problem) - 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_brief_bound_of_a_small_problem_is_no_more_than_its_optimum(seed):
    problem = random_problem(seed, 5)
    for part in (0.6, 0.8, 0.95):
        best = Oracle().solve(problem, share(problem, part))
        if best.status.fits:
            model = Relaxation(problem, share(problem, part), [0], brief=True).model
            bound_ms = problem.keep_all_time_ms * (1 + relaxation_bound(model).bound / UNITS)
            assert bound_ms <= best.time_ms * (1 + 1e-9)
