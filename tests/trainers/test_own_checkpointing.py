"""A library's own checkpointing is told of and left out: the plan chooses what is recomputed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rockmate import BudgetTooSmall, CheckpointingWarning, PeakMemory, Rockmate
from rockmate.guards.checkpointing import OwnCheckpointing
from tests.module.models import built
from tests.module.steps import FEW_ROUNDS, assert_same_training, squares, train


class Checkpointed(nn.Module):
    """Blocks with a switch, as the libraries have it: an attribute of the class, set on the instance."""

    grad_checkpointing = False

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.grad_checkpointing else block(x)
        return x


@pytest.mark.ci
def test_a_module_that_checkpoints_is_planned_without_its_own_checkpointing():
    plain, model = built(Checkpointed), built(Checkpointed)
    model.grad_checkpointing = True
    x = torch.randn(32, 16)
    with pytest.warns(CheckpointingWarning, match=r"grad_checkpointing of '\(root\)'.*the plan chooses"):
        planned = Rockmate(model, x, 0.95, loss=squares)
    assert model.grad_checkpointing, "planning leaves the user's switch alone"
    assert planned.plan.baseline_peak_bytes == Rockmate(plain, x, 0.8, loss=squares).plan.baseline_peak_bytes
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert_same_training(train(planned, [x, x]), train(built(Checkpointed), [x, x]))


@pytest.mark.filterwarnings("ignore::rockmate.CheckpointingWarning")
@pytest.mark.parametrize("scope", ["step", "total"])
@pytest.mark.ci
def test_a_fraction_is_of_what_a_step_takes_now_with_the_checkpointing_that_is_on(scope):
    model, x = built(Checkpointed), torch.randn(64, 16)
    model.grad_checkpointing = True
    with PeakMemory() as memory:
        output = model(x)
        loss = squares(output)
        loss.backward()
    model.zero_grad()
    del output, loss
    plan = Rockmate(model, x, 0.95, loss=squares, scope=scope).plan
    assert plan.checkpointed_peak_bytes < 0.8 * plan.baseline_peak_bytes
    assert "with its own checkpointing)" in str(plan)
    if scope == "step":
        assert plan.checkpointed_peak_bytes == memory.peak_bytes
        assert plan.budget_bytes == round(0.95 * memory.peak_bytes)
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert model.grad_checkpointing
    assert (
        Rockmate(model, x, 1.0, loss=squares, scope=scope).plan.checkpointed_peak_bytes == plan.checkpointed_peak_bytes
    )


@pytest.mark.filterwarnings("ignore::rockmate.CheckpointingWarning")
@pytest.mark.ci
def test_a_refused_fraction_tells_what_it_is_of():
    model, x = built(Checkpointed), torch.randn(64, 16)
    with pytest.raises(BudgetTooSmall, match=r"0\.1 is of the \S+ KiB that the eager step takes\. Raise"):
        Rockmate(model, x, 0.1, loss=squares, limits=FEW_ROUNDS)
    model.grad_checkpointing = True
    told = r"'10%' is of the \S+ KiB that a step takes now, with its own checkpointing; without it, \S+ KiB\. Raise"
    with pytest.raises(BudgetTooSmall, match=told):
        Rockmate(model, x, "10%", loss=squares, limits=FEW_ROUNDS)


@pytest.mark.ci
def test_switches_are_put_back_where_they_were_also_after_errors():
    model = built(Checkpointed)
    own = OwnCheckpointing(model)
    with own.switched_off():
        assert not model.grad_checkpointing
    assert "grad_checkpointing" not in vars(model)
    model.grad_checkpointing = True
    with pytest.raises(ZeroDivisionError), own.switched_off():
        _ = 1 / model.grad_checkpointing
    assert model.grad_checkpointing


@pytest.mark.ci
def test_it_is_told_once_also_where_it_is_switched_on_after_planning():
    """Planned steps stay as they are: checkpointing changes no value, and there is nothing to plan again."""
    model, x = built(Checkpointed), torch.randn(32, 16)
    planned = Rockmate(model, x, 0.8, loss=squares)
    planned(x)
    planned.grad_checkpointing = True
    assert model.grad_checkpointing
    with pytest.warns(CheckpointingWarning):
        planned(x)
    planned(x)  # a second warning would be an error
    assert len(planned.plans) == 1
    assert OwnCheckpointing(model).news() is not None
