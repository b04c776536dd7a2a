"""Estimates beside what the test accelerator's allocator counts: allocated to the byte, reserved within a percent."""

import gc

import pytest
import torch
from torch import nn

from rkgb.ir.sample import make_sample
from rkgb.shapes.dataless import Dataless
from rkgb.shapes.device import standing_for
from rkgb.shapes.machine import accelerator_of
from rockmate import PeakMemory, estimate, zoo
from rockmate.forecast.eager_step import observe_eager_step
from rockmate.memory.allocators import predicted_reserved_bytes
from rockmate.queries.verification import OPTIMIZERS

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


def stack(width, depth):
    """Without draws, as masks of CUDA, which is told of, are not those of the test accelerator."""
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(*layers, nn.Linear(width, 16))


@pytest.mark.parametrize(
    ("width", "depth", "rows", "optimizer"),
    [(512, 6, 2048, None), (512, 6, 2048, "adamw"), (1024, 4, 1024, "sgd"), (256, 12, 3000, "adamw")],
)
def test_what_the_allocator_reserves_for_all_of_training_is_told_within_a_percent(
    device, width, depth, rows, optimizer
):
    """From the first parameter on: what is told is of a process that has nothing else on the device."""
    memory = torch.accelerator.memory
    gc.collect()
    memory.empty_cache()
    before_bytes = memory.memory_reserved()
    memory.reset_peak_memory_stats()
    model, sample = stack(width, depth).to(device), torch.randn(rows, width, device=device)
    made = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    for _ in range(3):
        output = model(sample)
        value = output.square().mean()
        value.backward()
        if made is not None:
            made.step()
        model.zero_grad(set_to_none=True)
        del output, value
    reserved_bytes = memory.max_memory_reserved() - before_bytes
    found = estimate(
        model,
        sample,
        loss=lambda output: output.square().mean(),
        optimizer=optimizer,
        device="8GiB",
        batches=False,
        time_limit=0.1,
    )
    assert found.reserved_bytes == pytest.approx(reserved_bytes, rel=0.01)
