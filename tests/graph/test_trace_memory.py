"""Tracing and checking take little more than inference: a model whose step does not fit can still be planned."""

import functools

import pytest
import torch
from torch import nn

from rkgb import make_all_graphs, make_sample
from rkgb.devices.allocation_log import AllocationLog
from rkgb.pipeline import exact_trace
from rkgb.state.module_state import module_state_kept
from rockmate import zoo
from tests.models.zoo import build

CPU = torch.device("cpu")


@functools.cache
def case(name):
    """Module, sample, the peak of inference, and the most that one operation's backward takes."""
    if name in zoo.names():
        entry = zoo.get(name)
        module, sample = entry.model, make_sample(entry.model, entry.sample)
    else:
        module, args, kwargs = build(name)
        sample = make_sample(module, args, kwargs)
    inference = peak_of(lambda: inferred(module, sample))
    graphs = make_all_graphs(module, sample)
    return module, sample, inference, largest_backward_bytes(graphs)


def inferred(module: nn.Module, sample) -> None:
    with module_state_kept(module), torch.no_grad():
        sample.copy().call(module)


def peak_of(function) -> int:
    with AllocationLog(CPU) as log:
        function()
    return log.peak_bytes


def largest_backward_bytes(graphs) -> int:
    """The backward of one operation: what it reads, the gradients that come in and go out, and its workspace."""
    largest = 0
    for comp in graphs.K_graph.backward:
        read = sum(data.size_bytes for data in comp.deps)
        made = comp.peak_bytes - comp.resident_bytes
        largest = max(largest, read + made)
    return largest


MODELS = ["gpt2-tiny", "resnet18-tiny", "unet-tiny", "hf_llama", "hf_t5", "hf_segformer"]
pytestmark = pytest.mark.filterwarnings("ignore:forward sets the attribute:rkgb.TraceWarning")


@pytest.mark.parametrize(
    ("name", "tracer"), [*((n, t) for n in MODELS for t in ("jit", "record")), ("transformer-tiny", "record")]
)
@pytest.mark.ci
def test_tracing_and_its_check_take_inference_and_one_backward(name, tracer):
    module, sample, inference_bytes, backward_bytes = case(name)
    peak_bytes = peak_of(lambda: exact_trace(module, sample, tracer, low_memory=True))
    # A few states of the random stream are kept at once: 5 KiB each, which these small models notice.
    states_bytes = 4 * torch.get_rng_state().nbytes
    assert peak_bytes <= 1.3 * inference_bytes + backward_bytes + states_bytes


@pytest.mark.parametrize("tracer", ["jit", "record"])
def test_a_trace_checked_on_disk_is_the_trace_checked_in_memory(tracer):
    module, sample, _, _ = case("unet-tiny")
    frugal, plain = (exact_trace(module, sample, tracer, low_memory=low)[1] for low in (True, False))
    assert [str(node.call) for node in frugal] == [str(node.call) for node in plain]
