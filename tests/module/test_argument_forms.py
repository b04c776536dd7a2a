"""Arguments of calls: one form where that is no difference, and as they were passed where it may be one."""

import functools
import inspect
import warnings

import pytest
import torch
from torch import nn

from rkgb import Sample
from rkgb.ir.sample import Binding
from rockmate import ReplanWarning, Rockmate, verify
from tests.module.steps import FEW_ROUNDS


class Masked(nn.Module):
    """Two arguments; a function around its forward that looks for one of them by its name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, hidden, mask=None):
        hidden = self.layers(hidden)
        return hidden if mask is None else hidden * mask


def looks_for_the_mask(forward):
    """As decorators of libraries do: with the signature of what it wraps."""

    @functools.wraps(forward)
    def around(*args, **kwargs):
        output = forward(*args, **kwargs)
        return output if kwargs.get("mask") is None else output + kwargs["mask"].mean()

    return around


class OfAClass(Masked):
    forward = looks_for_the_mask(Masked.forward)


def of_an_instance():
    model = Masked()
    model.forward = looks_for_the_mask(model.forward)
    return model


def says_a_signature():
    model = of_an_instance()
    function = model.forward
    function.__signature__ = inspect.signature(Masked().forward)
    del function.__wrapped__
    return model


def hooked():
    model = Masked()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0] * (2 if "mask" in kwargs else 1), *args[1:]), kwargs), with_kwargs=True
    )
    return model


@pytest.mark.parametrize("make", [OfAClass, of_an_instance, says_a_signature])
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by place"])
@pytest.mark.filterwarnings("ignore::rkgb.TraceWarning")
def test_an_argument_that_is_looked_for_by_name_is_found(make, by_name):
    model, hidden, mask = make(), torch.randn(4, 8), torch.rand(4, 8)
    args, kwargs = ((hidden,), {"mask": mask}) if by_name else ((hidden, mask), {})
    planned = Rockmate(model, Sample(args, kwargs), 1.0, limits=FEW_ROUNDS)
    assert torch.equal(planned(*args, **kwargs), model(*args, **kwargs))
    assert verify(planned, Sample(args, kwargs)).exact


def test_two_ways_to_pass_it_have_a_plan_each():
    model, hidden, mask = OfAClass(), torch.randn(4, 8), torch.rand(4, 8)
    planned = Rockmate(model, Sample((hidden,), {"mask": mask}), 1.0, limits=FEW_ROUNDS)
    with pytest.warns(ReplanWarning):
        by_place = planned(hidden, mask)
    assert torch.equal(by_place, model(hidden, mask))
    assert not torch.equal(by_place, planned(hidden, mask=mask))
    assert len(planned.plans) == 2


def test_they_are_one_call_of_a_plain_forward():
    model, hidden, mask = Masked(), torch.randn(4, 8), torch.rand(4, 8)
    planned = Rockmate(model, (hidden, mask), 1.0, limits=FEW_ROUNDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplanWarning)
        for output in (planned(hidden, mask=mask), planned(mask=mask, hidden=hidden)):
            assert torch.equal(output, model(hidden, mask))
    assert len(planned.plans) == 1


def test_the_order_of_keywords_makes_no_other_call():
    binding, hidden, mask = Binding(OfAClass()), torch.randn(4, 8), torch.rand(4, 8)
    one = binding.sample((), {"mask": mask, "hidden": hidden, "more": 1})
    assert list(one.kwargs) == ["hidden", "mask", "more"]


@pytest.mark.filterwarnings("ignore::rkgb.TraceWarning")
@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_a_hook_sees_arguments_as_they_were_passed():
    model, hidden, mask = hooked(), torch.randn(4, 8), torch.rand(4, 8)
    planned = Rockmate(model, budget=1.0, limits=FEW_ROUNDS)
    for args, kwargs in (((hidden,), {"mask": mask}), ((hidden, mask), {})):
        assert torch.equal(planned(*args, **kwargs), model(*args, **kwargs))
