"""Devices of kinds that nothing can be measured on are refused by name, before anything runs."""

import pytest
import torch
from torch import nn

import rkgb
from rkgb import ModelError, SampleError
from rockmate import Rockmate, max_batch, verify

AMPLE_BYTES = 10**6


class Elsewhere(nn.Parameter):
    """A parameter that says that it is on another device."""

    kind = "mps"

    @property
    def device(self):
        return torch.device(self.kind, 0)


def never_run(*_):
    raise AssertionError("nothing is to run")


def network(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameter = Elsewhere(torch.zeros(4))
    parameter.kind = kind
    model[1].bias = parameter
    model[0].register_forward_pre_hook(never_run)
    return model


@pytest.mark.parametrize("kind", ["mps", "xpu", "privateuseone"])
@pytest.mark.parametrize(
    "plan",
    [
        lambda model, sample: Rockmate(model, sample, AMPLE_BYTES),
        lambda model, sample: Rockmate(model, budget=AMPLE_BYTES)(sample),
        rkgb.make_all_graphs,
        lambda model, sample: max_batch(model, sample, AMPLE_BYTES),
    ],
    ids=["ahead", "first batch", "graphs", "max_batch"],
)
def test_a_model_with_a_part_on_such_a_device_is_refused(plan, kind):
    with pytest.raises(ModelError, match=rf"parameter '1.bias' of Sequential is on {kind}:0\. .* Move the model"):
        plan(network(kind), torch.randn(2, 4))


def test_a_sample_on_such_a_device_is_refused():
    sample = Elsewhere(torch.randn(2, 4))
    with pytest.raises(SampleError, match=r"tensor 0 of the sample of Linear is on mps:0"):
        Rockmate(nn.Linear(4, 4), sample, AMPLE_BYTES)


@pytest.mark.ci
def test_tensors_without_data_are_refused():
    with torch.device("meta"):
        model, sample = nn.Linear(4, 4), torch.randn(2, 4)
    for plan in (lambda *given: Rockmate(*given, AMPLE_BYTES), verify, lambda *given: max_batch(*given, AMPLE_BYTES)):
        with pytest.raises(ModelError, match="parameter 'weight' of Linear is on the meta device"):
            plan(model, torch.randn(2, 4))
    with pytest.raises(SampleError, match="tensor 0 of the sample of Linear is on the meta device"):
        Rockmate(nn.Linear(4, 4), sample, AMPLE_BYTES)
