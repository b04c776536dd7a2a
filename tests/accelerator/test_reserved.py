"""Budgets of what the allocator reserves, gaps between tensors included."""

import copy
import itertools

import pytest
import torch
from torch import nn

from rockmate import BudgetTooSmall, FragmentationWarning, Rockmate, zoo
from tests.module.steps import FEW_ROUNDS, assert_same_training, squares, train

pytestmark = pytest.mark.ci

ROWS, WIDTH, LAYERS = 2048, 256, 10
MIB = 1 << 20


class Widths(nn.Module):
    """Layers of many sizes, whose tensors leave gaps between others'."""

    def __init__(self):
        super().__init__()
        widths = [WIDTH + 96 * (place % 4) for place in range(LAYERS + 1)]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


@pytest.fixture
def batch(device):
    return torch.randn(ROWS, WIDTH).to(device)


@pytest.fixture
def model(device):
    torch.accelerator.memory.empty_cache()
    return Widths().to(device)


def reserved_by_steps(model, batch, steps=6):
    """Of each step the most that is reserved, above what was allocated before it."""
    memory, found = torch.accelerator.memory, []
    memory.empty_cache()
    for _ in range(steps):
        model.zero_grad()
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        squares(model(batch)).backward()
        found.append(memory.max_memory_reserved() - before)
    return found


@pytest.mark.parametrize("budget", [0.9, 0.75, 0.6])
def test_steps_reserve_no_more_than_the_budget(model, batch, budget):
    eager = copy.deepcopy(model)
    eager_bytes = max(reserved_by_steps(eager, batch))
    eager.zero_grad()
    planned = Rockmate(model, batch, budget, loss=squares, limits=FEW_ROUNDS, scope="reserved")
    plan = planned.plan
    assert plan.budget_bytes == pytest.approx(budget * eager_bytes, abs=budget * 22 * MIB)  # two segments
    assert plan.measured_peak_bytes <= plan.measured_reserved_bytes <= plan.budget_bytes
    assert max(reserved_by_steps(planned, batch)) <= plan.budget_bytes
    assert max(reserved_by_steps(planned, batch)) == pytest.approx(plan.measured_reserved_bytes, rel=0.01)
    batches = [batch, batch + 1]
    for one in (model, eager):
        one.zero_grad()
    assert_same_training(train(model, batches, forward=planned), train(eager, batches))


def test_what_gaps_take_is_left_out_of_tensors(model, batch, extension):
    with pytest.warns(FragmentationWarning, match='scope="reserved"'):
        by_step = Rockmate(copy.deepcopy(model), batch, 0.7, loss=squares, limits=FEW_ROUNDS).plan
    asked = {"loss": squares, "limits": FEW_ROUNDS, "scope": "reserved"}
    plan = Rockmate(copy.deepcopy(model), batch, by_step.budget_bytes, **asked).plan
    assert plan.bounds_reserved
    assert plan.peak_bytes < by_step.peak_bytes or by_step.measured_reserved_bytes <= by_step.budget_bytes
    assert plan.measured_reserved_bytes <= plan.budget_bytes
    extension.never_merge(True)  # blocks that were split stay so: gaps that no plan leaves room for
    with pytest.raises(BudgetTooSmall):
        Rockmate(copy.deepcopy(model), batch, by_step.budget_bytes, **asked)


def test_eager_s_own_share_is_its_step(model, batch):
    plan = Rockmate(model, batch, 1.0, loss=squares, limits=FEW_ROUNDS, scope="reserved").plan
    assert plan.recomputations == 0
    assert plan.measured_reserved_bytes <= plan.budget_bytes


def test_too_little_is_refused_with_what_would_do(device):
    entry = zoo.get("gpt2-tiny", device=device)
    with pytest.raises(BudgetTooSmall) as refusal:
        Rockmate(entry.model, entry.sample, "1 MiB", loss=entry.loss, scope="reserved")
    enough = refusal.value.smallest_budget_bytes
    assert enough > MIB
    plan = Rockmate(entry.model, entry.sample, enough, loss=entry.loss, scope="reserved").plan
    assert plan.measured_reserved_bytes <= enough


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_other_sizes_are_planned_and_measured_one_by_one(model, batch):
    planned = Rockmate(copy.deepcopy(model), budget="64 MiB", loss=squares, limits=FEW_ROUNDS, scope="reserved")
    for rows in (ROWS, 1800, 1500, 1200, 1000):
        planned.zero_grad()
        squares(planned(batch[:rows].contiguous())).backward()
    assert len(planned.plans) == 5
    assert all(plan.measured_reserved_bytes <= plan.budget_bytes for plan in planned.plans)


def test_a_plan_file_keeps_what_the_budget_is_of(model, batch, tmp_path):
    planned = Rockmate(copy.deepcopy(model), batch, 0.75, loss=squares, limits=FEW_ROUNDS, scope="reserved")
    planned.save_plan(tmp_path / "plan.json")
    again = Rockmate(copy.deepcopy(model), batch, plan=tmp_path / "plan.json", loss=squares)
    assert again.plan.bounds_reserved
    assert again.plan.schedule == planned.plan.schedule
    assert "reserved memory" in planned.report(tmp_path / "report.html").read_text()
