"""Schedules as text, and the schedule of a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rk_solvers import Schedule, ScheduleError, binding, evaluate, memory_curve, schedule_of, simulate
from rk_solvers.groups import normalise
from rk_solvers.liveness import instances_of, recompute_of
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


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_is_the_same_by_names_by_indices_and_as_a_schedule(seed):
    problem = random_problem(seed)
    plan = normalise(problem, random_plan(problem, seed))
    schedule = schedule_of(problem, plan)
    names = schedule.recomputed
    assert schedule_of(problem, names) == schedule_of(problem, schedule) == schedule
    assert schedule.recomputations == sum(map(len, plan)) == sum(map(len, names.values()))
    assert evaluate(problem, names) == evaluate(problem, schedule) == evaluate(problem, plan)
    simulated = simulate(problem, schedule)
    assert [moment.peak_bytes for moment in simulated.moments] == memory_curve(problem, plan).tolist()
    assert str(simulated.peak.op) == evaluate(problem, plan).peak_at
    assert sorted(simulated.instances, key=repr) == sorted(instances_of(problem, plan), key=repr)
    assert str(binding(problem)[0]).split()[0] in ("compute", "backward")
    assert binding(problem)[1] <= simulated.peak_bytes


def test_names_that_a_problem_does_not_have_are_told():
    with pytest.raises(ValueError, match="no backward operation b9"):
        schedule_of(chain_of(2), {"b9": ["f0"]})
    with pytest.raises(ValueError, match="no forward operation f9"):
        schedule_of(chain_of(2), {"b0": ["f9"]})


def test_a_simulation_forgets_when_the_schedule_does():
    text = "compute f0\ncompute f1\nbackward b1\nforget y1\nbackward b0\nforget y0"
    late = simulate(chain_of(2, 4), Schedule.parse(text))
    assert [(item.data, item.first, item.last) for item in late.instances] == [(0, 0, 3), (1, 1, 2)]
    assert late.alive_at(2) == [0, 1]
    with pytest.raises(ScheduleError, match="forget y1: .* not alive"):
        simulate(chain_of(2), Schedule.parse("compute f0\nforget y1"))
