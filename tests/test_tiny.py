"""The whole system on a small network, in seconds: run this first when something is broken."""

import copy

import pytest
import torch
from torch import nn

from rk_solvers import check
from rockmate import PeakMemory, Rockmate, verify

ROWS, WIDTH = 256, 64


@pytest.fixture
def network() -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def test_a_network_trains_exactly_within_its_budget(network):
    sample, eager = torch.randn(ROWS, WIDTH), copy.deepcopy(network)
    model = Rockmate(network, sample, budget=0.6, loss=torch.mean)
    assert model.plan.recomputations > 0
    assert check(model._member.measured.problem, model.plan.schedule).peak_bytes == model.plan.peak_bytes

    results = []
    for module in (eager, model):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(module.parameters())
        for batch in torch.randn(3, ROWS, WIDTH):
            optimizer.zero_grad()
            module(batch).mean().backward()
            optimizer.step()
        results.append([*module.parameters(), *(p.grad for p in module.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *results))

    model.zero_grad()
    with PeakMemory() as memory:
        output = model(sample)
        output.mean().backward()
    assert memory.peak_bytes <= model.plan.budget_bytes < model.plan.baseline_peak_bytes


def test_verify_says_so_in_one_call(network):
    assert verify(network, torch.randn(ROWS, WIDTH), budget=0.6, loss=torch.mean).exact
