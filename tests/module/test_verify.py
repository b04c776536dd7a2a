"""`verify` finds what differs from eager training, and changes nothing."""

import copy
import dataclasses
import functools
import operator
import sys
import threading

import pytest
import torch
from torch import nn

from rkgb.state.attributes import Writing
from rockmate import BudgetTooSmall, Rockmate, SampleError, Verification, verify
from rockmate.queries.verification import OPTIMIZERS
from rockmate.runtime.step import Step
from tests.module.models import WIDTH, Layers, Normalised, TwoHeads, built, images, rows
from tests.module.steps import keep_nothing, recomputing, squares
from tests.where import CPU, here, placed, random_stream


@pytest.mark.parametrize(
    ("make", "batch"), [(Layers, rows), (Normalised, images), (TwoHeads, rows)], ids=lambda value: None
)
def test_a_planned_module_is_exact(make, batch):
    found = verify(built(make), batch(), budget=0.8, loss=squares)
    assert found.exact
    assert found.first_difference is None
    assert found.largest_gradient_difference == 0.0
    assert found.eager_is_deterministic
    assert found.plan.recomputations > 0


def test_without_a_loss_the_backward_starts_from_every_output():
    assert verify(built(TwoHeads), rows(requires_grad=True), budget=0.8).exact


class Placed(nn.Module):
    """Adds positions that it holds as a plain tensor, as some libraries do: a copy of it has another one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.positions = torch.linspace(0, 1, WIDTH, device=here())

    def forward(self, x):
        return self.layers(x + self.positions)


def test_a_planned_module_that_holds_plain_tensors_is_verified():
    model = Rockmate(built(Placed), rows(), 0.9, loss=squares)
    assert verify(model, rows(), loss=squares).exact


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


def test_the_operation_that_is_recomputed_wrongly_is_named_with_its_source(monkeypatch):
    """Of all recomputed tensors one is wrong: what GELU reads, which the second layer computes."""
    right = Step.fill

    def fill(step, op, index, value):
        right(step, op, index, value + 1 if op == "gelu_1" else value)

    monkeypatch.setattr(Step, "fill", fill)
    found = verify(recomputing(built(Layers), rows()), rows(), loss=squares)
    assert found.where is not None
    assert found.where.startswith("%linear_1 (layers.1 models.py:")
    assert found.where.endswith("recomputed with other bits than the forward's for the backward of %gelu_1")
    assert found.where in str(found)


def test_a_forward_that_differs_is_placed_too(monkeypatch):
    """The module computes something else than when it was planned: the graph still holds what it was."""
    model = recomputing(built(Layers), rows())
    monkeypatch.setattr(torch.nn.functional, "gelu", torch.relu)
    found = verify(model, rows(), loss=squares)
    assert found.first_difference.startswith("step 1: output 0 differs by up to ")
    assert found.where.startswith("%gelu_0 ((root) models.py:")


def test_an_error_in_a_later_step_is_found(monkeypatch):
    """A random stream left elsewhere: the first step's gradients are right, but not what follows."""
    right = Rockmate.forward

    def forward(module, *args):
        output = right(module, *args)
        torch.rand(1, device=here())
        return output

    monkeypatch.setattr(Rockmate, "forward", forward)
    found = verify(built(Layers), rows(), budget=0.8, loss=squares)
    stream = 0 if here() == CPU else 1
    size = found.first_difference.split()[-1]
    assert found.first_difference == f"step 1: random stream {stream} differs by up to {size}"


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
    assert found.eager_difference.startswith("step 1: output 0 differs by up to ")
    assert found.where is None
    assert f"eager training differs from itself, too: {found.eager_difference}" in str(found)


def test_nothing_of_the_user_changes():
    model, sample = built(Normalised), images().requires_grad_()
    squares(model(sample)).backward()
    state, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    input_gradient, values, stream = sample.grad.clone(), sample.detach().clone(), random_stream()
    owners = [p.grad for p in model.parameters()]
    verify(model, sample, budget=0.8)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is owner for p, owner in zip(model.parameters(), owners, strict=True))
    assert all(map(torch.equal, owners, gradients))
    assert torch.equal(sample.grad, input_gradient)
    assert torch.equal(sample, values)
    assert torch.equal(random_stream(), stream)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_model_whose_attributes_are_results_of_its_last_forward_is_verified(wrap):
    """`copy.deepcopy` refuses it."""
    model = placed(nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model(rows())
    weight, state = model[0].weight, copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)
    for module in (model, recomputing(model, rows())):
        assert verify(module, rows(), budget=0.8, loss=squares).exact
    assert model[0].weight is weight
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_model_that_cannot_be_copied_is_verified():
    model = built(Layers)
    model.lock = threading.Lock()
    assert verify(model, rows(), budget=0.8).exact


