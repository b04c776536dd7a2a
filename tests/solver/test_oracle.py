"""The oracle: hand-computed optima, and no random plan is better."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import BackwardOp, Data, ForwardOp, Oracle, Problem, Status, check, peak_and_time
from rk_solvers.exact.oracle import least_peak, least_time
from rk_solvers.groups import normalise
from tests.solver.instances import chain_of, random_plan, random_problem


def test_the_cheaper_of_two_equal_values_is_recomputed():
    # x (dear) and y (cheap), 8 bytes each, both needed at the end; a third value z passes between
    data = (Data("x", 8, 0), Data("y", 8, 1), Data("z", 10, 2))
    forward = (
        ForwardOp("dear", 5, (), (0,)),
        ForwardOp("cheap", 1, (), (1,)),
        ForwardOp("pass", 1, (), (2,)),
    )
    problem = Problem(data, forward, (BackwardOp("b", 1, (0, 1), 0, 0),))
    assert least_time(problem, 26) == ((),)
    assert least_time(problem, 18) == ((1,),)
    assert least_time(problem, 17) == ((0, 1),)
    assert least_time(problem, 15) is None
    assert peak_and_time(problem, least_peak(problem)) == (16, 14.0)


def test_a_budget_below_the_least_peak_is_a_status_with_the_smallest_budget():
    solution = Oracle().solve(chain_of(4), 3)
    assert solution.status is Status.INFEASIBLE
    assert solution.smallest_budget_bytes == 12
    assert solution.binding_op is not None
    assert Oracle().solve(chain_of(4), 12).status is Status.OPTIMAL


def test_too_large_a_problem_is_refused():
    with pytest.raises(ValueError, match="takes 10"):
        Oracle().solve(chain_of(11), 100)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_no_random_plan_beats_the_oracle(seed, plan_seed):
    problem = random_problem(seed, 2 + seed % 5)
    least = peak_and_time(problem, least_peak(problem))[0]
    plan = normalise(problem, random_plan(problem, plan_seed))
    peak, time_ms = peak_and_time(problem, plan)
    assert peak >= least
    best = Oracle().solve(problem, peak)
    assert best.time_ms <= time_ms + 1e-9
    check(problem, best.schedule, peak)
