"""Code of the user's goes another way in some calls, and saves other tensors: gradients are eager's all the same."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn

from rockmate import Offload, Rockmate
from rockmate.errors import ReplanWarning
from tests.module.steps import FEW_ROUNDS

WIDTH, ROWS = 64, 512


class Alternating(nn.Module):
    """Goes by its own count: one operation of the graph, and never repeated."""

    def __init__(self, ways):
        super().__init__()
        self.ways, self.calls = ways, 0

    def forward(self, h):
        self.calls += 1
        if self.calls % 2:
            return self.ways[0](h)
        return self.ways[1](h) if len(self.ways) == 2 or self.calls % 4 else self.ways[2](h)


class Sides(torch.autograd.Function):
    """Goes by its data: what it saves is its input or its output."""

    @staticmethod
    def forward(ctx, h):
        ctx.is_high = bool(h.mean() > 0)
        made = h.sin() if ctx.is_high else h.exp()
        ctx.save_for_backward(h if ctx.is_high else made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return gradient * (saved.cos() if ctx.is_high else saved)


class More(torch.autograd.Function):
    """Goes by its data: it saves one tensor or two."""

    @staticmethod
    def forward(ctx, h):
        made = h.exp()
        ctx.save_for_backward(*((h, made) if h.mean() > 0 else (made,)))
        return made

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[-1] * len(ctx.saved_tensors)


@torch.library.custom_op("rockmate_varying::sides", mutates_args=())
def sides(h: torch.Tensor) -> torch.Tensor:
    return h.sin() if h.mean() > 0 else h.exp()


def _keep_a_side(ctx, inputs, output):
    ctx.is_high = bool(inputs[0].mean() > 0)
    ctx.save_for_backward(inputs[0] if ctx.is_high else output)


sides.register_autograd(Sides.backward, setup_context=_keep_a_side)


class Branching(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), middle
        self.rest = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        h = self.middle(torch.tanh(self.first(x)))
        for layer in self.rest:
            h = torch.tanh(layer(h))
        return h


MIDDLES = {
    "its input or its output": lambda: Alternating((torch.sin, torch.exp)),
    "one tensor or two": lambda: Alternating((torch.exp, lambda h: h.sin() * h)),
    "three ways": lambda: Alternating((torch.sin, torch.exp, torch.tanh)),
    "nothing or something": lambda: Alternating((torch.clone, torch.exp)),
    "a function of its input or its output": lambda: _Called(Sides.apply),
    "a function that saves more": lambda: _Called(More.apply),
    "an operator of its input or its output": lambda: _Called(lambda h: sides(h)),
}


class _Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


def batches(number):
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)) for step in range(number)]


def loss(output):
    return output.square().mean()


def put(model, high):
    """Let its hidden values be high, or low."""
    with torch.no_grad():
        model.first.bias.fill_(2.0 if high else -2.0)


def branching(middle):
    """With this in the middle; what goes by its data is planned where they are high."""
    model = Branching(MIDDLES[middle]())
    if middle.startswith(("a function", "an operator")):
        put(model, high=True)
    return model


def gradients_of(model, forward, batch):
    model.zero_grad()
    loss(forward(batch)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


_NOTHING = contextlib.nullcontext()


def assert_steps_are_eager_s(planned, eager, around=_NOTHING):
    """Of high and low values in turns; those of the planned module within `around`."""
    for step, batch in enumerate(batches(5)):
        for model in (planned.original, eager):
            put(model, high=step in (0, 3))
        with around:
            found = gradients_of(planned.original, planned, batch)
        assert all(map(torch.equal, found, gradients_of(eager, eager, batch))), step


@pytest.mark.parametrize("share", [0.8, 0.7])
@pytest.mark.parametrize("middle", MIDDLES)
def test_gradients_are_eager_s_whichever_way_a_call_goes(middle, share):
    model = branching(middle)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned = Rockmate(model, batches(1)[0], share, loss=loss, limits=FEW_ROUNDS)
        assert planned.plan.recomputations
        assert_steps_are_eager_s(planned, copy.deepcopy(model))
    assert len(planned.plans) == 1
    told = [one for one in caught if "saves other tensors" in str(one.message)]
    assert len(told) <= 1
    assert all(one.category is ReplanWarning for one in told)
    if share < 0.75 and "its output" in middle:
        assert told, "nothing that it saves is had again"


@pytest.mark.parametrize("middle", MIDDLES)
def test_so_they_are_where_data_move(middle, tmp_path):
    model = branching(middle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        offload = Offload("disk", path=str(tmp_path))
        planned = Rockmate(model, batches(1)[0], 0.7, loss=loss, limits=FEW_ROUNDS, offload=offload)
        assert_steps_are_eager_s(planned, copy.deepcopy(model))


@pytest.mark.parametrize("middle", ["its input or its output", "a function that saves more"])
def test_hooks_of_the_user_s_have_all_that_is_kept(middle):
    model = branching(middle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = Rockmate(model, batches(1)[0], 0.7, loss=loss, limits=FEW_ROUNDS)
        copies = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor + 0, lambda tensor: tensor)
        assert_steps_are_eager_s(planned, copy.deepcopy(model), copies)


class Quiet(torch.autograd.Function):
    """Takes no gradient of what is low."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        made = h.sin()
        if h.mean() <= 0:
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


class Kept(Branching):
    """Whose first layer has gradients on another way, too."""

    def forward(self, x):
        return super().forward(x) + self.first(x)


def test_a_function_that_hands_on_no_gradient_in_some_calls_ends_no_training():
    model = Kept(_Called(Quiet.apply))
    put(model, high=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = Rockmate(model, batches(1)[0], 0.8, loss=loss, limits=FEW_ROUNDS)
        assert_steps_are_eager_s(planned, copy.deepcopy(model))
