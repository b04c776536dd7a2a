"""Layers that are left out at random, or that draw numbers of Python or NumPy: each call goes the module's own way."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.module.habit_loops import seed_streams
from tests.module.steps import FEW_ROUNDS, planned_if_it_may

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


def step_of(model, forward, seed):
    """What a step leaves, and the random numbers that come next."""
    seed_streams(seed)
    model.zero_grad()
    output = forward(torch.randn(ROWS, WIDTH))
    output.square().mean().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return output.detach(), gradients, torch.rand(1), random.random(), np.random.rand()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("planned_at", [1, 2, 5])  # one, both or none of the layers is left out meanwhile
@pytest.mark.parametrize("reads", [False, True], ids=["straight", "reads"])
@pytest.mark.parametrize("first", [True, False], ids=["trained", "given"])
@pytest.mark.parametrize("drawn", [of_python, of_numpy], ids=["python", "numpy"])
@pytest.mark.parametrize("middle", [LeftOut, Scaled])
def test_steps_are_eager_s(middle, drawn, first, reads, planned_at, share):
    seed_streams(0)
    model = Stack(middle, drawn, first, reads)
    eager = copy.deepcopy(model)
    seed_streams(planned_at)
    planned = planned_if_it_may(model, torch.randn(ROWS, WIDTH), share, limits=FEW_ROUNDS)
    for seed in range(8):
        assert same(step_of(model, planned, seed), step_of(eager, eager, seed)), seed


def test_a_way_that_takes_no_gradient_is_the_module_s_own():
    """The input as it is: what comes next would save less, and no backward would come."""
    seed_streams(0)
    model = nn.Sequential(LeftOut(of_python), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    eager = copy.deepcopy(model)
    planned = planned_if_it_may(model, torch.randn(ROWS, WIDTH), 0.8, limits=FEW_ROUNDS)
    for seed in range(8):
        assert same(step_of(model, planned, seed), step_of(eager, eager, seed)), seed
