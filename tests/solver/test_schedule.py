"""Schedules as text, and the schedule of a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rk_solvers import Schedule, ScheduleError, schedule_of
from rk_solvers.groups import normalise
from rk_solvers.liveness import recompute_of
from tests.solver.instances import chain_of, random_plan, random_problem

seeds = st.integers(0, 10**6)


def test_keep_all_forgets_each_value_after_its_last_use():
    # y0 -> y1 -> y2; b2 needs y1, b1 needs y0, b0 needs nothing; y2 is useless
    assert str(schedule_of(chain_of(3), ((), (), ()))).splitlines() == [
        "compute f0",
        "compute f1",
        "compute f2",
        "forget y2",
        "backward b2",
        "forget y1",
        "backward b1",
        "forget y0",
        "backward b0",
    ]


def test_a_recomputed_value_is_forgotten_twice():
    text = str(schedule_of(chain_of(3), ((0, 1), (), ())))
    assert text.splitlines()[:9] == [
        "compute f0",
        "compute f1",
        "forget y0",
        "compute f2",
        "forget y1",
        "forget y2",
        "compute f0",
        "compute f1",
        "backward b2",
    ]


@given(seeds, seeds)
def test_text_and_plan_round_trip(seed, plan_seed):
    problem = random_problem(seed)
    plan = normalise(problem, random_plan(problem, plan_seed))
    schedule = schedule_of(problem, plan)
    assert Schedule.parse(str(schedule)) == schedule
    assert recompute_of(problem, schedule) == plan
    assert normalise(problem, plan) == plan


def test_a_recomputation_that_does_not_serve_its_stage_moves_to_the_one_it_serves():
    # b2 needs y1 only, b1 needs y0: f0 alone just before b2 serves b1; nothing ever needs y2
    assert normalise(chain_of(3), ((0, 2), (), ())) == ((), (0,), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute f0\nevict y0", "line 2: unknown operation 'evict'"),
        ("compute f0\n\nforget", "line 3: 'forget' must be two words"),
    ],
)
def test_unreadable_lines_are_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_unknown_names_and_late_recomputations_are_refused():
    with pytest.raises(ScheduleError, match="line 1: compute g"):
        recompute_of(chain_of(1), Schedule.parse("compute g"))
    with pytest.raises(ScheduleError, match="f0 is recomputed after the last"):
        recompute_of(chain_of(1), Schedule.parse("compute f0\nbackward b0\ncompute f0"))
