"""Parameters that are written between the forward and the backward of a step."""

import pytest
import torch

from tests.module.models import Layers, Smooth, built, rows
from tests.module.steps import recomputing, squares


def in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def by_an_optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), 0.1).step()


def by_a_fused_optimizer(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(model.parameters(), 0.1, foreach=True).step()


def by_loading(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def another_storage(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


@pytest.mark.parametrize("write", [in_place, by_an_optimizer, by_a_fused_optimizer, by_loading])
def test_what_is_written_in_place_before_the_backward_is_an_error_as_in_eager_training(write):
    for module in (built(Layers), recomputing(built(Layers), rows())):
        loss = squares(module(rows(1)))
        write(module)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            loss.backward()
        assert torch.isfinite(squares(module(rows(1)))), "the next step goes on"
        squares(module(rows(1))).backward()


def test_the_error_names_the_parameter_from_which_it_would_recompute():
    model = recomputing(built(Smooth), rows())
    loss = squares(model(rows(1)))
    with torch.no_grad():
        model.layers[0].bias.add_(1)  # autograd saves no bias, but recomputing reads it
    with pytest.raises(RuntimeError, match=r"layers.*bias, a tensor of shape \[32\].* recomputes from it.* after the"):
        loss.backward()


def test_other_storages_under_parameters_are_an_error_and_not_other_gradients():
    model = recomputing(built(Smooth), rows())
    loss = squares(model(rows(1)))
    another_storage(model)
    with pytest.raises(RuntimeError, match="modified by an in-place operation, or taken out"):
        loss.backward()


def gradients_after_a_hidden_write(model):
    loss = squares(model(rows(1)))
    model.layers[0].weight.data.mul_(0.5)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_write_through_data_raises_nowhere_and_recomputing_reads_what_was_written():
    """As docs/exactness.md says: no version counts it, so that only a plan without recomputation gives eager's."""
    eager = gradients_after_a_hidden_write(built(Smooth))
    keep_all = recomputing(built(Smooth), rows(), lambda measured: measured.problem.no_recompute)
    kept = gradients_after_a_hidden_write(keep_all)
    planned = gradients_after_a_hidden_write(recomputing(built(Smooth), rows()))
    assert all(map(torch.equal, eager, kept))
    assert not all(map(torch.equal, eager, planned))


def test_a_write_through_data_after_the_backward_is_exact():
    models = [built(Smooth), recomputing(built(Smooth), rows())]
    for model in models:
        for seed in range(2):
            squares(model(rows(seed))).backward()
            model.layers[0].weight.data.mul_(0.5)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.grad, other.grad)
