"""Random modules on batches of random lengths: every step has eager's bits, within the budget, and most are planned by
their sizes."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb.devices.allocation_log import AllocationLog
from rockmate import BudgetTooSmall, Offload, Rockmate
from tests.module.models import WIDTH
from tests.module.random_modules import RandomModule
from tests.module.steps import CPU, FEW_ROUNDS, assert_same_step, squares

PER_ROW = 32  # of the batches: some functions want a multiple of 16 rows, in the last short one, too


class WithLengths(nn.Module):
    """A random module on sequences: within it, all rows are one; around it are functions of the length."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.rows = RandomModule(seed)
        self.mixing = nn.Linear(WIDTH, WIDTH)
        self.choice = rng.randrange(5)
        self.positions = nn.Embedding(64, WIDTH)
        self.limit = rng.choice([4, 12, 64])

    def forward(self, x):
        batch, length, _ = x.shape
        x = x + self.positions(torch.arange(length))
        x = self.rows(x.reshape(batch * length, WIDTH)).view(batch, length, WIDTH)
        if length > self.limit:
            x = torch.tanh(x)
        if self.choice == 0:
            x = x - x.mean(1, keepdim=True) * length**0.5
        elif self.choice == 1:
            x = (x @ x.transpose(1, 2)).softmax(-1) @ self.mixing(x) / x.shape[1]
        elif self.choice == 2:
            x = F.dropout(x, 0.2, self.training)[:, : length // 2 * 2].unflatten(1, (-1, 2)).sum(2)
        elif self.choice == 3:
            x = torch.cat([x[:, 1:], x.new_zeros(batch, 1, WIDTH)], 1).flip(1) * self.mixing(x)
        return F.pad(x, (0, 0, 0, 2)).cumsum(1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_steps_under_autocast_are_exact_and_within_the_budget(seed):
    with torch.autocast("cpu", torch.bfloat16):
        train_on_random_lengths(seed + 100)


@pytest.mark.parametrize("seed", range(48))
def test_steps_of_any_length_are_exact_and_within_the_budget(seed):
    train_on_random_lengths(seed)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.slow) for seed in range(24)])
def test_steps_that_move_data_are_exact_and_within_the_budget(seed, quick_disk, tmp_path):
    train_on_random_lengths(seed + 200, (0.6, 0.5, 0.4), offload=Offload("disk", str(tmp_path)))


def train_on_random_lengths(seed: int, budgets: Sequence[float] = (0.9, 0.7, 0.6), **options: Any) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = WithLengths(seed)
    eager = copy.deepcopy(model)
    budget = rng.choice(budgets)
    lengths = [rng.randint(24, 40), *(rng.randint(2, 40) for _ in range(10))]
    rows = [PER_ROW] * 10 + [PER_ROW // 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Rockmate(model, budget=budget, loss=squares, limits=FEW_ROUNDS, **options)
        for number, (length, batch) in enumerate(zip(lengths, rows, strict=True)):
            x = torch.randn(batch, length, WIDTH)
            try:
                assert_same_step(module, eager, x, number)
            except BudgetTooSmall:
                assert number == 0
                module.replan(1.0)
                eager = copy.deepcopy(module.original)  # the other one has counted a batch
                assert_same_step(module, eager, x, number)
        for length, batch in zip(lengths, rows, strict=True):
            x = torch.randn(batch, length, WIDTH)
            module.zero_grad()
            plans, fallbacks = len(module.plans), sum(record.calls for record in module.fallbacks)
            with AllocationLog(CPU) as log:
                squares(module(x)).backward()
            if len(module.plans) == plans and sum(record.calls for record in module.fallbacks) == fallbacks:
                assert log.peak_bytes <= module.plan.budget_bytes
