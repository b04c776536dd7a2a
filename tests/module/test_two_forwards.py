"""Forwards before the backward of another: a plan that is made between them takes nothing away from the first."""

import copy

import pytest
import torch
from torch import nn

from rockmate import Rockmate
from tests.module.steps import FEW_ROUNDS

WIDTH = 16
pytestmark = pytest.mark.filterwarnings("ignore::rockmate.errors.ReplanWarning")


class Towers(nn.Module):
    """Statistics that each forward writes, and a table that each backward reads."""

    def __init__(self, norm):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = norm()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = torch.tanh(self.norm(layer(x)) * self.table)
        return x


@pytest.mark.parametrize("solver", ["keep-all", "greedy"])
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(WIDTH), nn.Identity], ids=["statistics", "none"])
@pytest.mark.parametrize("shapes", ["eager", "plan"])
def test_sizes_that_come_before_the_first_backward_are_planned_meanwhile(shapes, norm, solver):
    model = Towers(norm)
    share = 1.0 if solver == "keep-all" else 0.9
    options = {} if shapes == "plan" else {"shapes": shapes}
    planned = Rockmate(model, torch.randn(64, WIDTH), share, solver=solver, limits=FEW_ROUNDS, **options)
    eager = copy.deepcopy(model)
    for rows in ((64, 48, 32), (32, 64, 40)):
        batches = [torch.randn(number, WIDTH) for number in rows]
        for module in (planned, eager):
            module.zero_grad()
            sum(module(batch).square().mean() for batch in batches).backward()
        assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in eager.parameters())))
        assert all(map(torch.equal, model.buffers(), eager.buffers()))


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(WIDTH), nn.Identity], ids=["statistics", "none"])
def test_so_is_a_module_around_which_eager_s_backward_is_to_come(norm):
    """Planned between a forward of the module itself and its backward."""
    model = Towers(norm)
    eager = copy.deepcopy(model)
    batch = torch.randn(64, WIDTH)
    first = model(batch)
    planned = Rockmate(model, torch.randn(64, WIDTH), 0.9, limits=FEW_ROUNDS)
    (first.square().mean() + planned(batch).square().mean()).backward()
    (eager(batch).square().mean() + eager(batch).square().mean()).backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in eager.parameters())))
    assert all(map(torch.equal, model.buffers(), eager.buffers()))


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_in_one_region_of_autocast_each_call_casts_its_weights(share):
    """Eager's calls share the casts, whose gradients it adds in the short type: planned ones add those of parameters.

    So they give what eager gives that casts in each call, to the bit.
    """
    torch.manual_seed(0)
    model = Towers(nn.Identity)
    with torch.autocast("cpu", torch.bfloat16):
        planned = Rockmate(model, torch.randn(64, WIDTH), share, limits=FEW_ROUNDS)
    eager = copy.deepcopy(model)
    batches = [torch.randn(64, WIDTH) for _ in range(2)]
    gradients = []
    for module, cache in ((planned, True), (eager, False), (eager, True)):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = sum(module(batch).square().mean() for batch in batches)
        loss.backward()
        gradients.append([p.grad for p in (model if module is planned else eager).parameters()])
    ours, each_call, shared = gradients
    assert all(map(torch.equal, ours, each_call))
    for gradient, rounded in zip(ours, shared, strict=True):
        # Two terms, each of which the short type rounds by 2^-8 of itself at most, and their sum once more.
        assert torch.allclose(gradient, rounded, rtol=2**-7, atol=2**-7 * gradient.abs().max().item())
