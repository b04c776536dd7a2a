"""Calls of sizes that were not measured, where plans move data to a second memory."""

import copy

import torch

from rkgb.devices.allocation_log import AllocationLog
from rockmate import Rockmate, plan_files
from rockmate.families.moving import PlacedMoves, fits
from rockmate.planning.fixed_plan import PortablePlan
from tests.families.test_lengths import Attention, lengths_of, quietly
from tests.module.steps import FEW_ROUNDS, assert_same_step, squares
from tests.where import elsewhere, here, placed

__all__ = ["quietly"]  # a fixture
LENGTHS = (48, 24, 36)  # which are measured


def planned(folder, limit=None, budget=0.45, model=None):
    torch.manual_seed(0)
    model = placed(model or Attention(layers=3))
    options = {"loss": squares, "limits": FEW_ROUNDS, "offload": elsewhere(folder, limit)}
    return copy.deepcopy(model), Rockmate(model, budget=budget, **options)


def train(module, eager, lengths):
    """Steps with eager's bits; the plan of each."""
    batch, plans = lengths_of(), []
    for number, length in enumerate(lengths):
        assert_same_step(module, eager, batch(length), number)
        plans.append(module.plan)
    return plans


def of_length(module, length):
    return next(plan for plan in module.plans if f"[4, {length}, 16]" in plan.calls)


def test_sizes_that_were_not_measured_move_data_too(quick_disk, tmp_path):
    eager, module = planned(tmp_path)
    train(module, eager, LENGTHS)
    assert of_length(module, 48).moves > 0
    train(module, eager, (44, 47, 40, 46, 20, 45))
    assert len(module._family.members) == len(LENGTHS)
    for length in (44, 47, 46):
        plan = of_length(module, length)
        assert plan.moves > 0
        assert plan.peak_bytes <= plan.budget_bytes
        assert (plan.measured_peak_bytes or 0) <= plan.budget_bytes
        assert plan.stored_bytes > 0
        assert plan.memory is not None
    assert of_length(module, 20).moves == 0  # eager's step is within the budget


def test_what_is_predicted_of_a_size_is_what_its_step_takes(quick_disk, tmp_path):
    eager, module = planned(tmp_path)
    train(module, eager, (*LENGTHS, 44))
    batch, plan = lengths_of()(44), of_length(module, 44)
    for _ in range(2):
        module.zero_grad()
        with AllocationLog(here()) as log:
            squares(module(batch)).backward()
    # The prediction has a row of the loss's squares in it that is over before the highest moment of this step.
    output_bytes = 4 * 44 * 16 * 4
    assert plan.peak_bytes - output_bytes - 64 <= log.peak_bytes <= plan.peak_bytes <= plan.budget_bytes


def test_the_second_memory_has_its_limit_at_all_sizes(quick_disk, tmp_path):
    eager, module = planned(tmp_path, limit="150KiB", budget=0.6)
    train(module, eager, (*LENGTHS, 44, 47, 40, 46))
    assert any(plan.moves for plan in module.plans)
    assert all((plan.stored_bytes or 0) <= 150 << 10 for plan in module.plans)


def test_a_plan_file_tells_what_moves_at_other_sizes(quick_disk, tmp_path):
    eager, module = planned(tmp_path)
    train(module, eager, (*LENGTHS, 44))
    file = plan_files.loads(plan_files.dumps(module.plan_file()))
    assert any(one.moves for one in file.family.schedules)
    again = Rockmate(copy.deepcopy(eager), plan=file, offload=elsewhere(tmp_path), loss=squares, limits=FEW_ROUNDS)
    train(again, eager, (44, 46))
    assert of_length(again, 46).moves > 0


def test_few_schedules_do_for_many_sizes(quick_disk, tmp_path):
    eager, module = planned(tmp_path)
    train(module, eager, LENGTHS)
    member = module._family.members[0]
    measured, decisions = member.measured, member.decisions
    assert decisions.moves
    memory, kept = member.plan.memory, PlacedMoves()
    budget_bytes = member.plan.budget_bytes
    found = {kept.best(decisions, measured.problem, memory, budget_bytes - less).schedule for less in (0, 8, 16, 24)}
    assert len(found) == 1
    tight = kept.best(decisions, measured.problem, memory, 0)
    assert not fits(tight.costs, memory, 0)
    assert tight.costs.peak_bytes <= budget_bytes
    assert PortablePlan.of(tight.schedule, decisions.solver).moves
