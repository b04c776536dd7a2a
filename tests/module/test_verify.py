"""`verify` finds what differs from eager training, and changes nothing."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from rockmate import BudgetTooSmall, Rockmate, SampleError, Verification, verify
from rockmate.runtime import Step
from tests.module.models import Layers, Normalised, TwoHeads, built, images, rows
from tests.module.steps import keep_nothing, recomputing, squares


@pytest.mark.parametrize(
    ("make", "sample"), [(Layers, rows()), (Normalised, images()), (TwoHeads, rows())], ids=lambda value: None
)
def test_a_planned_module_is_exact(make, sample):
    found = verify(built(make), sample, budget=0.8, loss=squares)
    assert found.exact
    assert found.first_difference is None
    assert found.largest_gradient_difference == 0.0
    assert found.eager_is_deterministic
    assert found.plan.recomputations > 0


def test_without_a_loss_the_backward_starts_from_every_output():
    assert verify(built(TwoHeads), rows(requires_grad=True), budget=0.8).exact


def test_a_planned_module_keeps_its_own_plan():
    model = recomputing(built(Layers), rows())
    found = verify(model, rows(), budget="not even read", loss=squares)
    assert found.exact
    assert found.plan is model.plan


def test_a_wrong_recomputation_is_found_and_named(monkeypatch):
    right = Step.fill
    monkeypatch.setattr(Step, "fill", lambda step, op, index, value: right(step, op, index, value * 1.5))
    found = verify(recomputing(built(Layers), rows()), rows(), loss=squares)
    assert not found.exact
    assert found.first_difference is not None
    assert found.first_difference.startswith("step 1: gradient of layers.0.weight differs by up to ")
    assert found.largest_gradient_difference > 0
    assert found.eager_is_deterministic
    assert "repeats itself exactly" in str(found)


def test_an_error_in_a_later_step_is_found(monkeypatch):
    """A random stream left elsewhere: the first step's gradients are right, but not what follows."""
    right = Rockmate.forward

    def forward(module, *args):
        output = right(module, *args)
        torch.rand(1)
        return output

    monkeypatch.setattr(Rockmate, "forward", forward)
    found = verify(built(Layers), rows(), budget=0.8, loss=squares)
    assert found.first_difference == "step 1: random stream 0 differs by up to " + found.first_difference.split()[-1]


class Fickle(nn.Module):
    """Differs from itself from call to call."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()
        self.register_buffer("counts", torch.zeros(()))

    def forward(self, hidden):
        return self.layers(hidden)


def test_eager_training_that_differs_from_itself_is_told_apart(monkeypatch):
    model = recomputing(built(Fickle), rows())
    plain = Fickle.forward

    def forward(module, hidden):
        Fickle.calls += 1
        return plain(module, hidden) * Fickle.calls

    monkeypatch.setattr(Fickle, "forward", forward)
    found = verify(model, rows(), loss=squares)
    assert not found.exact
    assert not found.eager_is_deterministic
    assert "eager training differs from itself, too" in str(found)


def test_nothing_of_the_user_changes():
    model, sample = built(Normalised), images().requires_grad_()
    squares(model(sample)).backward()
    state, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    input_gradient, values, stream = sample.grad.clone(), sample.detach().clone(), torch.get_rng_state()
    owners = [p.grad for p in model.parameters()]
    verify(model, sample, budget=0.8)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is owner for p, owner in zip(model.parameters(), owners, strict=True))
    assert all(map(torch.equal, owners, gradients))
    assert torch.equal(sample.grad, input_gradient)
    assert torch.equal(sample, values)
    assert torch.equal(torch.get_rng_state(), stream)


def test_the_streams_are_put_back_after_a_failure():
    stream = torch.get_rng_state()
    with pytest.raises(BudgetTooSmall):
        verify(built(Layers), rows(), budget=1)
    with pytest.raises(SampleError):
        verify(built(Layers), {"unknown": rows()})
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_model_in_eval_mode_is_verified_in_training_mode():
    model = built(Layers).eval()
    assert verify(model, rows(), budget=0.8).exact
    assert not model.training


def test_at_least_one_step_is_compared():
    with pytest.raises(ValueError, match="at least 1 step to compare, not 0"):
        verify(built(Layers), rows(), steps=0)


def test_the_result_prints_on_one_line_and_has_no_truth_value_of_its_own():
    found = verify(built(Layers), rows(), budget=0.8)
    assert "\n" not in str(found)
    assert str(found).startswith("exact under ")
    assert "__bool__" not in vars(Verification)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.exact = False


def test_keep_nothing_is_a_demanding_plan():
    """The plans of these tests recompute much: else they would say little."""
    model = recomputing(built(Layers), rows(), keep_nothing)
    assert model.plan.recomputations > 2 * len(model._measured.problem.forward)
