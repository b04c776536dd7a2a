"""Keep-all, keep-none and Chen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rk_solvers import Chen, KeepAll, KeepNone, Status, check
from rk_solvers.liveness import recompute_of
from tests.solver.instances import chain_of, gpt2, random_problem


def test_keep_all_fits_from_its_peak_on():
    assert KeepAll().solve(chain_of(3), 16).status is Status.OPTIMAL
    small = KeepAll().solve(chain_of(3), 15)
    assert (small.status, small.smallest_budget_bytes, small.binding_op) == (
        Status.INFEASIBLE, 16, "backward b2",
    )  # fmt: skip


def test_keep_none_recomputes_each_prefix():
    solution = KeepNone().solve(chain_of(4), 12)
    assert recompute_of(chain_of(4), solution.schedule) == ((0, 1, 2), (0, 1), (0,), ())
    assert solution.peak_bytes == 12


def test_chen_on_a_chain_recomputes_each_operation_at_most_once():
    problem = chain_of(16)
    solution = Chen().solve(problem, 48)
    assert solution.status.fits
    done = [index for group in recompute_of(problem, solution.schedule) for index in group]
    assert len(done) == len(set(done))
    assert solution.peak_bytes <= 48 < KeepAll().solve(problem, 0).peak_bytes == 68


def test_chen_cuts_at_the_borders_of_blocks_where_a_chain_is_given():
    problem, chain = gpt2(layers=3)
    peak = KeepAll().solve(problem, 0).peak_bytes
    solution = Chen(chain).solve(problem, int(0.8 * peak))
    assert solution.status.fits
    check(problem, solution.schedule, int(0.8 * peak))


@pytest.mark.parametrize("solver", [KeepAll(), KeepNone(), Chen()], ids=lambda solver: solver.name)
@given(seed=st.integers(0, 10**6), budget=st.integers(0, 60))
def test_schedules_pass_the_checker(solver, seed, budget):
    problem = random_problem(seed)
    solution = solver.solve(problem, budget)
    checked = check(problem, solution.schedule, budget if solution.status.fits else None)
    assert (checked.peak_bytes, checked.peak_at) == (
        solution.peak_bytes,
        solution.binding_op or checked.peak_at,
    )
    assert checked.time_ms == pytest.approx(solution.time_ms)
