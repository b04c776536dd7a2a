"""The zoo's models train exactly under every budget, and stay within it."""

import copy
from functools import cache

import pytest

from rk_solvers import Greedy, Schedule, check, peak_and_time, simulate
from rockmate import BudgetTooSmall, Rockmate, zoo
from rockmate.planning.lowered import LoweredPlan
from rockmate.planning.measured import Measured
from rockmate.planning.planner import make_plan
from rockmate.planning.request import PlanRequest
from rockmate.zoo import ZooEntry
from tests.module.steps import Trained, assert_same_training, measured_for, peak_of_step, rockmate_from, train, wrapped
from tests.where import here

LONG = ("resnet101-tiny", "densenet-tiny", "googlenet-tiny")  # as resnet50-tiny and unet-tiny, or for longer
NAMES = [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in zoo.names() if "tiny" in n]
BUDGETS = [*(pytest.param(b, marks=pytest.mark.slow) for b in (1.0, 0.6)), 0.8, 0.5]
QUICK = Greedy(tries=2, rounds=3)  # exactness does not depend on who made the plan

# Prediction adds stages that were measured one by one; the tensors that two of them hold together for a moment
# are up to a few KiB each here, which is much of a model of 1 MiB and nothing of one of 1 GiB.
SMALL_BYTES = 64 << 10


@cache
def measured(name: str) -> tuple[ZooEntry, Measured]:
    """The entry and its graphs, once for all budgets. Tests train copies of its model."""
    entry = zoo.get(name)
    return entry, measured_for(entry.model, entry.sample, entry.loss)


@cache
def eager_training(name: str) -> Trained:
    """Three eager steps, once for all budgets."""
    entry, _ = measured(name)
    return train(copy.deepcopy(entry.model), [entry.sample] * 3, entry.loss)


@cache
def planned(name: str, budget: float) -> LoweredPlan:
    """A plan for this budget, or for the smallest one where no plan fits this."""
    entry, costs = measured(name)
    try:
        return make_plan(costs, PlanRequest(budget, entry.loss, QUICK), entry.model)
    except BudgetTooSmall as error:
        smallest = error.smallest_budget_bytes
    return make_plan(costs, PlanRequest(smallest, entry.loss, QUICK), entry.model)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_training_is_eager_s_to_the_bit_and_stays_within_its_budget(name, budget):
    entry, costs = measured(name)
    model = wrapped(costs, copy.deepcopy(entry.model), planned(name, budget))
    plan = model.plan
    found = train(model, [entry.sample] * 3, entry.loss)
    assert_same_training(found, eager_training(name))

    model.zero_grad()
    peak_bytes = peak_of_step(model, entry.sample, entry.loss)
    assert peak_bytes <= plan.budget_bytes
    assert abs(plan.peak_bytes - peak_bytes) <= max(0.02 * peak_bytes, SMALL_BYTES)
    assert budget == 1.0 or plan.recomputations > 0


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_three_counts_of_a_plan_agree(name, budget):
    problem, plan = measured(name)[1].problem, planned(name, budget).plan
    checked, simulated = check(problem, plan.schedule), simulate(problem, plan.schedule)
    peak_bytes, time_ms = peak_and_time(problem, plan.schedule)
    assert checked.peak_bytes == simulated.peak_bytes == peak_bytes == plan.peak_bytes
    assert checked.time_ms == pytest.approx(plan.time_ms)
    assert time_ms == pytest.approx(plan.time_ms)
    assert Schedule.parse(str(plan.schedule)) == plan.schedule


@pytest.mark.parametrize("name", ["gpt2-tiny", "mixer-tiny", "unet-tiny"])
def test_the_default_solver_trains_exactly_on_batches_it_has_not_seen(name):
    entry = zoo.get(name, device=here())
    eager = copy.deepcopy(entry.model)
    model = Rockmate(entry.model, entry.sample, 0.7, loss=entry.loss)
    batches = [entry.make_batch(seed)[0] for seed in (5, 6, 7)]
    assert_same_training(train(model, batches, entry.loss), train(eager, batches, entry.loss))


@pytest.mark.ci
@pytest.mark.slow
def test_the_smallest_budget_of_a_refusal_is_enough():
    entry, costs = measured("resnet18-tiny")
    with pytest.raises(BudgetTooSmall) as refusal:
        rockmate_from(costs, entry.model, PlanRequest(0.3, entry.loss))
    smallest = refusal.value.smallest_budget_bytes
    model = rockmate_from(costs, copy.deepcopy(entry.model), PlanRequest(smallest, entry.loss))
    assert peak_of_step(model, entry.sample, entry.loss) <= smallest
