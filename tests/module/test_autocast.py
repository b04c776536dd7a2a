"""Autocast of several kinds of devices: custom functions and opaque submodules are called under what eager has."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkgb.process.autocast import autocast_kinds
from rockmate import PlanMismatch, Rockmate
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest
from tests.module.models import WIDTH, built, rows
from tests.module.steps import Trained, assert_same_training, following, keep_nothing, squares, train

BATCHES = [rows(seed) for seed in range(2)]
SEEN: list[tuple[Any, ...]] = []  # of what is called whole, what each call saw


def around() -> tuple[Any, ...]:
    """All that code can see of autocast here."""
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_kinds()]
    return (*states, torch.is_autocast_cache_enabled())


def number(state: tuple[Any, ...]) -> float:
    """Another one for another state, so that a result tells the state in which it was computed."""
    types = [torch.bfloat16, torch.float16]
    numbers = [place * 4 + 2 * on + types.index(dtype) for place, (_, on, dtype) in enumerate(state[:-1], start=1)]
    return 1 + (sum(map(math.sqrt, numbers)) + state[-1]) / 97


class Seeing(torch.autograd.Function):
    """Multiplies by a number that stands for the autocast under which it is called."""

    @staticmethod
    def forward(ctx, x):
        SEEN.append(around())
        x = x.float()
        ctx.save_for_backward(x)
        ctx.factor = number(around())
        return x.square() * ctx.factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * ctx.factor * gradient * x


class Whole(nn.Module):
    """Is one operation; uses a weight twice, whose cast is one where autocast caches, and two where it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(around())
        with torch.autocast("cpu"):  # to what is said outside
            x = self.layer(torch.tanh(self.layer(x)))
        return x * number(around())


@contextlib.contextmanager
def by_hand(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """A device that is not there: `torch.autocast` would warn and stay off."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


def all_of(*contexts: contextlib.AbstractContextManager) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


REGIONS = {
    "none": lambda: all_of(),
    "two kinds": lambda: all_of(torch.autocast("cpu", torch.bfloat16), torch.autocast("xpu", torch.float16)),
    "the other order": lambda: all_of(torch.autocast("xpu", torch.bfloat16), torch.autocast("cpu", torch.float16)),
    "three kinds, one not there": lambda: all_of(
        torch.autocast("cpu", torch.bfloat16), by_hand("cuda", torch.bfloat16), torch.autocast("mtia")
    ),
    "another kind alone": lambda: torch.autocast("xpu", torch.float16),
    "off within": lambda: all_of(
        torch.autocast("cpu", torch.float16),
        torch.autocast("xpu", torch.bfloat16),
        torch.autocast("cpu", enabled=False),
    ),
    "off": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "uncached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "cached within uncached": lambda: all_of(
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.autocast("xpu", cache_enabled=True)
    ),
}
EVERY_REGION = pytest.mark.parametrize("region", [pytest.param(make, id=name) for name, make in REGIONS.items()])


class Stack(nn.Module):
    """A custom function and an opaque submodule in a region."""

    def __init__(self, region) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Whole(), nn.Linear(WIDTH, WIDTH)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.first(x)).float()
        with self.region():
            x = self.middle(torch.sin(Seeing.apply(x)))
        return self.last(torch.sin(x.float()))


def recomputing_all(model: Stack) -> Rockmate:
    measured = measure(model, BATCHES[0], PlanRequest(None, squares, opaque=("middle",)))
    return following(measured, model, keep_nothing(measured))


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("region", [pytest.param(make, id=name) for name, make in REGIONS.items()])
def test_what_is_called_whole_sees_the_autocast_of_eager_in_every_run(region, is_inside):
    inside, outside = (region, contextlib.nullcontext) if is_inside else (contextlib.nullcontext, region)

    def trained(model: nn.Module) -> Trained:
        def forward(x: Tensor) -> Tensor:
            with outside():
                return model(x)

        SEEN.clear()
        return train(model, BATCHES, forward=forward)

    before = around()
    expected, states = trained(built(Stack, inside)), set(SEEN)
    with outside():
        model = recomputing_all(built(Stack, inside))
    assert_same_training(trained(model), expected)
    assert set(SEEN) == states
    assert len(SEEN) > 2 * len(BATCHES)  # the submodule again in the backward, which is behind the region
    assert around() == before


def test_a_call_under_autocast_of_another_kind_than_the_plan_is_for_is_refused_by_the_plan():
    """A function may look, or the forward go to another device."""
    with torch.autocast("cpu", torch.bfloat16):
        model = Rockmate(built(Stack, contextlib.nullcontext), BATCHES[0], 1.0, loss=squares, shapes="error")
        message = r"autocast is on for cpu \(bfloat16\) and on for xpu \(float16\), but was on for cpu \(b"
        with torch.autocast("xpu", torch.float16), pytest.raises(PlanMismatch, match=message):
            model(BATCHES[0])
        with torch.autocast("cpu", cache_enabled=False), pytest.raises(PlanMismatch, match="without its cache"):
            model(BATCHES[0])
        assert model(BATCHES[0]).requires_grad
