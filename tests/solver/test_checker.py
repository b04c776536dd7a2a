"""The checker: hand-computed peaks, every rule, and agreement with the fast evaluations."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import (  # fmt: skip
    BackwardOp,
    Data,
    ForwardOp,
    Problem,
    Schedule,
    ScheduleError,
    check,
    evaluate,
    memory_curve,
    schedule_of,
)
from rk_solvers.groups import normalise
from rk_solvers.liveness import PlanState, Tables
from tests.solver.instances import chain_of, random_plan, random_problem

seeds = st.integers(0, 10**6)


def test_keep_all_of_a_chain():
    # alive at b2: y0 y1 (8) + peak 8; forwards: y0 y1 y2 (12)
    checked = check(chain_of(3), schedule_of(chain_of(3), ((), (), ())))
    assert (checked.peak_bytes, checked.peak_at) == (16, "backward b2")
    assert (checked.time_ms, checked.overhead) == (9.0, 0.0)


def test_recomputation_adds_its_time_and_what_is_resident():
    # compute f1 before b2: y0 y1 (8) + resident 4; b2 itself: y0 y1 (8) + 8, as y0 is used again by b1
    checked = check(chain_of(3), schedule_of(chain_of(3), ((1,), (), ())))
    assert (checked.peak_bytes, checked.time_ms) == (16, 10.0)
    assert checked.overhead == pytest.approx(1 / 9)
    # f0 again before b1 as well: b2 holds y1 only
    checked = check(chain_of(3), schedule_of(chain_of(3), ((), (0,), ())))
    assert (checked.peak_bytes, checked.peak_at) == (12, "compute f2") or checked.peak_bytes == 12


def test_replay_bytes_stay_from_the_first_to_the_last_computation():
    forward = (ForwardOp("f0", 1, (), (0,), replay_bytes=100), ForwardOp("f1", 1, (0,), (1,)))
    backward = (BackwardOp("b1", 1, (0,), 0, 0),)
    problem = Problem((Data("y0", 8, 0), Data("y1", 8, 1)), forward, backward)
    assert memory_curve(problem, ((),)).tolist() == [8, 16, 8]
    assert memory_curve(problem, ((0,),)).tolist() == [108, 116, 108, 8]
    assert check(problem, schedule_of(problem, ((0,),))).peak_bytes == 116


def test_what_is_computed_again_takes_the_time_of_a_repetition():
    problem = chain_of(3)
    dear = dataclasses.replace(problem.forward[1], repeat_ms=0.25)
    problem = dataclasses.replace(problem, forward=(problem.forward[0], dear, problem.forward[2]))
    again = ((1,), (), ())
    assert check(problem, schedule_of(problem, again)).time_ms == evaluate(problem, again).time_ms == 9.25
    assert problem.keep_all_time_ms == 9.0


def test_a_held_output_keeps_its_first_instance():
    forward = (ForwardOp("f0", 1, (), (0, 1)), ForwardOp("f1", 1, (0,), ()))
    backward = (BackwardOp("b1", 1, (0, 1), 0, 0),)
    problem = Problem((Data("y0", 8, 0), Data("p0", 4, 0)), forward, backward, frozenset({0}))
    assert memory_curve(problem, ((0,),)).tolist() == [12, 8, 12, 12]
    assert str(schedule_of(problem, ((0,),))).count("forget y0") == 0


BROKEN = [
    ("compute f1", "line 1: compute f1: computed before f0"),
    ("compute f0\ncompute f0", "line 2: compute f0: computed again before the forward is complete"),
    ("compute f0\nbackward b2", "line 2: backward b2: runs before the forward operation f1"),
    ("compute f0\nforget y0\ncompute f1", "line 3: compute f1: needs y0, which is not alive"),
    ("compute f0\ncompute f1\ncompute f2\nforget y1\nbackward b2", "line 5: backward b2: needs y1"),
    ("compute f0\ncompute f1\ncompute f2\nbackward b1", "the next backward operation must be b2"),
    ("compute f0\nforget y1", "line 2: forget y1: this data is not alive"),
    ("compute f0\nforget z", "the problem has no such data"),
    ("compute g", "no such forward operation"),
    ("compute f0\ncompute f1\ncompute f2\ncompute f0", "new instance of y0, which is still alive"),
    (
        "compute f0\ncompute f1\ncompute f2\nforget y0\ncompute f0\nbackward b2",
        "f0 is recomputed just before",
    ),
    ("compute f0\ncompute f1", "never computes f2"),
    ("compute f0\ncompute f1\ncompute f2", "never runs backward b2"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_each_broken_rule_is_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        check(chain_of(3), Schedule.parse(text))


def test_unrecomputable_held_order_and_budget_are_checked():
    forward = (ForwardOp("f0", 1, (), (0,), recomputable=False), ForwardOp("f1", 1, (0,), (1,)))
    problem = Problem((Data("y0", 8, 0), Data("y1", 8, 1)), forward, (BackwardOp("b", 1, (0,), 0, 0),), frozenset({1}))
    start = "compute f0\ncompute f1\n"
    with pytest.raises(ScheduleError, match="not recomputable"):
        check(problem, Schedule.parse(start + "forget y0\ncompute f0"))
    with pytest.raises(ScheduleError, match="held to the end"):
        check(problem, Schedule.parse(start + "forget y1"))
    with pytest.raises(ScheduleError, match="against the forward order"):
        check(chain_of(3), Schedule.parse("compute f0\ncompute f1\ncompute f2\nforget y0\nforget y1\n"
                                          "compute f0\ncompute f1\ncompute f0"))  # fmt: skip
    whole = Schedule.parse(start + "backward b")
    assert check(problem, whole, 16).peak_bytes == 16
    with pytest.raises(ScheduleError, match=r"line 2: compute f1: 16 bytes are alive, the budget is 15"):
        check(problem, whole, 15)


@given(seeds, seeds)
@settings(max_examples=200)
def test_checker_and_evaluation_agree(seed, plan_seed):
    problem = random_problem(seed, 1 + seed % 9)
    plan = normalise(problem, random_plan(problem, plan_seed))
    checked, result = check(problem, schedule_of(problem, plan)), evaluate(problem, plan)
    assert (checked.peak_bytes, checked.peak_at) == (result.peak_bytes, result.peak_at)
    assert checked.time_ms == pytest.approx(result.time_ms)


@given(seeds, seeds)
def test_edits_keep_the_memory_curve_exact(seed, plan_seed):
    problem = random_problem(seed, 1 + seed % 9)
    state = PlanState(Tables(problem))
    start = state.mark()
    keys = [state.tables.key(b, k) for b, group in enumerate(random_plan(problem, plan_seed)) for k in group]
    random.Random(seed).shuffle(keys)
    for key in keys:
        state.add(key)
    mark = state.mark()
    for key in keys[::2]:
        state.remove(key)
        np.testing.assert_array_equal(state.memory, memory_curve(problem, state.recompute()))
    state.undo(mark)
    np.testing.assert_array_equal(state.memory, memory_curve(problem, random_plan(problem, plan_seed)))
    assert _parts(state) == _parts(PlanState(state.tables, state.recompute()))
    assert state.time_ms == mark.time_ms
    state.undo(start)
    assert _parts(state) == _parts(PlanState(state.tables))
    assert state.time_ms == 0
    assert not state.log


def _parts(state):
    return state.memory.tolist(), state.keys, state.uses, state.computed
