"""Calls of other sizes than those that were planned: the same bits, within the budget, and nothing planned anew."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rk_solvers import Limits
from rkgb.devices.allocation_log import AllocationLog
from rockmate import Rockmate
from rockmate.calls import improvements
from rockmate.errors import PlanMismatch
from rockmate.families.control import gives_the_same
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest
from rockmate.runtime.step import Step
from tests.module.steps import FEW_ROUNDS, assert_same_step, squares
from tests.where import here, placed

WIDTH = 16


class Attention(nn.Module):
    """Blocks of attention with dropout, whose mask is made of the length."""

    def __init__(self, layers=2, positions=64):
        super().__init__()
        self.positions = nn.Embedding(positions, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)}
            )
            for _ in range(layers)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        x = x + self.positions(torch.arange(length, device=x.device))
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            query, key, value = (
                part.view(batch, length, 2, -1).transpose(1, 2) for part in layer["qkv"](layer["norm"](x)).chunk(3, -1)
            )
            scores = (query @ key.transpose(-1, -2) / query.size(-1) ** 0.5).masked_fill(~mask, -1e9)
            mixed = F.dropout(scores.softmax(-1), 0.1, self.training) @ value
            x = x + F.dropout(layer["out"](mixed.transpose(1, 2).reshape(batch, length, -1)), 0.1, self.training)
        return x


class Convolutions(nn.Module):
    """Images of any size: convolutions with batch normalisation, pooling, and a head that is over all places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.second = nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.second(self.first(x)).mean((2, 3)))


class Asks(nn.Module):
    """Decides by the length, computes with it, and cuts to a multiple of four."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        length = x.shape[1]
        x = torch.tanh(self.first(x))
        if length > 20:
            x = x * 2
        x = x[:, : length // 4 * 4]
        return torch.tanh(self.second(x)) / length


class WithoutTracer(nn.Module):
    """Takes another way at one length, where no tracer is at work: as position embeddings that are not interpolated."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if torch.jit.is_tracing() or x.shape[1] != 12:
            x = x * 3
        return torch.tanh(self.second(x))


def lengths_of(width=WIDTH):
    return lambda length, batch=4: placed(torch.randn(batch, length, width))


def images(size, batch=4):
    return placed(torch.randn(batch, 3, size, size))


def assert_trains_as_eager(model, batches, budget=0.7, peaks=True):
    """Steps on all batches, with their bits; returns the planned module."""
    eager, module = copy.deepcopy(model), Rockmate(model, budget=budget, loss=squares, limits=FEW_ROUNDS)
    for number, batch in enumerate(batches):
        assert_same_step(module, eager, batch, number)
    for batch in batches if peaks else ():
        module.zero_grad()
        with AllocationLog(here()) as log:  # of the step alone: its plan is there
            squares(module(batch)).backward()
        assert log.peak_bytes <= module.plan.budget_bytes
    return module


@pytest.fixture(autouse=True)
def quietly():
    with warnings.catch_warnings():
        for told in ("once more", "while a profiler runs"):
            warnings.filterwarnings("ignore", message=f".*was planned {told}")
        yield


@pytest.mark.parametrize(
    ("model", "made", "planned", "others"),
    [
        (Attention, lengths_of(), (40, 12, 24), (13, 39, 12, 25, 31, 40, 18)),
        (Convolutions, images, (24, 12, 18), (14, 22, 20, 12, 16)),
        (Asks, lengths_of(), (40, 24, 32), (36, 28, 40, 24)),
    ],
)
def test_three_sizes_are_planned_and_hold_for_others(model, made, planned, others):
    torch.manual_seed(0)
    module = assert_trains_as_eager(placed(model()), [made(size) for size in (*planned, *others)])
    assert len(module._family.members) == len(planned)


def test_another_answer_to_what_python_asks_is_a_plan_of_its_own():
    torch.manual_seed(0)
    sizes = (40, 24, 32, 28, 20, 12)  # the last two are not above 20
    module = assert_trains_as_eager(Asks(), [lengths_of()(size) for size in sizes])
    assert len(module._family.members) == 5


