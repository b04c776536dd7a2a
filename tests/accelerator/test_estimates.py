"""Estimates beside what the test accelerator's allocator counts: allocated to the byte, reserved within a percent."""

import pytest
import torch
from torch import nn

from rkgb.ir.sample import make_sample
from rkgb.shapes.dataless import Dataless
from rkgb.shapes.device import standing_for
from rkgb.shapes.machine import accelerator_of
from rockmate import PeakMemory, zoo
from rockmate.forecast.eager_step import observe_eager_step
from rockmate.memory.allocators import predicted_reserved_bytes

pytestmark = pytest.mark.ci


def told(model, sample, loss):
    """Of one step on some accelerator: the peak, and what is reserved for it by an empty allocator."""
    machine = accelerator_of(8 << 30)
    dataless = Dataless(machine)
    with standing_for(machine, dataless.values) as shapes, dataless.module(model):
        given = dataless.sample(make_sample(model, sample))
        step = observe_eager_step(model, given, dataless.function(loss), None, shapes)
        return step.step_peak_bytes, predicted_reserved_bytes(shapes.emulated(), step.events)


def measured(model, sample, loss, device):
    arguments = make_sample(model, sample)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with PeakMemory(device) as memory:
            output = arguments.call(model)
            loss(output).backward()
        del output
    return memory.peak_bytes


def net():
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8))


def test_what_is_allocated_is_told_to_the_byte(device):
    model, sample = net().to(device), torch.randn(500, 48, device=device)

    def loss(output):
        return nn.functional.cross_entropy(output, torch.zeros(500, dtype=torch.long, device=output.device))

    peak_bytes, reserved_bytes = told(model, sample, loss)
    assert peak_bytes == measured(model, sample, loss, device)
    assert reserved_bytes >= 0


@pytest.mark.parametrize("name", ["gpt2-tiny"])  # its attention is of single operations: fused ones are CUDA's alone
def test_transformers_are_told_within_a_percent(device, name):
    entry = zoo.get(name, device=device)
    # CUDA, which is told of, has masks of one byte an element, and the test accelerator the CPU's.
    for part in entry.model.modules():
        for drawn in ("p", "dropout"):
            if isinstance(getattr(part, drawn, None), float):
                setattr(part, drawn, 0.0)
    peak_bytes, _ = told(entry.model, entry.sample, entry.loss)
    assert peak_bytes == pytest.approx(measured(entry.model, entry.sample, entry.loss, device), rel=0.01)
