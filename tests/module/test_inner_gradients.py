"""A forward that takes gradients inside: forces of an energy, residuals of differential equations, penalties."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import TraceError
from rockmate import BudgetTooSmall, Rockmate, verify
from tests.module.steps import FEW_ROUNDS

grad = torch.autograd.grad


class Net(nn.Module):
    def __init__(self, inputs=3, width=32, norm=False, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, 1)
        self.act = torch.tanh

    def energy(self, x):
        for layer in self.layers:
            x = self.dropout(self.norm(self.act(layer(x))))
        return self.last(x)


class Forces(Net):
    """Energies and their negative gradients at the positions."""

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        energy = self.energy(x)
        return energy, -grad(energy.sum(), x, create_graph=True)[0]


class Residual(Net):
    """A residual of second order, as networks for differential equations have."""

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        u = self.energy(x)
        first = grad(u, x, torch.ones_like(u), create_graph=True)[0]
        second = grad(first[:, :1].sum(), x, create_graph=True)[0]
        return u, first[:, 1:2] - 0.1 * second[:, :1]


class Pairs(Net):
    """Energies of pairs of atoms, whose positions an index gathers."""

    def __init__(self):
        super().__init__(1)
        self.act = F.silu

    def forward(self, x, edges):
        x = x.detach().requires_grad_(True)
        distance = (x[edges[0]] - x[edges[1]]).square().sum(-1, keepdim=True).add(1e-3).sqrt()
        energy = torch.zeros(len(x), 1).index_add(0, edges[0], self.energy(distance))
        return energy.sum(), -grad(energy.sum(), x, create_graph=True)[0]


class Penalty(Net):
    """A penalty on the gradient of a hidden value; the input is one, too."""

    def forward(self, x):
        h = self.act(self.layers[0](x))
        score = self.last(self.act(self.layers[1](h)))
        return score, (grad(score.sum(), h, create_graph=True)[0].norm(dim=-1) - 1).square().mean()


class FirstOrder(Net):
    """A gradient that is a feature: nothing goes back through it."""

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        feature = grad(self.energy(x).sum(), x)[0]
        return self.energy(x.detach() + feature)


class Inside(nn.Module):
    """A module with such a part, among others."""

    def __init__(self):
        super().__init__()
        self.part, self.after = Forces(), nn.Sequential(nn.Linear(3, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        energy, force = self.part(x)
        return self.after(force) + energy


EDGES = torch.stack([torch.arange(64) % 16, (torch.arange(64) * 7 + 3) % 16])
X = (64, 3)
CASES = {
    "forces": (Forces, lambda: (torch.randn(X),)),
    "forces with a norm": (lambda: Forces(norm=True), lambda: (torch.randn(X),)),
    "forces with dropout": (lambda: Forces(dropout=0.3), lambda: (torch.randn(X),)),
    "residual": (Residual, lambda: (torch.randn(X),)),
    "pairs": (Pairs, lambda: (torch.randn(16, 3), EDGES)),
    "penalty": (Penalty, lambda: (torch.randn(X),)),
    "penalty at an input with a gradient": (Penalty, lambda: (torch.randn(X).requires_grad_(),)),
    "first order": (FirstOrder, lambda: (torch.randn(X),)),
    "inside": (Inside, lambda: (torch.randn(X),)),
}


QUICK = ("forces with a norm", "pairs")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.ci
def test_gradients_taken_inside_are_planned_and_exact(name):
    build, sample = CASES[name]
    torch.manual_seed(1)
    arguments = sample()
    with pytest.raises(BudgetTooSmall) as caught:
        Rockmate(build(), arguments, 1, cache=False, limits=FEW_ROUNDS)
    budget = caught.value.smallest_budget_bytes
    result = verify(Rockmate(build(), arguments, budget, cache=False, limits=FEW_ROUNDS), arguments)
    assert result.exact, result
    assert result.plan.recomputations


@pytest.mark.ci
@pytest.mark.slow
def test_an_input_that_forward_lets_require_a_gradient_is_told_as_the_cause():
    class Within(Forces):
        def forward(self, x):
            x.requires_grad_(True)
            energy = self.energy(x)
            return energy, -grad(energy.sum(), x, create_graph=True)[0]

    sample = torch.randn(X)
    with pytest.raises(TraceError, match=r"input 0 .* require a gradient.*before the call"):
        Rockmate(Within(), sample, 1 << 24, cache=False)
    assert not sample.requires_grad
    assert sample.grad is None
    assert verify(Within(), sample.requires_grad_(), 1 << 24).exact
