"""Operators that are registered from outside of PyTorch, with a derivative: one operation each, called as it was."""

import pytest
import torch
from torch import Tensor, nn

from rkgb import make_B
from rockmate import Rockmate
from tests.module.steps import assert_same_training, train


@torch.library.custom_op("rockmate_libraries::sines", mutates_args=())
def sines(tensors: list[Tensor], factor: float, *, shift: float = 0.0) -> list[Tensor]:
    return [factor * (tensor + shift).sin() for tensor in tensors]


def _keep(ctx, inputs, keyword_only_inputs, output):
    tensors, ctx.factor = inputs
    ctx.shift = keyword_only_inputs["shift"]
    ctx.slopes = [
        factor.cos() for factor in (tensor + ctx.shift for tensor in tensors)
    ]  # computes, and saves by itself
    ctx.save_for_backward(*tensors)


def _sines_backward(ctx, gradients):
    return [2 * ctx.factor * gradient * slope for gradient, slope in zip(gradients, ctx.slopes, strict=True)], None


sines.register_autograd(_sines_backward, setup_context=_keep)


@torch.library.custom_op("rockmate_libraries::split", mutates_args=())
def split(x: Tensor, with_sign: bool = True) -> tuple[Tensor, Tensor]:
    return x.abs(), x.sign() if with_sign else torch.ones_like(x)


def _keep_sign(ctx, inputs, output):
    ctx.save_for_backward(output[1])


def _split_backward(ctx, gradient, _):
    (sign,) = ctx.saved_tensors
    return 3 * sign * gradient, None  # three times the derivative, so that nothing else could have made it


split.register_autograd(_split_backward, setup_context=_keep_sign)


class WithOperators(nn.Module):
    def __init__(self, autocast, reads=False):
        super().__init__()
        self.reads = reads
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.autocast = autocast

    def forward(self, x):
        if self.reads and x.sum() < -1000:  # then the trace is recorded, with guards
            return x
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for layer in self.layers:
                h = torch.tanh(layer(x))
                first, second = sines([h, h * 0.5], 0.5, shift=0.25)
                size, sign = split(first + second)
                x = size.float() * sign.float() + x
        return x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tracer", ["jit", "record"])
def test_each_is_one_operation_of_either_trace(tracer, autocast):
    graph = make_B(WithOperators(autocast), torch.randn(4, 16), tracer=tracer)
    called = [str(node.call.function) for node in graph.nodes if "rockmate_libraries" in str(node.call.function)]
    assert called == ["rockmate_libraries.sines.default", "rockmate_libraries.split.default"] * 4


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_training_is_eager_s(reads, autocast):
    model, batches = WithOperators(autocast, reads), [(torch.randn(64, 16),) for _ in range(3)]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    planned = Rockmate(model, batches[0], 0.85, solver="greedy")
    assert planned.plan.recomputations
    found = train(model, batches, forward=planned)
    model.load_state_dict(start)
    assert_same_training(found, train(model, batches))
