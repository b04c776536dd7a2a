"""`torch.func` and planned modules: a functional call is exact, transforms are refused."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap

from rockmate import TransformError
from tests.module.models import Layers, Smooth, Tied, built, rows, tokens
from tests.module.steps import assert_same, recomputing, squares
from tests.where import random_stream


def other_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Differentiable tensors in place of every parameter."""
    return {name: (parameter.detach() * 1.25).requires_grad_() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("make", "batch"), [(Layers, rows), (Tied, tokens)], ids=["dropout", "tied"])
def test_a_functional_call_is_exact_though_its_weights_are_gone_in_the_backward(make, batch):
    planned = recomputing(built(make), batch())
    weights, records = other_weights(planned), []
    for module in (copy.deepcopy(planned.original), planned):
        torch.manual_seed(0)
        output = functional_call(module, weights, (batch(1),))
        gradients = torch.autograd.grad(squares(output), list(weights.values()))
        records.append(dict(zip(["output", *weights], [output.detach(), *gradients], strict=True)))
        records[-1]["random stream"] = random_stream()
        assert all(parameter.grad is None for parameter in module.parameters())
    assert_same(records[1], records[0])


def test_two_functional_calls_with_other_weights_before_their_backwards_are_exact():
    planned = recomputing(built(Smooth), rows())
    sets = [{n: w.detach() * factor for n, w in planned.named_parameters()} for factor in (0.5, 2.0)]
    sets = [{name: weight.requires_grad_() for name, weight in weights.items()} for weights in sets]
    found = []
    for module in (copy.deepcopy(planned.original), planned):
        losses = [squares(functional_call(module, weights, (rows(1),))) for weights in sets]
        wanted = [weight for weights in sets for weight in weights.values()]
        found.append(dict(enumerate(torch.autograd.grad(losses[0] - losses[1], wanted))))
    assert_same(found[1], found[0])


def loss_of(module: nn.Module):
    batch = rows(1)
    return lambda weights: functional_call(module, weights, (batch,)).square().mean()


@pytest.mark.parametrize(
    "call",
    [
        lambda planned: grad(loss_of(planned))(dict(planned.named_parameters())),
        lambda planned: vmap(planned)(torch.stack([rows(1), rows(2)])),
        lambda planned: jvp(planned, (rows(1),), (rows(2),)),
        lambda planned: jacfwd(planned)(rows(1)),
        lambda planned: hessian(loss_of(planned))(dict(planned.named_parameters())),
    ],
    ids=["grad", "vmap", "jvp", "jacfwd", "hessian"],
)
def test_transforms_are_refused_with_what_to_do(call):
    planned = recomputing(built(Smooth), rows())
    with pytest.raises(TransformError, match=r"torch\.func .*Call model\.original there"):
        call(planned)


def test_tangents_are_refused_and_a_level_without_any_is_not():
    planned = recomputing(built(Smooth), rows())
    with forward_ad.dual_level():
        with pytest.raises(TransformError, match="forward-mode"):
            planned(forward_ad.make_dual(rows(1), rows(2)))
        assert torch.equal(planned(rows(1)), planned.original(rows(1)))


def test_transforms_of_the_original_and_in_eval_mode_work():
    planned = recomputing(built(Smooth), rows())
    weights = {name: parameter.detach() for name, parameter in planned.named_parameters()}
    expected = grad(loss_of(planned.original))(weights)
    planned.eval()
    assert_same(grad(loss_of(planned))(weights), expected)


def test_batched_gradients_are_exact():
    """`is_grads_batched` runs the backward under a transform, the forward not."""
    planned = recomputing(built(Smooth), rows())
    directions = torch.stack([rows(2), rows(3)])
    records = []
    for module in (copy.deepcopy(planned.original), planned):
        output, weights = module(rows(1)), dict(module.named_parameters())
        gradients = torch.autograd.grad(output, list(weights.values()), directions, is_grads_batched=True)
        records.append(dict(zip(weights, gradients, strict=True)))
    assert_same(records[1], records[0])
