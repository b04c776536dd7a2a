"""Modules whose calls leave them as they were: their traces are compared with them without a call in between."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb.ir.sample import make_sample
from rkgb.replay.first_call import left_as_it_was
from tests.graph.programs import rows

CHANGES = {
    "append": lambda m: m.held.append(1.0),
    "count": lambda m: setattr(m.held, "calls", m.held.calls + 1),
    "count deeper": lambda m: setattr(m.held.inner[0], "calls", m.held.inner[0].calls + 1),
    "entry": lambda m: m.held.update(last=len(m.held) + m.held.get("last", 0)),
    "attribute": lambda m: setattr(m, "held", m.held + 1),
    "tensor in place": lambda m: m.held[0].add_(1),
}


class Holding(nn.Module):
    """Holds something, to which each call does something."""

    def __init__(self, held, change=None):
        super().__init__()
        self.layer, self.held, self.change = nn.Linear(4, 4), held, change

    def forward(self, x):
        if self.change is not None:
            CHANGES[self.change](self)
        return self.layer(x)


def is_still(model):
    with left_as_it_was(model, make_sample(model, rows())) as first:
        return first.is_still


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()),
        Holding([1.0, {"a": (2, "b")}]),
        Holding(SimpleNamespace(calls=1, dtype=torch.float32, act=F.gelu)),
        Holding([torch.ones(2)]),
    ],
)
def test_what_calls_leave_alone_is_still(model):
    assert is_still(model)


@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm1d(4),
        Holding([], "append"),
        Holding(SimpleNamespace(calls=0), "count"),
        Holding(SimpleNamespace(inner=[SimpleNamespace(calls=0)]), "count deeper"),
        Holding({}, "entry"),
        Holding(0, "attribute"),
        Holding([torch.zeros(2)], "tensor in place"),
    ],
)
def test_what_calls_change_is_not(model):
    assert not is_still(model)


def enclosing(number):
    return lambda: number


@pytest.mark.parametrize("held", [itertools.count(), enclosing(3), iter([1, 2])])
def test_what_cannot_be_looked_into_is_taken_to_change(held):
    assert not is_still(Holding(held))
