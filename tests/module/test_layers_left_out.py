"""Layers that are left out at random, or that draw numbers of Python or NumPy: each call goes the module's own way."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from rockmate import BudgetTooSmall, Rockmate
from tests.module.steps import FEW_ROUNDS

WIDTH, ROWS = 32, 128
pytestmark = [
    pytest.mark.filterwarnings("ignore::rockmate.errors.ReplanWarning"),
    pytest.mark.filterwarnings("ignore::rkgb.errors.TraceWarning"),
]


class LeftOut(nn.Module):
    """Its input itself, or what its layer makes of it."""

    def __init__(self, drawn):
        super().__init__()
        self.layer, self.drawn = nn.Linear(WIDTH, WIDTH), drawn

    def forward(self, h):
        found = torch.tanh(self.layer(h))
        return h if self.drawn() < 0.5 else found


class Scaled(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        self.drawn = drawn

    def forward(self, h):
        return h * self.drawn()


def of_python():
    return random.random()


def of_numpy():
    return float(np.random.rand())


class Stack(nn.Module):
    """With what each layer is given added to what the last one makes; perhaps data decide on the way in the end."""

    def __init__(self, middle, drawn, first, reads):
        super().__init__()
        self.middle = nn.ModuleList([middle(drawn), nn.Linear(WIDTH, WIDTH), middle(drawn)])
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.last, self.reads = nn.Linear(WIDTH, WIDTH), reads

    def forward(self, x):
        h, kept = self.first(x), []
        for layer in self.middle:
            kept.append(h)
            h = layer(h)
        h = self.last(h + 0.5 * kept[-1]) * torch.sigmoid(kept[0])
        return h.sin() if self.reads and h.sum() > 0 else h


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def steps(model, forward, seeds):
    found = []
    for seed in seeds:
        seed_all(seed)
        model.zero_grad()
        batch = torch.randn(ROWS, WIDTH)
        output = forward(batch)
        output.square().mean().backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        found.append((output.detach(), gradients, torch.rand(1), random.random(), np.random.rand()))
    return found


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    return one == other


def within(model, share):
    """Under this share of a step, or the smallest that there is a plan for."""
    sample = torch.randn(ROWS, WIDTH)
    try:
        return Rockmate(model, sample, share, limits=FEW_ROUNDS)
    except BudgetTooSmall as error:
        return Rockmate(model, sample, error.smallest_budget_bytes, limits=FEW_ROUNDS)


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("planned_at", [1, 2, 5])  # one, both or none of the layers is left out meanwhile
@pytest.mark.parametrize("reads", [False, True], ids=["straight", "reads"])
@pytest.mark.parametrize("first", [True, False], ids=["trained", "given"])
@pytest.mark.parametrize("drawn", [of_python, of_numpy], ids=["python", "numpy"])
@pytest.mark.parametrize("middle", [LeftOut, Scaled])
def test_steps_are_eager_s(middle, drawn, first, reads, planned_at, share):
    seed_all(0)
    model = Stack(middle, drawn, first, reads)
    eager = copy.deepcopy(model)
    seed_all(planned_at)
    planned = within(model, share)
    for seed in range(8):
        assert all(map(same, steps(model, planned, [seed]), steps(eager, eager, [seed]))), seed


def test_a_way_that_takes_no_gradient_is_the_module_s_own():
    """The input as it is: what comes next would save less, and no backward would come."""
    seed_all(0)
    model = nn.Sequential(LeftOut(of_python), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    eager = copy.deepcopy(model)
    planned = within(model, 0.8)
    for seed in range(8):
        assert all(map(same, steps(model, planned, [seed]), steps(eager, eager, [seed]))), seed
