"""Chains of hundreds of operations and more: planned near the best there is, within the budget, and exact."""

import pytest
import torch
from torch import nn

from rockmate import Rockmate
from tests.module.steps import assert_trains_exactly, squares

MOST_BYTES = 2 << 30  # that planning may take, the process aside not counted


def chain_of(operations: int) -> nn.Module:
    torch.manual_seed(0)
    pairs = [layer for _ in range(operations // 2) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*pairs)


@pytest.mark.parametrize(
    ("operations", "share"),
    [
        (100, 0.5),
        (100, 0.2),
        pytest.param(400, 0.5, marks=pytest.mark.slow),
        pytest.param(400, 0.2, marks=pytest.mark.slow),
        pytest.param(1000, 0.5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.ci
def test_a_long_chain_is_planned_near_the_best_and_trains_exactly(operations, share):
    sample = torch.randn(512, 16)
    planned = Rockmate(chain_of(operations), sample, share, loss=squares, cache=False)
    plan = planned.plan
    assert plan.recomputations > 0
    assert plan.gap is not None
    assert plan.gap <= 0.02
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.planning_peak_bytes is not None
    assert plan.planning_peak_bytes <= MOST_BYTES
    assert_trains_exactly(planned, [sample, torch.randn(512, 16)])
