"""The bound on the peak of every plan: never above the least peak, and near it."""

import random
from dataclasses import replace

import pytest

from rk_solvers import BackwardOp, Data, ForwardOp, Problem, peak_and_time, smallest_budget
from rk_solvers.bounds.peak_bound import PRECISION, is_infeasible, peak_bound_bytes
from rk_solvers.exact.oracle import least_peak
from rk_solvers.liveness import least_bytes
from tests.solver.instances import random_plan, random_problem, random_step


def keep_all_bytes(problem):
    return peak_and_time(problem, problem.no_recompute)[0]


def test_no_plan_is_below_the_bound_and_most_bounds_are_reached():
    reached = better = 0
    problems = [random_problem(seed, 2 + seed % 5) for seed in range(150)]
    for problem in problems:
        least = peak_and_time(problem, least_peak(problem))[0]
        bound = peak_bound_bytes(problem, keep_all_bytes(problem))
        assert least_bytes(problem) <= bound <= least
        assert not is_infeasible(problem, least)
        reached += bound >= least - max(1, int(least * PRECISION))
        better += bound > least_bytes(problem)
    assert reached >= 0.9 * len(problems)
    assert better >= 5


@pytest.mark.parametrize(
    "seeds",
    [range(8), pytest.param(range(8, 40), marks=[pytest.mark.slow, pytest.mark.long_proofs])],
    ids=["few", "more"],
)
@pytest.mark.ci
def test_no_plan_of_a_larger_step_is_below_the_bound(seeds):
    for seed in seeds:
        problem, chain = random_step(seed)
        smallest = smallest_budget(problem, chain)
        assert smallest.proven_bytes <= smallest.budget_bytes
        plans = [random_plan(problem, number) for number in range(20)]
        assert smallest.proven_bytes <= min(peak_and_time(problem, plan)[0] for plan in plans)
        assert smallest.proven_bytes >= 0.9 * smallest.budget_bytes


def branches(first: int, second: int) -> Problem:
    """Two branches from the input, each of a large inner value and a small outer one, joined: what a residual is.

    The second branch is computed while the first one's result waits.
    """
    sizes = {"inner_0": 40, "outer_0": first, "inner_1": 40, "outer_1": second, "joined": 4}
    data = tuple(Data(name, size, index) for index, (name, size) in enumerate(sizes.items()))
    inputs = [(), (0,), (), (2,), (1, 3)]
    forward = tuple(ForwardOp(name, 1.0, inputs[k], (k,)) for k, name in enumerate(sizes))
    # Large gradients come first, beside which even the joined value is too much; recomputing it takes a little less.
    large = 47 + first + 40 + second
    backward = (BackwardOp("large", 1.0, (), 0, large), BackwardOp("joined", 1.0, (4,), 50, 60))
    return Problem(data, forward, backward, frozenset())


def test_what_waits_for_a_join_is_counted():
    problem = branches(30, 30)
    least = peak_and_time(problem, least_peak(problem))[0]
    assert peak_bound_bytes(problem, keep_all_bytes(problem)) == least == least_bytes(problem) + 3


@pytest.mark.parametrize("budget_bytes", [-1, 0, 1])
def test_nothing_fits_in_nothing(budget_bytes):
    problem = branches(3, 3)
    assert is_infeasible(problem, budget_bytes)


def test_a_step_without_a_backward_is_no_more_than_its_forward():
    problem = replace(branches(3, 3), backward=())
    assert peak_bound_bytes(problem, keep_all_bytes(problem)) <= keep_all_bytes(problem)


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 12), marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.ci
def test_the_smallest_budget_does_not_depend_on_times(seeds):
    """A model measured anew has other times, and the budget that was named as the smallest is met again."""
    rng = random.Random(0)
    for seed in seeds:
        problem, _ = random_step(seed)
        forward = tuple(replace(op, time_ms=op.time_ms * rng.uniform(0.3, 3)) for op in problem.forward)
        again = replace(problem, forward=forward)
        assert smallest_budget(again).schedule == smallest_budget(problem).schedule
