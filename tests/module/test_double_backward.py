"""A backward through a planned step whose graph is kept: exact, and told where the budget does not count it."""

import warnings

import pytest
import torch
from torch import nn

from rockmate import DoubleBackwardWarning, Rockmate
from rockmate.memory.peak import PeakMemory
from tests.module.models import Smooth, built, rows
from tests.module.steps import FEW_ROUNDS, keep_every_other, recomputing, squares


def penalised(module, batch):
    """A step with a penalty on its gradients."""
    gradients = torch.autograd.grad(squares(module(batch)), list(module.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()


def twice(module, batch):
    """A step with two backwards through one graph."""
    loss = squares(module(batch))
    loss.backward(retain_graph=True)
    loss.backward()


def told_by(run):
    """Warnings of double backwards in `run`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [warning for warning in caught if warning.category is DoubleBackwardWarning]


def peak_bytes(step, module):
    """Most bytes of a step that is not the first."""
    for _ in range(2):
        module.zero_grad()
        with PeakMemory(torch.device("cpu")) as memory:
            step(module, rows(1))
    return memory.peak_bytes


def test_a_double_backward_that_exceeds_the_budget_warns_once_at_the_users_line():
    model = recomputing(built(Smooth), rows())
    (told,) = told_by(lambda: [penalised(model, rows(1)) for _ in range(2)])
    assert told.filename == __file__
    assert "create_graph=True goes through Smooth" in str(told.message)
    assert "take the inner gradient in forward" in str(told.message)
    assert peak_bytes(penalised, model) > peak_bytes(lambda *given: squares(given[0](given[1])).backward(), model)


@pytest.mark.ci
def test_loss_backward_with_create_graph_warns_too_and_plans_of_other_shapes_do_not_warn_again():
    model = recomputing(built(Smooth), rows(), keep_every_other)
    model._family.shapes = "replan"

    def steps():
        for batch in (rows(1), rows(1)[:256]):
            squares(model(batch)).backward(create_graph=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*create_graph=True will create a reference cycle")
        assert len(told_by(steps)) == 1
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.ci
def test_nothing_is_told_where_the_plan_recomputes_nothing_or_no_graph_is_wanted():
    kept = Rockmate(built(Smooth), rows(), 1.0, loss=squares, cache=False)
    assert kept.plan.recomputations == 0
    assert not told_by(lambda: penalised(kept, rows(1)))
    model = recomputing(built(Smooth), rows())
    assert not told_by(lambda: twice(model, rows(1)))
    with torch.enable_grad():
        assert not told_by(lambda: squares(model(rows(1))).backward())


def test_a_look_at_a_saved_tensor_is_no_double_backward():
    model = recomputing(built(Smooth), rows())

    def look():
        node = model(rows(1)).grad_fn
        assert torch.is_tensor(node._saved_self)

    assert not told_by(look)


class WithPenalty(nn.Module):
    """The inner gradient in forward, as the warning advises."""

    def __init__(self):
        super().__init__()
        self.body = built(Smooth)

    def forward(self, x):
        output = self.body(x)
        (gradient,) = torch.autograd.grad(output.square().mean(), self.body.layers[0].weight, create_graph=True)
        return output.square().mean() + gradient.square().sum()


@pytest.mark.ci
@pytest.mark.slow
def test_what_the_warning_advises_is_planned_within_its_budget_and_exact():
    model, expected = WithPenalty(), WithPenalty()
    planned = Rockmate(model, rows(), 0.9, cache=False, limits=FEW_ROUNDS)
    assert planned.plan.recomputations > 0
    assert not told_by(lambda: planned(rows(1)).backward())
    expected(rows(1)).backward()
    for one, other in zip(planned.parameters(), expected.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)


def test_two_backwards_of_one_graph_are_exact_and_hold_what_came_back():
    model, expected = recomputing(built(Smooth), rows()), built(Smooth)
    for module in (model, expected):
        twice(module, rows(1))
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    # What docs/memory.md says: the first backward's recomputed tensors stay for the second, above an ordinary step.
    assert peak_bytes(twice, model) > peak_bytes(lambda *given: squares(given[0](given[1])).backward(), model)