class Held(nn.Module):
    """Calls a part of itself through something that no copy of the module would copy."""

    def __init__(self, hold):
        super().__init__()
        self.layers = built(Layers)
        self.hold = hold(self.layers)

    def forward(self, x):
        return self.hold(x)


class Shared:
    """Its copy holds the same part."""

    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return self.part(x)

    def __deepcopy__(self, memo):
        return Shared(self.part)


HOLDING = {
    "closure": lambda part: lambda x: part(x),
    "partial": lambda part: functools.partial(lambda part, x: part(x), part),
    "bound_method": lambda part: part.forward,
    "deepcopy_of_its_own": Shared,
}


@pytest.mark.parametrize("hold", HOLDING.values(), ids=HOLDING)
def test_a_function_that_holds_a_part_of_the_model_changes_nothing(hold):
    model = Held(hold)
    before = copy.deepcopy(model.state_dict())
    assert verify(model, rows(), budget=0.8, loss=squares).exact
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Leaving(nn.Module):
    """Leaves a part of the loss, and plain values, in attributes."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = built(Layers), 0

    def forward(self, x):
        self.calls += 1
        self.aux = self.layers(x).tanh().mean()
        return self.layers(x)


@pytest.mark.ci
@pytest.mark.slow
def test_what_forward_leaves_in_attributes_is_compared(monkeypatch):
    model = Leaving()
    assert verify(model, rows(), budget=0.8, loss=squares).exact
    assert model.calls == 0
    assert not hasattr(model, "aux")
    right = Writing.write
    planned = Rockmate(model, rows(), 0.8, loss=squares)
    for wrong, told in (
        (lambda writing, tensor, named: None, "the attribute 'calls' of submodule '(root)' is nothing instead of"),
        (
            lambda writing, tensor, named: right(writing, lambda ref: tensor(ref).detach(), named),
            "the attribute 'aux' of submodule '(root)' is ",
        ),
        (lambda writing, tensor, named: right(writing, lambda ref: tensor(ref) + 1, named), "attribute 'aux'"),
    ):
        monkeypatch.setattr(Writing, "write", wrong)
        found = verify(planned, rows(), loss=squares)
        assert not found.exact
        assert told in found.first_difference
        assert found.eager_is_deterministic


@pytest.mark.ci
@pytest.mark.slow
def test_a_loss_that_reads_an_attribute_of_the_model_is_verified():
    model = Leaving()
    assert verify(model, rows(), budget=0.8, loss=lambda output: squares(output) + model.aux).exact


def test_nothing_is_left_on_the_model_after_a_failure(monkeypatch):
    model = Leaving()
    model.layers.eval()
    planned = Rockmate(model, rows(), 0.9)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(sys.modules["rockmate.queries.verification"], "backward_from", lambda outputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verify(planned, rows(), loss=squares)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.calls, model.training, model.layers.training) == (0, True, False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_samples_keep_their_strides():
    wide = torch.cat([rows(1), rows(2)], dim=1)
    assert verify(recomputing(built(Layers), wide[:, ::2]), wide[:, ::2], loss=squares).exact


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, torch.optim.RMSprop])
def test_steps_are_taken_by_any_optimizer(optimizer):
    model = recomputing(built(Layers), rows())
    assert verify(model, rows(), loss=squares, optimizer=optimizer, steps=4).exact


def test_the_parameters_after_the_last_step_are_compared():
    """An optimizer that gives each module another step: nothing but the parameters tells after one step."""
    rates = iter([0.1, 0.1, *[0.2] * 8])  # what eager runs twice, and what looks for the place after the planned one
    found = verify(
        recomputing(built(Layers), rows()),
        rows(),
        loss=squares,
        steps=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, next(rates)),
    )
    assert found.first_difference.startswith("step 1: parameter layers.0.weight differs by up to ")
    assert found.largest_gradient_difference == 0.0


def test_an_optimizer_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="no optimizer is called 'adamm': choose one of sgd, momentum, adam, adamw"):
        verify(built(Layers), rows(), optimizer="adamm")


@pytest.mark.ci
def test_the_streams_are_put_back_after_a_failure():
    stream = random_stream()
    with pytest.raises(BudgetTooSmall):
        verify(built(Layers), rows(), budget=1)
    with pytest.raises(SampleError):
        verify(built(Layers), {"unknown": rows()})
    assert torch.equal(random_stream(), stream)


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
    assert model.plan.recomputations > 2 * len(model._member.measured.problem.forward)


def test_the_plan_for_the_gradients_that_are_there_is_the_one_that_is_verified():
    model = built(Layers)
    squares(model(rows())).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    planned = Rockmate(model, rows(), 0.9, loss=squares)
    found = verify(planned, rows(), loss=squares)
    assert found.exact
    assert found.plan is planned.plan
    assert all(map(operator.is_, gradients, (parameter.grad for parameter in model.parameters())))
