"""The branch and bound of the benchmarks: below every plan whenever it ends, exact in the end."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.branching import Branched, _Branching, branched_bound, fullest_border
from rk_solvers import BackwardOp, Data, ForwardOp, Oracle, Problem, peak_and_time
from rk_solvers.bounds.relaxation import UNITS, Relaxation
from rk_solvers.exact.oracle import least_peak
from rk_solvers.groups import normalise
from rk_solvers.milp import BackendLimits, Outcome, relaxation_bound, solve
from tests.solver.instances import gpt2, random_plan, random_problem

LONG_S = 60.0


def drawn(seed: int, count: int) -> tuple[Problem, int, list[int]]:
    """A problem, a budget between the least peak and keep-all's, and groups."""
    problem, rng = random_problem(seed, count), random.Random(seed)
    assume(problem.backward)
    low = peak_and_time(problem, least_peak(problem))[0]
    budget = rng.randint(low, max(low, peak_and_time(problem, problem.no_recompute)[0]))
    return problem, budget, sorted({0} | {stage for stage in range(len(problem.backward)) if rng.random() < 0.8})


def bound_ms(problem: Problem, branched: Branched) -> float:
    return problem.keep_all_time_ms * (1 + branched.bound / UNITS)


@given(st.integers(0, 10**9), st.integers(2, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_whole_tree_is_the_integer_program_and_below_the_oracle(seed, count, spans):
    problem, budget, starts = drawn(seed, count)
    found = branched_bound(Relaxation(problem, budget, starts, spans), LONG_S)
    program = Relaxation(problem, budget, starts, spans)
    program.model.integer = program.integer
    whole = solve(program.model, "scipy", BackendLimits(LONG_S))
    assert found.complete
    assert whole.outcome is Outcome.OPTIMAL
    assert found.bound == pytest.approx(whole.objective, rel=1e-3, abs=1e-3)  # as both leave a gap
    assert bound_ms(problem, found) <= Oracle().solve(problem, budget).time_ms * (1 + 1e-6)


@given(st.integers(0, 10**9), st.integers(3, 7), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_wherever_the_search_ends(seed, count, steps):
    problem, budget, starts = drawn(seed, count)
    tree = _Branching(Relaxation(problem, budget, starts, spans=True), math.inf)
    tree._add({}, -math.inf)
    before = -math.inf
    for _ in range(steps):
        if not tree.open or tree.open[0].solved:
            break
        assert tree.open[0].bound >= before
        before = tree.open[0].bound
        tree._divide(heapq.heappop(tree.open))
    least = Oracle().solve(problem, budget).time_ms
    assert (
        min((node.bound for node in tree.open), default=math.inf)
        <= UNITS * (least / (problem.keep_all_time_ms or 1.0) - 1) * (1 + 1e-6) + 1e-3
    )


def test_without_time_the_bound_holds_nevertheless():
    problem = turn()
    found = branched_bound(Relaxation(problem, 20, [0, 1, 3], spans=True), 0.0)
    assert not found.complete
    assert bound_ms(problem, found) <= Oracle().solve(problem, 20).time_ms * (1 + 1e-6)


def test_no_plan_that_fits_is_below_the_bound():
    problem, _ = gpt2(layers=2, vocabulary=3000)
    plan = normalise(problem, random_plan(problem, 5, 0.2))
    peak, time_ms = peak_and_time(problem, plan)
    starts = [0, 1, len(problem.backward) // 2]
    assert bound_ms(problem, branched_bound(Relaxation(problem, peak, starts, spans=True), 3.0)) <= time_ms * (1 + 1e-6)


def turn() -> Problem:
    """Four data of 4 bytes, each from the one before, beside a loss that leaves room for less than two."""
    data = tuple(Data(f"y{index}", 4, index) for index in range(4))
    forward = tuple(ForwardOp(f"f{index}", 1.0, (index - 1,) if index else (), (index,)) for index in range(4))
    backward = (BackwardOp("loss", 1.0, (), 0, 14), *(BackwardOp(f"b{i}", 1.0, (i,), 0, 0) for i in reversed(range(4))))
    return Problem(data, forward, backward)


def test_the_turn_comes_first_and_is_decided_in_whole_data():
    problem, starts = turn(), [0, 1, 3]
    relaxation = Relaxation(problem, 20, starts, spans=True)
    assert starts[fullest_border(relaxation)] == 1
    linear = relaxation_bound(relaxation.model).bound
    found = branched_bound(relaxation, LONG_S)
    assert found.complete
    assert linear + 1 < found.bound <= found.value + 1e-6
    assert bound_ms(problem, found) <= Oracle().solve(problem, 20).time_ms * (1 + 1e-6)
