"""Composite operations are taken apart where, and only where, that gives the solver a choice."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb.capture.trace import trace
from rkgb.ir.sample import make_sample
from rkgb.passes.b_to_d import b_to_d
from rkgb.passes.expand import expand_composites
from rkgb.replay.replay import replay_check
from rockmate import PeakMemory
from tests.graph.programs import op_names


class Attention(nn.Module):
    """Self-attention by torch's fused function, or written out."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)
        return F.dropout((query @ key.transpose(-2, -1)).softmax(-1), 0.2, self.training) @ value


def expanded(module, *inputs):
    sample = make_sample(module, inputs)
    composite = trace(module, sample)
    return composite, expand_composites(composite, module, sample), sample


def test_a_dropout_becomes_its_mask_and_its_product():
    _, fine, _ = expanded(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4))
    assert op_names(fine) == ["linear", "empty_strided", "bernoulli_", "div_", "mul"]


def test_a_mask_does_not_need_the_values_that_it_will_drop():
    _, fine, _ = expanded(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4))
    mask = next(node for node in fine if node.call.op_name == "empty_strided")
    assert mask.call.inputs == []


def test_operations_that_hide_nothing_stay_whole():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.GELU(), nn.Linear(4, 2))
    composite, fine, _ = expanded(module, torch.randn(3, 5, 4))
    assert op_names(fine) == op_names(composite) == ["linear", "tanh", "gelu", "linear"]


def test_operations_that_hide_what_another_returns_become_that_one():
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.BatchNorm2d(4))
    _, fine, sample = expanded(module, torch.randn(3, 2, 8, 8))
    names = [name.removeprefix("native_") for name in op_names(fine)]
    assert names[1:4] == ["layer_norm", "group_norm", "max_pool2d_with_indices"]
    assert [len(node.output_names) for node in fine.nodes[1:4]] == [3, 3, 2]
    assert names[-1] == "batch_norm"  # which writes statistics, and so stays as it is
    replay_check(b_to_d(fine, module, sample), module, sample)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_taken_apart_is_exact(fused):
    module = Attention(fused)
    composite, fine, sample = expanded(module, torch.randn(2, 6, 8))
    assert len(fine.nodes) > len(composite.nodes)
    replay_check(b_to_d(fine, module, sample), module, sample)


def test_the_module_and_the_random_stream_are_left_as_they_were():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    sample = make_sample(module, torch.randn(3, 4))
    composite = trace(module, sample)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    expand_composites(composite, module, sample)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_values_keep_the_names_of_the_trace():
    composite, fine, _ = expanded(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4))
    assert fine.output_names == composite.output_names


def test_what_is_inside_is_freed_while_it_is_taken_apart():
    """As in a forward without gradients: attention's inner tensors are many times what it returns."""
    module, x = Attention(fused=True), torch.randn(4, 256, 8)
    sample = make_sample(module, x)
    composite = trace(module, sample)
    peaks = []
    for run in (lambda: module(x), lambda: expand_composites(composite, module, sample)):
        with PeakMemory() as memory, torch.no_grad():
            result = run()
        peaks.append(memory.peak_bytes)
        del result
    assert peaks[1] <= peaks[0] + 4 * 2 * 256 * 256  # a mask that is drawn is seen beside the product