def test_what_is_done_where_nobody_traces_is_seen_too():
    torch.manual_seed(0)
    batches = [lengths_of()(size) for size in (20, 8, 16, 10, 12, 13, 12)]
    module = assert_trains_as_eager(WithoutTracer(), batches, budget=0.9)
    assert len(module._family.members) == 4


def test_what_a_size_is_cut_to_is_seen_in_the_first_step():
    torch.manual_seed(0)
    module = assert_trains_as_eager(Asks(), [lengths_of()(size) for size in (40, 24, 32, 36, 33, 28, 39)])
    assert len(module._family.members) == 5


def test_odd_sizes_of_what_is_halved_are_planned_by_themselves():
    torch.manual_seed(0)
    module = assert_trains_as_eager(Convolutions(), [images(size) for size in (24, 12, 18, 16, 13, 17)])
    assert len(module._family.members) == 5


def test_a_last_short_batch_and_lengths_vary_together():
    torch.manual_seed(0)
    sizes = [(40, 4), (12, 4), (24, 4), (30, 4), (20, 3), (33, 3), (17, 2), (18, 4)]
    module = assert_trains_as_eager(Attention(), [lengths_of()(length, batch) for length, batch in sizes])
    assert len(module._family.members) <= 4


def test_one_row_and_no_row_are_as_eager_has_them():
    torch.manual_seed(0)
    batches = [lengths_of()(length) for length in (40, 12, 24, 30)] + [
        torch.randn(1, 16, WIDTH),
        torch.randn(4, 1, WIDTH),
    ]
    assert_trains_as_eager(Attention(), batches, peaks=False)


def test_a_length_beyond_the_positions_raises_what_the_module_raises():
    torch.manual_seed(0)
    module = assert_trains_as_eager(Attention(positions=40), [lengths_of()(length) for length in (40, 12, 24, 30)])
    with pytest.raises(IndexError, match="out of range"):
        module(torch.randn(4, 41, WIDTH))
    assert_same_step(module, copy.deepcopy(module.original), lengths_of()(31), 5)


@pytest.mark.slow
def test_what_is_found_in_the_background_is_taken_between_steps(monkeypatch):
    torch.manual_seed(0)
    model = Attention(layers=4)
    eager = copy.deepcopy(model)
    monkeypatch.setattr(improvements, "is_wanted", lambda request: True)
    module = Rockmate(model, budget=0.5, loss=squares, limits=Limits(rounds=0))
    searched = module._family._by_size.improvements._search
    for number, length in enumerate((40, 24, 32, 36, 39, 28, 38, 40, 37, 32, 40, 38)):
        batch = lengths_of()(length)
        while searched.is_busy and not searched._process.answered():
            time.sleep(0.05)
        assert_same_step(module, eager, batch, number)
        with AllocationLog(here()) as log:  # a second step like it: by the plan alone
            squares(module(batch)).backward()
        assert not searched.is_busy or log.peak_bytes <= module.plan.budget_bytes
    plans = [plans for plans, _ in module._family._by_size._families.values() if plans is not None][-1]
    assert plans._searched
    searched.close()
    assert not searched.is_busy


@pytest.mark.parametrize("end", [PlanMismatch("saved another tensor"), RuntimeError("shape is invalid")])
def test_whatever_a_first_step_of_new_sizes_ends_with_the_call_is_planned_by_itself(end, monkeypatch):
    torch.manual_seed(0)
    module = assert_trains_as_eager(Attention(), [lengths_of()(length) for length in (40, 12, 24, 30)])
    planned = len(module._family.members)

    def refused(self, name, value):
        raise end

    monkeypatch.setattr(Step, "check_shape", refused)
    assert_same_step(module, copy.deepcopy(module.original), lengths_of()(31), 5)
    assert len(module._family.members) == planned + 1


@pytest.mark.parametrize("error", [RuntimeError("attn_bias is not correctly aligned"), ValueError("size")])
def test_a_step_of_new_sizes_that_fails_is_none_of_the_module(error):
    model = Attention().train()
    measured = measure(model, torch.randn(2, 8, WIDTH), PlanRequest(None, squares))

    def failing(*args, **kwargs):
        raise error

    failing.original = model
    assert not gives_the_same(model, failing, measured, measured.sample, squares)
    assert gives_the_same(model, model, measured, measured.sample, squares)
