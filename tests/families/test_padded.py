"""Sizes that PyTorch pads where no Python sees it, as those of attention's masks on GPUs: pretended on the CPU."""

import pytest
import torch
from torch import nn

from rkgb.devices.cpu import Cpu
from rockmate import PeakMemory, Rockmate
from tests.module.steps import squares

LIBRARY = torch.library.Library("rockmate_padded", "FRAGMENT")
LIBRARY.define("mixed(Tensor x, Tensor bias) -> (Tensor, Tensor)")
LIBRARY.define("attention(Tensor x, Tensor bias) -> Tensor")


def mixed(x, bias):
    """A kernel that takes whole rows alone, and leaves numbers of padded rows to its backward."""
    if bias.stride(-2) % 8:
        raise RuntimeError(f"bias is not correctly aligned: {bias.stride()}")
    rows = -(-x.shape[1] // 32) * 32
    return (x @ x.transpose(1, 2) / 8 + bias).softmax(-1) @ x, x.new_zeros(x.shape[0], rows, 64)


class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        with torch._C._AutoDispatchBelowAutograd():
            output, sums = torch.ops.rockmate_padded.mixed(x, bias)
        ctx.save_for_backward(x, bias, sums)
        return output, sums

    @staticmethod
    def backward(ctx, gradient, _):
        x, bias, _ = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = (x @ x.transpose(1, 2) / 8 + bias).softmax(-1) @ x
        return torch.autograd.grad(output, x, gradient)[0], None


def attention(x, bias):
    """What pads the mask for it, unless it need not."""
    if bias.stride(-2) % 8:
        columns = bias.shape[-1]
        bias = torch.constant_pad_nd(bias, [0, 8 - columns % 8])[..., :columns]
    return torch.ops.rockmate_padded.mixed(x, bias)[0]


LIBRARY.impl("mixed", mixed, "CPU")
LIBRARY.impl("mixed", lambda x, bias: Mixed.apply(x, bias), "Autograd")
LIBRARY.impl("attention", attention, "CompositeImplicitAutograd")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, mask):
        bias = torch.zeros(x.shape[0], x.shape[1], x.shape[1]).masked_fill(~mask[:, None, :], -1e9)
        for layer in self.layers:
            x = x + torch.tanh(torch.ops.rockmate_padded.attention(layer(x), bias))
        return x


def call(length):
    torch.manual_seed(length)
    return torch.randn(2, length, 64), torch.arange(length) < torch.tensor([[length], [length // 2]])


@pytest.mark.filterwarnings("ignore::rockmate.errors.ReplanWarning")
@pytest.mark.parametrize("block_bytes", [1, 512])
@pytest.mark.parametrize("lengths", [(29, 34, 45, 30, 51, 12, 31), (16, 24, 56, 32, 40, 8)], ids=["padded", "whole"])
def test_lengths_that_are_padded_have_plans_by_their_sizes(lengths, block_bytes, monkeypatch):
    monkeypatch.setattr(Cpu, "allocated_bytes", lambda self, size: -(-size // block_bytes) * block_bytes)
    model = Masked().train()
    with PeakMemory() as memory:
        squares(model(*call(max(lengths)))).backward()
    planned = Rockmate(model, budget=int(0.8 * memory.peak_bytes), loss=squares)
    for length in lengths:
        found = []
        for way in (model, planned):
            model.zero_grad()
            squares(way(*call(length))).backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *found)), length
        model.zero_grad()
        with PeakMemory() as memory:
            squares(planned(*call(length))).backward()
        assert memory.peak_bytes <= planned.plan.budget_bytes, length
    assert len(list(planned._family._by_size)) == len(lengths) - 3
