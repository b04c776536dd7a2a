"""The sweep over states: the oracle's answers, plans that fit, no claim where it gives up, few states for chains."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import BackwardOp, Data, ForwardOp, Oracle, Problem, check, peak_and_time
from rk_solvers.exact.oracle import least_peak
from rk_solvers.exact.state_sweep import Swept, sweep_states
from rk_solvers.groups import normalise
from rk_solvers.liveness import recompute_time_ms, schedule_of
from tests.solver.instances import chain_of, random_problem, random_step


def budgets_of(problem: Problem) -> list[int]:
    """Below the least peak, at it, and from there to what keep-all takes."""
    low = peak_and_time(problem, least_peak(problem))[0]
    high = peak_and_time(problem, problem.no_recompute)[0]
    return sorted({low - 1, low, (3 * low + high) // 4, (low + high) // 2, high - 1, high})


def assert_as_the_oracle(problem: Problem, budget: int) -> Swept:
    found, best = sweep_states(problem, budget), Oracle().solve(problem, budget)
    assert found.proven
    assert (found.recompute is not None) is best.status.fits
    if found.recompute is not None:
        assert found.recompute == normalise(problem, found.recompute)
        checked = check(problem, schedule_of(problem, found.recompute), budget)
        assert checked.time_ms == pytest.approx(best.time_ms)
    return found


def drawn(seed: int) -> Problem:
    """Any numbers, or a step as autograd makes one."""
    return random_step(seed, 3 + seed % 5)[0] if seed % 2 else random_problem(seed, 2 + seed % 6)


def test_as_the_oracle_on_hundreds_of_small_problems():
    fitting = impossible = again = 0
    seen = dict.fromkeys(("zero time", "zero bytes", "held", "phantom", "replay", "not recomputable"), 0)
    for seed in range(200):
        problem = drawn(seed)
        for budget in budgets_of(problem):
            found = assert_as_the_oracle(problem, budget)
            fitting += found.recompute is not None
            impossible += found.recompute is None
            again += found.recompute is not None and any(found.recompute)
        seen["zero time"] += any(op.time_ms == 0 for op in problem.forward)
        seen["zero bytes"] += any(item.size_bytes == 0 for item in problem.data)
        seen["held"] += bool(problem.held)
        seen["phantom"] += any(item.kind == "phantom" for item in problem.data)
        seen["replay"] += any(op.replay_bytes for op in problem.forward)
        seen["not recomputable"] += not all(op.recomputable for op in problem.forward)
    assert min(seen.values()) > 20, seen
    assert min(fitting, impossible, again) > 150


@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(-2, 60))
@settings(max_examples=60, deadline=None)
def test_as_the_oracle_at_any_budget(seed, count, budget):
    assert_as_the_oracle(random_problem(seed, count), budget)


@given(st.integers(0, 10**9), st.integers(3, 20), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_more_time_allowed_than_needed_changes_nothing_and_less_leaves_nothing(seed, count, share):
    problem = random_step(seed, count)[0]
    low = peak_and_time(problem, tuple(() for _ in problem.backward))[0]
    budget = int(low * (0.5 + 0.5 * share))
    free = sweep_states(problem, budget)
    if not free.proven or free.recompute is None:
        return
    spent_ms = recompute_time_ms(problem, free.recompute)
    exact = sweep_states(problem, budget, spent_ms * (1 + 1e-9))
    assert exact.proven
    assert exact.states <= free.states
    assert exact.recompute is not None
    assert recompute_time_ms(problem, exact.recompute) == pytest.approx(spent_ms)
    less = sweep_states(problem, budget, spent_ms * (1 - 1e-6) if spent_ms else -1.0)
    assert (less.recompute, less.proven) == (None, True)


def pair(**changes: object) -> Problem:
    """Two operations of 10 bytes each; the first's output is needed last, so keep-all takes 20 bytes and more."""
    data = (Data("x", 10, 0), Data("y", 10, 1))
    first = ForwardOp("f", 2.0, (), (0,))
    backward = (BackwardOp("loss", 1.0, (1,), 0, 15), BackwardOp("g", 1.0, (0,), 0, 1))
    return Problem(data, (replace(first, **changes), ForwardOp("h", 3.0, (0,), (1,))), backward)


def spent_ms(problem: Problem, budget: int) -> float:
    """Time of the recomputations of the best plan; infinite if it is proven that there is none."""
    found = sweep_states(problem, budget)
    assert found.proven
    return math.inf if found.recompute is None else recompute_time_ms(problem, found.recompute)


def test_a_value_is_dropped_and_computed_again_only_where_the_rules_let_it():
    assert spent_ms(pair(), 35) == 0
    assert spent_ms(pair(), 34) == 2
    assert spent_ms(pair(), 24) == math.inf  # the loss alone takes 25
    assert spent_ms(pair(time_ms=0.0), 34) == 0
    assert spent_ms(pair(recomputable=False), 34) == math.inf
    assert spent_ms(replace(pair(), held=frozenset({0})), 34) == math.inf
    assert spent_ms(replace(pair(), base_bytes=4), 38) == 2
    assert spent_ms(pair(replay_bytes=9), 34) == 2  # 9 bytes of state beside y and the loss
    assert spent_ms(pair(replay_bytes=10), 34) == math.inf
    assert spent_ms(pair(workspace_bytes=25), 34) == math.inf
    assert spent_ms(pair(workspace_bytes=24), 34) == 2


def chain_at(count: int, share: float) -> tuple[Problem, int]:
    """A chain of equal operations, and a budget at this share of the way from its least peak to what keep-all takes."""
    problem = chain_of(count)
    low, high = 12, peak_and_time(problem, problem.no_recompute)[0]  # a backward: its input and two gradients
    return problem, int(low + share * (high - low))


@pytest.mark.parametrize("count", [22, 25])
@pytest.mark.parametrize("share", [0.05, 0.1])
def test_a_long_chain_near_its_least_peak_has_few_states(count, share):
    problem, budget = chain_at(count, share)
    found = sweep_states(problem, budget)
    assert found.proven
    assert found.recompute is not None
    assert found.states <= 200_000
    check(problem, schedule_of(problem, found.recompute), budget)
    bytes_less = sweep_states(problem, 11)
    assert (bytes_less.recompute, bytes_less.proven) == (None, True)


@pytest.mark.parametrize("most", [0, 1, 30, 1000])
def test_it_gives_up_at_its_limit_without_a_claim(most):
    problem, budget = chain_at(25, 0.25)
    found = sweep_states(problem, budget, most_states=most)
    assert (found.recompute, found.proven) == (None, False)


def test_the_limit_on_the_states_is_the_only_reason_to_give_up():
    for seed in range(30):
        problem = random_step(seed, 8)[0]
        budget = int(0.8 * peak_and_time(problem, problem.no_recompute)[0])
        found = sweep_states(problem, budget)
        assert sweep_states(problem, budget, most_states=found.states) == found
        if found.states:
            assert not sweep_states(problem, budget, most_states=found.states - 1).proven


def test_a_step_without_operations():
    nothing = Problem((), (), ())
    assert sweep_states(nothing, 0).recompute == ()
    assert sweep_states(replace(nothing, base_bytes=1), 0) == Swept(None, True, 0)
