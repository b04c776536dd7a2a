"""Decisions made elsewhere are followed to the letter, or refused."""

import dataclasses
import json

import pytest

from rk_solvers import Greedy, KeepAll, Problem, Status, check, normalise
from rockmate import PlanMismatch
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.planner import make_plan
from rockmate.planning.request import PlanRequest
from tests.module.models import Layers, built, rows
from tests.module.steps import assert_same_training, keep_nothing, measured_for, squares, train, wrapped


@pytest.fixture(scope="module")
def measured():
    return measured_for(built(Layers), rows())


@pytest.fixture(scope="module")
def decisions(measured):
    problem = measured.problem
    return PortablePlan.of(normalise(problem, keep_nothing(measured)), "hand")


def with_other_costs(problem: Problem) -> Problem:
    """The same operations, on three times the bytes, each in a time of its own."""
    return dataclasses.replace(
        problem,
        data=tuple(dataclasses.replace(item, size_bytes=3 * item.size_bytes) for item in problem.data),
        forward=tuple(dataclasses.replace(op, time_ms=float(index)) for index, op in enumerate(problem.forward)),
    )


def test_decisions_survive_text(measured, decisions):
    assert any(names for _, names in decisions.stages)
    again = PortablePlan.from_json(decisions.to_json())
    assert again == decisions
    assert again.schedule_for(measured.problem) == normalise(measured.problem, keep_nothing(measured))


@pytest.mark.parametrize("scale", [0.5, 0.7, 1.0])
def test_following_a_solver_gives_its_solution(measured, scale):
    problem = measured.problem
    budget_bytes = int(scale * KeepAll().solve(problem, 1 << 60).peak_bytes)
    found = Greedy().solve(problem, budget_bytes)
    followed = FixedPlan(PortablePlan.of(found.schedule, found.solver)).solve(problem, budget_bytes)
    assert followed.solver == found.solver
    assert (followed.schedule, followed.peak_bytes) == (found.schedule, found.peak_bytes)
    assert followed.status.fits == found.status.fits


def test_costs_are_those_of_the_problem_at_hand(measured, decisions):
    other = with_other_costs(measured.problem)
    solution = FixedPlan(decisions).solve(other, 1 << 60)
    checked = check(other, solution.schedule, None)
    assert (solution.peak_bytes, solution.time_ms) == (checked.peak_bytes, pytest.approx(checked.time_ms))
    assert solution.peak_bytes > FixedPlan(decisions).solve(measured.problem, 1 << 60).peak_bytes


def test_what_exceeds_the_budget_says_so(measured, decisions):
    peak_bytes = FixedPlan(decisions).solve(measured.problem, 1 << 60).peak_bytes
    assert FixedPlan(decisions).solve(measured.problem, peak_bytes).status is not Status.INFEASIBLE
    short = FixedPlan(decisions, lower_bound_ms=1.0).solve(measured.problem, peak_bytes - 1)
    assert short.status is Status.INFEASIBLE
    assert short.smallest_budget_bytes == peak_bytes


def test_a_bound_from_elsewhere_is_at_most_the_time(measured, decisions):
    for bound_ms in (1e-6, 1e6):
        solution = FixedPlan(decisions, bound_ms).solve(measured.problem, 1 << 60)
        assert solution.lower_bound_ms == min(bound_ms, solution.time_ms)


def test_operations_of_another_graph_are_named(measured, decisions):
    other = measured_for(built(Layers, 2), rows())
    with pytest.raises(PlanMismatch, match=r"there is no (forward|backward) operation \w+"):
        FixedPlan(decisions).solve(other.problem, 1 << 60)


def test_what_must_run_once_is_not_repeated(measured, decisions):
    problem = measured.problem
    name = decisions.stages[-1][1][0]
    forward = tuple(
        dataclasses.replace(op, recomputable=False) if op.name == name else op for op in problem.forward
    )  # fmt: skip
    with pytest.raises(PlanMismatch, match=f"{name} must run once here"):
        FixedPlan(decisions).solve(dataclasses.replace(problem, forward=forward), 1 << 60)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 3, "solver": "a", "stages": []}',
        '{"version": 1, "solver": 1, "stages": []}',
        '{"version": 1, "solver": "a", "stages": [["loss", "gelu_0"]]}',
        '{"version": 1, "solver": "a", "stages": [["loss"]]}',
        '{"version": 1, "solver": "a", "stages": [[1, []]]}',
        '{"version": 1, "solver": "a", "stages": [], "more": 1}',
    ],
)
def test_text_that_is_no_decisions_is_refused(text):
    with pytest.raises(ValueError, match="decisions|stages"):
        PortablePlan.from_json(text)


def test_text_is_plain_json(decisions):
    content = json.loads(decisions.to_json())
    assert dict(content["stages"]) == {stage: list(names) for stage, names in decisions.stages}


def test_a_module_trains_as_decided(measured, decisions):
    """Also where everything would fit: what was decided elsewhere is not decided again."""
    model = built(Layers)
    planned = make_plan(measured_for(model, rows()), PlanRequest("1GiB", squares, FixedPlan(decisions)), model)
    assert planned.plan.solver == "hand"
    assert PortablePlan.of(planned.plan.schedule, "hand") == decisions
    batches = [rows(seed) for seed in range(2)]
    module = wrapped(measured_for(model, rows()), model, planned)
    assert_same_training(train(module, batches), train(built(Layers), batches))
