"""Families of calls that are traced by their operations: under autocast, and where a module reads out of its data."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rockmate import BudgetTooSmall, PeakMemory, Rockmate
from tests.families.test_lengths import WIDTH, Attention
from tests.module.steps import assert_same_step, squares

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.errors.ReplanWarning")


@pytest.mark.slow
def test_lengths_vary_under_autocast():
    model = Attention(positions=128).train()
    with torch.autocast("cpu", torch.bfloat16):
        planned = Rockmate(copy.deepcopy(model), torch.randn(2, 96, WIDTH), 0.7, loss=squares)
        for length in (61, 35, 80, 12):
            assert_same_step(planned, model, torch.randn(2, length, WIDTH))
    assert len(planned._family.members) == 1
    assert len(list(planned._family._by_size)) == 4


class Masked(nn.Module):
    """Skips a mask that hides nothing, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, given):
        x, mask = given
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if not mask.all():
            x = x * mask[..., None]
        return F.dropout(self.layers[0](x), 0.1, self.training)


def masked(length, is_whole):
    mask = torch.ones(2, length, dtype=torch.bool)
    if not is_whole:
        mask[1, length // 2 :] = False
    return torch.randn(2, length, WIDTH), mask


def test_each_branch_of_a_module_that_reads_its_data_is_a_family():
    model = Masked().train()
    with PeakMemory() as memory:
        squares(model(masked(96, False))).backward()
    planned = Rockmate(copy.deepcopy(model), (masked(96, False),), int(0.9 * memory.peak_bytes), loss=squares)
    with warnings.catch_warnings(action="ignore"):
        for length, is_whole in ((61, False), (35, False), (90, True), (61, True), (80, False), (80, True), (35, True)):
            assert_same_step(planned, model, masked(length, is_whole))
        before = len(planned._family.members)
        for length in (50, 44, 71):
            for is_whole in (False, True):
                assert_same_step(planned, model, masked(length, is_whole))
    assert len(planned._family.members) == before


class Halves(nn.Module):
    """Computes with its length what is no polynomial."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        half = x.shape[1] // 2
        return x[:, :half] * half


@pytest.mark.slow
def test_what_is_computed_otherwise_is_of_no_family():
    model = Halves().train()
    with torch.autocast("cpu", torch.bfloat16):
        planned = Rockmate(copy.deepcopy(model), torch.randn(2, 96, WIDTH), 0.9, loss=squares)
        for length in (64, 48, 32, 33):
            assert_same_step(planned, model, torch.randn(2, length, WIDTH))
    assert len(planned._family.members) == 5


class Normalised(nn.Module):
    """Batch normalisations, which save fewer tensors where they are repeated: running statistics move but once."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x):
        rows, length, _ = x.shape
        for layer in self.layers:
            x = layer(x.reshape(rows * length, WIDTH)).view(rows, length, WIDTH)
        return x


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_normalisations_are_repeated_in_the_first_step_of_a_size(precision):
    model = Normalised().train()
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        with pytest.raises(BudgetTooSmall) as refused:
            Rockmate(copy.deepcopy(model), torch.randn(16, 96, WIDTH), 1, loss=squares)
        planned = Rockmate(model, budget=int(1.05 * refused.value.smallest_budget_bytes), loss=squares)
        for length in (96, 61, 35, 90, 80):
            assert_same_step(planned, eager, torch.randn(16, length, WIDTH))
    assert len(planned._family.members) == 1
    sized = list(planned._family._by_size)
    again = {name for one in sized for names in one.plan.schedule.recomputed.values() for name in names}
    assert any("batch_norm" in name for name in again)
