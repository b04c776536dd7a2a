"""Questions about budgets, of plans that may also move data."""

import copy

import pytest

from rockmate import PlanOptions, Rockmate, smallest_budget
from rockmate.queries.sweep import sweep
from tests.module.models import Layers, built, rows
from tests.module.steps import BRIEFLY, assert_same_training, squares, train
from tests.where import elsewhere


def test_the_smallest_budget_is_smaller_where_data_may_move_at_once(quick_disk, tmp_path):
    model, asked = built(Layers, 8), {"loss": squares, "limits": BRIEFLY}
    eager = copy.deepcopy(model)
    alone = smallest_budget(model, rows(), 1.02, **asked)
    moved = smallest_budget(model, rows(), 1.02, offload=elsewhere(tmp_path), **asked)
    plan = moved.plan_file.plan
    assert moved.budget_bytes < alone.budget_bytes
    assert plan.moves > 0
    assert moved.slowdown <= 1.02 * (1 + 1e-6)
    assert plan.measured_peak_bytes <= plan.budget_bytes == moved.budget_bytes
    module = Rockmate(model, rows(), plan=moved.plan_file, offload=elsewhere(tmp_path))
    batches = [(rows(),), (rows(1),)]
    assert_same_training(train(module, batches, squares), train(eager, batches, squares))


@pytest.mark.ci
def test_what_may_be_moved_is_limited_there_too(quick_disk, tmp_path):
    asked = {"loss": squares, "limits": BRIEFLY}
    found = smallest_budget(built(Layers, 8), rows(), 1.02, offload=elsewhere(tmp_path, "200KiB"), **asked)
    assert (found.plan_file.plan.measured_stored_bytes or 0) <= 200 << 10
    freer = smallest_budget(built(Layers, 8), rows(), 1.02, offload=elsewhere(tmp_path, "1MiB"), **asked)
    assert freer.budget_bytes <= found.budget_bytes


def test_a_sweep_has_plans_that_move_beside_others(quick_disk, tmp_path):
    options = PlanOptions(loss=squares, limits=BRIEFLY, offload=elsewhere(tmp_path))
    found = sweep(built(Layers, 8), rows(), [0.3, 0.6, 1.0], solvers=["auto", "greedy"], options=options)
    ours = [found.row("auto", budget) for budget in found.budgets]
    assert all(row.fits and row.measured_peak_bytes <= row.budget_bytes for row in ours)
    assert ours[0].moves > 0
    assert ours[-1].moves == 0
    assert all(found.row("greedy", budget).moves == 0 for budget in found.budgets)
    assert ours[0].time_ms < found.row("greedy", found.budgets[0]).time_ms
    assert found.proven_bytes <= found.smallest_bytes <= ours[0].measured_peak_bytes
