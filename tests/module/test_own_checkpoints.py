"""Checkpoints of a model's own, and what happens to a step between its forward and its end."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rkgb import TraceWarning
from rockmate import BudgetTooSmall, Rockmate, verify
from rockmate.memory.split import gradients_made
from tests.module.steps import FEW_ROUNDS


class Layers(nn.Module):
    def __init__(self, run=lambda part, x: part(x), dropout=0.5):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)
        self.run, self.dropout = run, dropout

    def part(self, x):
        return self.second(F.dropout(torch.tanh(self.first(x)), self.dropout))

    def forward(self, x):
        return self.last(self.run(self.part, x))


def without_numbers(reentrant):
    return lambda part, x: checkpoint(part, x, use_reentrant=reentrant, preserve_rng_state=False)


def decorated(part, x):
    """As a decorator with its arguments makes it, from PyTorch 2.14 on."""
    return checkpoint(use_reentrant=False, preserve_rng_state=False)(part)(x)


class Again(torch.autograd.Function):
    """A checkpoint as people write it: it does not restore random numbers either."""

    @staticmethod
    def forward(ctx, part, x, *parameters):
        ctx.part, ctx.parameters = part, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.part(x)
        found = torch.autograd.grad(output, (x, *ctx.parameters), gradient, allow_unused=True)
        return (None, *found)


OTHER_NUMBERS = {
    "False": without_numbers(False),
    "True": without_numbers(True),
    "decorated": pytest.param(
        decorated,
        marks=pytest.mark.skipif(
            inspect.signature(checkpoint).parameters["function"].default is inspect.Parameter.empty,
            reason="checkpoint is no decorator in PyTorch before 2.14: it takes the function first",
        ),
    ),
}


@pytest.mark.parametrize("run", OTHER_NUMBERS.values(), ids=OTHER_NUMBERS)
def test_other_random_numbers_in_a_checkpoint_are_told_by_planning_and_by_verify(run):
    model, sample = Layers(run), torch.randn(64, 16, requires_grad=True)
    with pytest.warns(TraceWarning, match=r"checkpoint at test_own_checkpoints.py.* does not restore random numbers"):
        result = verify(model, sample, 1 << 24)
    assert not result.exact
    assert result.eager_is_deterministic
    assert "preserve_rng_state=False" in str(result.own_checkpoint)
    assert "That is all the difference: the checkpoint" in str(result)


def test_where_a_checkpoint_draws_nothing_or_restores_it_there_is_nothing_to_tell():
    sample = torch.randn(64, 16, requires_grad=True)
    assert verify(Layers(without_numbers(False), dropout=0.0), sample, 1 << 24).exact
    restoring = Layers(lambda part, x: checkpoint(part, x, use_reentrant=False))
    assert verify(restoring, sample, 1 << 24).exact


def test_a_checkpoint_of_ones_own_is_one_operation_and_draws_what_it_draws():
    class Own(Layers):
        def forward(self, x):
            held = (*self.first.parameters(), *self.second.parameters())
            return self.last(Again.apply(self.part, x, *held))

    result = verify(Own(), torch.randn(64, 16, requires_grad=True), 1 << 24)
    assert result.exact or result.own_checkpoint, result


class Strict(Again):
    """The same, which believes that its backward meets the parameters that it was given."""

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.part(x)
        return (None, *torch.autograd.grad(output, (x, *ctx.parameters), gradient))


class StrictBody(Layers):
    def forward(self, x):
        return Strict.apply(self.part, x, *self.first.parameters(), *self.second.parameters())


class StrictLayers(Layers):
    def forward(self, x):
        return self.last(torch.tanh(Strict.apply(self.part, x, *self.first.parameters(), *self.second.parameters())))


class Around(nn.Module):
    """A checkpoint of one's own within a submodule."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = StrictBody(dropout=0.0), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(x)))


def test_a_checkpoint_of_ones_own_that_asks_for_gradients_of_its_parameters_is_measured_with_them():
    model, sample = StrictLayers(dropout=0.0), torch.randn(64, 16, requires_grad=True)
    held = dict(model.named_parameters())
    result = verify(model, sample, 1 << 24)
    assert result.exact, result
    assert all(held[name] is parameter and parameter.grad is None for name, parameter in model.named_parameters())
    planned = Rockmate(model, sample, 1.0, cache=False)
    made = gradients_made(planned._member.measured.graphs)
    assert sorted(made.values()) == sorted(parameter.nbytes for parameter in model.parameters())


def test_a_checkpoint_of_ones_own_may_be_in_an_opaque_submodule():
    model, sample = Around(), torch.randn(64, 16, requires_grad=True)
    assert verify(model, sample, 1 << 24).exact
    planned = Rockmate(model, sample, 1 << 24, opaque=model.inner, cache=False)
    expected = copy.deepcopy(model)
    for module in (planned, expected):
        module(sample).square().mean().backward()
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (one.grad is None and name.startswith("inner.last")) or torch.equal(one.grad, other.grad)


def least(model, sample):
    with pytest.raises(BudgetTooSmall) as caught:
        Rockmate(model, sample, 1, cache=False, limits=FEW_ROUNDS)
    return caught.value.smallest_budget_bytes


@pytest.mark.filterwarnings("ignore::rockmate.errors.DoubleBackwardWarning")
def test_a_second_backward_through_a_planned_step_is_eagers():
    sample, found = torch.randn(64, 16), []
    planned = Rockmate(Layers(), sample, least(Layers(), sample), cache=False, limits=FEW_ROUNDS)
    assert planned.plan.recomputations
    for model in (Layers(), planned):
        torch.manual_seed(3)
        first = torch.autograd.grad(model(sample).square().mean(), list(model.parameters()), create_graph=True)
        sum(one.square().sum() for one in first).backward()
        found.append([*first, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_a_weight_written_through_data_between_forward_and_backward_is_read_as_it_is_then():
    sample, found = torch.randn(64, 16), []
    for keep in (True, False):
        model = Layers()
        planned = model if keep else Rockmate(model, sample, 1 << 24, cache=False)
        torch.manual_seed(3)
        loss = planned(sample).square().mean()
        model.second.weight.data.mul_(0.5)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))
