"""Operations that write in place, and save a copy of what they write over, are repeated like all others."""

import pytest
import torch
from torch import nn

from rkgb.restore.as_saved import as_nonleaf
from rkgb.restore.kept import never_forgotten
from rockmate import BudgetTooSmall, Rockmate
from tests.module.steps import (
    assert_trains_exactly,
    following,
    keep_every_other,
    keep_nothing,
    measured_for,
    peak_of_step,
    squares,
)

ACTIVATIONS = {
    "relu6": nn.ReLU6(inplace=True),
    "silu": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "mish": nn.Mish(inplace=True),
    "threshold": nn.Threshold(0.1, 0.2, inplace=True),
    "rrelu": nn.RReLU(inplace=True),
    "two in a row": nn.Sequential(nn.Hardtanh(inplace=True), nn.SiLU(inplace=True)),
}


def network(activation):
    """What mobile networks are made of: convolution, normalisation, and an activation in place."""
    layers = []
    for _ in range(4):
        layers += [nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), activation]
    return nn.Sequential(*layers)


def images():
    return torch.randn(4, 6, 12, 12)


class Gated(nn.Module):
    """Multiplies in place, whole values and parts of them, and a value without a gradient by one with."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            gate = layer(x).sigmoid()
            y = x + 1
            y.mul_(gate)
            y[:, :3].mul_(gate[:, 3:].tanh())
            noise = torch.zeros_like(gate)
            noise[:, 1:].add_(1).mul_(gate[:, 1:])
            mask = torch.ones_like(gate).mul_(gate).mul_(gate.square())
            x = x + torch.sin(y) * mask + noise.square()
        return x


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_place_are_repeated(name, plan_of):
    torch.manual_seed(0)
    model = network(ACTIVATIONS[name])
    costs = measured_for(model, images())
    assert not never_forgotten(costs.graphs.K_graph)
    module = following(costs, model, plan_of(costs))
    assert "as_nonleaf(batch_norm" in module.code
    assert_trains_exactly(module, [images() for _ in range(3)])


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
def test_products_in_place_are_repeated(plan_of):
    torch.manual_seed(0)
    model = Gated()
    costs = measured_for(model, images())
    assert not never_forgotten(costs.graphs.K_graph)
    module = following(costs, model, plan_of(costs))
    assert "as_nonleaf(" in module.code
    assert_trains_exactly(module, [images() for _ in range(3)])


@pytest.mark.ci
def test_such_a_network_fits_budgets_as_small_as_one_that_writes_nothing_in_place():
    smallest_bytes = {}
    for inplace in (True, False):
        torch.manual_seed(0)
        model = network(nn.ReLU6(inplace=inplace))
        with pytest.raises(BudgetTooSmall) as caught:
            Rockmate(model, images(), 1, loss=squares, cache=False)
        smallest_bytes[inplace] = caught.value.smallest_budget_bytes
        module = Rockmate(model, images(), smallest_bytes[inplace], loss=squares, cache=False)
        assert peak_of_step(module, (images(),)) <= smallest_bytes[inplace]
        assert_trains_exactly(module, [images() for _ in range(2)])
    assert smallest_bytes[True] <= smallest_bytes[False]


@pytest.mark.parametrize("shaped", [lambda x: x, lambda x: x[1:], lambda x: x.t()], ids=["whole", "part", "turned"])
def test_a_as_nonleaf_tensor_is_one_that_autograd_has_computed(shaped):
    value = shaped(torch.randn(4, 6))
    expected = torch.relu(value)
    version = value._version
    with torch.enable_grad():
        given = as_nonleaf(value)
        torch.relu_(given)
    assert given.requires_grad
    assert not value.requires_grad
    assert torch.equal(value, expected)
    assert value._version > version
    assert (given.data_ptr(), given.stride()) == (value.data_ptr(), value.stride())
