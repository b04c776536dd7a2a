"""Estimates of steps under autocast: what casts make, told by shapes alone and measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.families import FAMILIES
from benchmarks.families.core import loss_of
from rkgb import make_sample
from rockmate import PeakMemory, Rockmate, estimate, zoo
from tests.module.steps import squares

HALF = torch.bfloat16
NAMES = ["gpt2-tiny", "resnet18-tiny", "unet-tiny", "vit-tiny", "transformer-tiny", "GPT2", "Bert", "Llama", "T5"]
# Numbers that make no tensors, and little that libraries round up.
EXACT = 3e-3
# Convolutions of short numbers are a fit to processors with AVX2, and large in models as small as these.
CONVOLVED = ["resnet18-tiny", "unet-tiny", "vit-tiny"]
IMAGES = 0.15
has_other_convolutions = torch.backends.cpu.get_cpu_capability() != "AVX2"


def built(name):
    if name in FAMILIES:
        return (*FAMILIES[name].make(), loss_of)
    entry = zoo.get(name)
    return entry.model, entry.sample, entry.loss


def measured(model, sample, loss, dtype=HALF, **settings):
    """Bytes of a step as trainers take it: the backward outside."""
    arguments = make_sample(model, sample)
    for _ in range(2):
        model.zero_grad()
        with PeakMemory() as memory:
            with torch.autocast("cpu", dtype, **settings):
                output = arguments.call(model)
                value = loss(output)
            value.backward()
        del output, value
    model.zero_grad()
    return memory.peak_bytes


def told(model, sample, loss, **settings):
    found = estimate(model, sample, loss=loss, batches=False, time_limit=0.1, **settings)
    assert not found.unplanned
    return found.eager.step_peak_bytes


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ci) if n not in NAMES[:2] else n for n in NAMES])
def test_a_step_in_mixed_precision_takes_what_is_told(name):
    model, sample, loss = built(name)
    expected = measured(model, sample, loss)
    by_convolutions = IMAGES if has_other_convolutions and name in CONVOLVED else EXACT
    assert told(model, sample, loss, autocast=HALF) == pytest.approx(expected, rel=by_convolutions)
    with torch.autocast("cpu", HALF):  # around it, as around a first call
        assert told(model, sample, loss) == pytest.approx(expected, rel=by_convolutions)


class Regions(nn.Module):
    """Autocast that forward turns on, and off within."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = F.gelu(self.first(x))
            with torch.autocast("cpu", enabled=False):
                x = self.second(x.float()).sigmoid()
            x = torch.cat([self.third(x), x]) @ self.first.weight
        return F.gelu(x.float())


def test_regions_that_forward_opens_count():
    model, x = Regions(), torch.randn(128, 64)
    expected = measured(model, x, squares, enabled=False)
    assert told(model, x, squares) == pytest.approx(expected, rel=EXACT)


def test_weights_that_are_used_twice_are_cast_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, x):
            return self.layer(self.layer(x))

    model, x = Twice(), torch.randn(16, 256)
    expected = measured(model, x, squares)
    assert told(model, x, squares, autocast=HALF) == pytest.approx(expected, rel=EXACT)
    uncached = measured(model, x, squares, cache_enabled=False)
    assert uncached > expected
    with torch.autocast("cpu", HALF, cache_enabled=False):
        assert told(model, x, squares) == pytest.approx(uncached, rel=EXACT)


def test_what_is_told_of_a_plan_is_what_it_takes():
    model, sample, loss = built("gpt2-tiny")
    found = estimate(model, sample, loss=loss, budget=0.7, autocast=HALF, batches=False, time_limit=1)
    with torch.autocast("cpu", HALF):
        planned = Rockmate(model, sample, found.planned.budget_bytes, loss=loss)
    taken = measured(planned, sample, loss)
    assert taken <= found.planned.budget_bytes
    assert found.planned.budget_bytes < found.eager.step_peak_bytes


def test_double_precision_and_numbers_that_are_none_stay():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32).double()

        def forward(self, x, places):
            return self.layer(x)[places].cumsum(0)

    model, sample = Mixed(), (torch.randn(64, 32, dtype=torch.float64), torch.arange(64))
    with torch.autocast("cpu", HALF):
        output = model(*sample)
    assert output.dtype == torch.float64
    assert told(model, sample, squares, autocast=HALF) == pytest.approx(measured(model, sample, squares), rel=EXACT)


def test_an_accelerator_casts_more():
    """By CUDA's lists, without CUDA: there normalisations are in single precision, and here they are not."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    x = torch.randn(128, 64)
    here = told(model, x, squares, autocast=HALF)
    there = told(model, x, squares, autocast=HALF, device="H100")
    assert there > here
    assert there < told(model, x, squares, device="H100") * 1.6
