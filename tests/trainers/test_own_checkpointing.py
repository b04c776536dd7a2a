"""A library's own checkpointing is told of and left out: the plan chooses what is recomputed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rockmate import CheckpointingWarning, Rockmate
from rockmate.running.checkpointing import OwnCheckpointing
from tests.module.models import built
from tests.module.steps import assert_same_training, squares, train


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


def test_a_module_that_checkpoints_is_planned_without_its_own_checkpointing():
    plain, model = built(Checkpointed), built(Checkpointed)
    model.grad_checkpointing = True
    x = torch.randn(32, 16)
    with pytest.warns(CheckpointingWarning, match=r"grad_checkpointing of '\(root\)'.*the plan chooses"):
        planned = Rockmate(model, x, 0.8, loss=squares)
    assert model.grad_checkpointing, "planning leaves the user's switch alone"
    # A fraction is of the peak without checkpointing.
    assert planned.plan.baseline_peak_bytes == Rockmate(plain, x, 0.8, loss=squares).plan.baseline_peak_bytes
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert_same_training(train(planned, [x, x]), train(built(Checkpointed), [x, x]))


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
