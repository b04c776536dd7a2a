"""What an eager step allocates is told by shapes alone: beside what is measured of the step itself."""

import copy

import pytest
import torch
from torch import nn

import rockmate.zoo as zoo
from rkgb.devices.allocation_log import AllocationLog, highest_moment
from rkgb.ir.sample import make_sample
from rkgb.shapes.dataless import Dataless
from rkgb.shapes.device import standing_for
from rkgb.shapes.machine import named_machine
from rkgb.shapes.watch import Clock, StorageWatch
from rockmate import PeakMemory
from rockmate.forecast.eager_step import EagerStep, observe_eager_step

CPU = named_machine("cpu")
# The CPU puts numbers, such as a factor, into tensors of their own while it computes with them.
NUMBERS_BYTES = 64


def observed(model, sample, loss=None, optimizer=None, machine=CPU) -> EagerStep:
    dataless = Dataless(machine)
    with standing_for(machine, dataless.values) as shapes, dataless.module(model):
        given = dataless.sample(make_sample(model, sample))
        return observe_eager_step(model, given, loss and dataless.function(loss), optimizer, shapes)


def measured_bytes(model, sample, loss) -> int:
    """The peak of a second step, as a loop has it that keeps its output."""
    arguments = make_sample(model, sample)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with PeakMemory() as memory:
            output = arguments.call(model)
            loss(output).backward()
        del output
    return memory.peak_bytes


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama-tiny", "bert-tiny", "gpt2-tiny-sdpa", "vit-tiny", "transformer-tiny"]
)
def test_transformers_are_told_to_the_byte(name):
    entry = zoo.get(name)
    told = observed(entry.model, entry.sample, entry.loss)
    measured = measured_bytes(entry.model, entry.sample, entry.loss)
    assert abs(told.step_peak_bytes - measured) <= max(NUMBERS_BYTES, measured * 1e-3), (told.step_peak_bytes, measured)


@pytest.mark.parametrize("name", ["densenet-tiny", "googlenet-tiny", "mixer-tiny", "mobilenet-v2-tiny", "unet-tiny"])
def test_convolutions_are_told_to_a_few_percent(name):
    """What oneDNN allocates for itself is a fit, and is a large part of so small a step."""
    entry = zoo.get(name)
    told = observed(entry.model, entry.sample, entry.loss).step_peak_bytes
    assert told == pytest.approx(measured_bytes(entry.model, entry.sample, entry.loss), rel=0.05)


def test_the_split_adds_up_to_the_peak():
    entry = zoo.get("gpt2-tiny")
    told = observed(entry.model, entry.sample, entry.loss, torch.optim.AdamW)
    split = dict(told.split())
    assert sum(split.values()) == told.peak_bytes
    assert split["parameters"] == sum(p.untyped_storage().nbytes() for p in entry.model.parameters())
    assert split["optimizer state"] >= 2 * split["parameters"]
    assert told.peak_in == "backward"


def test_gradients_and_what_an_optimizer_computes_with_are_the_peak_of_a_large_model_on_few_rows():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    told = observed(model, torch.randn(2, 256), optimizer=torch.optim.AdamW)
    split = dict(told.split())
    assert told.peak_in == "optimizer step"
    assert split["gradients"] == split["parameters"]
    assert told.after_backward_bytes == told.peak_bytes > told.held_bytes + split["gradients"]


def test_an_optimizer_that_reads_values_has_its_state_counted_alone():
    class Reading(torch.optim.SGD):
        def step(self, closure=None):
            if float(self.param_groups[0]["params"][0].sum()) > 0:
                return super().step(closure)
            return super().step(closure)

    told = observed(nn.Linear(8, 8), torch.randn(2, 8), optimizer=lambda parameters: Reading(parameters, 0.1, 0.9))
    assert not told.knows_optimizer_step
    assert told.optimizer_bytes == 8 * 8 * 4 + 8 * 4


def test_sums_of_gradients_are_made_in_place_as_autograd_makes_them_where_nobody_looks():
    def graph(device):
        given = torch.zeros(1000, device=device, requires_grad=True)
        hidden = given * 2
        return given, (hidden.sin() + hidden.cos() + hidden.exp() + hidden.view(10, 100).t().tanh().sum()).sum()

    given, total = graph("meta")
    with StorageWatch(CPU, Clock()) as watch:
        total.backward()
    kept, total = graph("cpu")
    with AllocationLog(torch.device("cpu")) as log:
        total.backward()
    assert [e.size_bytes for e in watch.events if e.size_bytes == 4000] == [
        e.size_bytes for e in log.events if e.size_bytes == 4000
    ]
    assert given.grad is not None
    assert kept.grad is not None


def test_an_accelerator_rounds_blocks_and_keeps_smaller_masks():
    model = nn.Sequential(nn.Linear(30, 30), nn.Dropout(0.5), nn.Linear(30, 30))
    sample = torch.randn(1000, 30)
    gpu = observed(model, sample, machine=named_machine("H100"))
    assert gpu.parameter_bytes == 2 * (4096 + 512)
    assert gpu.step_peak_bytes < observed(model, sample).step_peak_bytes


def test_everything_is_left_as_it_was():
    entry = zoo.get("densenet-tiny")
    model = entry.model
    model.kept = [torch.ones(3)]
    before = dict([*model.named_parameters(), *model.named_buffers()])
    values = copy.deepcopy(model.state_dict())
    kept, state, modes = model.kept, torch.get_rng_state(), [part.training for part in model.modules()]
    observed(model, entry.sample, entry.loss, torch.optim.AdamW)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[name] is tensor for name, tensor in before.items())
    assert after.keys() == before.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    assert model.kept is kept
    assert "forward" not in vars(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_everything_is_left_as_it_was_after_an_error():
    class Failing(nn.Linear):
        def forward(self, given):
            raise RuntimeError("no")

    model = Failing(4, 4)
    weight = model.weight
    with pytest.raises(RuntimeError, match="no"):
        observed(model, torch.randn(2, 4))
    assert model.weight is weight
    assert "forward" not in vars(model)


def test_tensors_of_one_storage_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("view", self.one.detach()[:32])

        def forward(self, given):
            return (given @ self.one) + self.view.sum()

    told = observed(Tied(), torch.randn(4, 64))
    assert told.parameter_bytes == 64 * 64 * 4
    assert told.buffer_bytes == 0


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.AdamW])
def test_training_gives_back_all_but_what_it_holds(optimizer):
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
    told = observed(model, torch.randn(100, 32, requires_grad=True), optimizer=optimizer, machine=named_machine("H100"))
    events = list(told.training_events(4))
    alive = {}
    for event in events:
        if event.size_bytes > 0:
            assert event.address not in alive
            alive[event.address] = event.size_bytes
        else:
            assert alive.pop(event.address) == -event.size_bytes
    assert sum(alive.values()) == told.held_bytes
    assert highest_moment(events)[0] == told.peak_bytes
