"""Deep models: what modules nested hundreds deep and long chains take."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from rkgb import make_sample
from rkgb.pipeline import exact_trace
from rkgb.state.module_state import for_planning


class Nested(nn.Module):
    """One call in another; each level does something of its own."""

    def __init__(self, inner: nn.Module, weighted: bool) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(0.5)) if weighted else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale) + 1


def nested(depth: int, weighted: bool = True) -> nn.Module:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(depth):
        model = Nested(model, weighted)
    return model


@pytest.mark.parametrize("weighted", [False, True])
def test_modules_nested_as_deep_as_python_runs_them_are_traced(weighted, monkeypatch):
    monkeypatch.setattr(torch.jit, "trace", None)  # which takes the cube of their depth
    model = nested(220, weighted)
    sample = make_sample(model, torch.randn(2, 4))
    before = sys.getrecursionlimit()
    with for_planning(model):
        basic, _ = exact_trace(model, sample)
    assert sys.getrecursionlimit() == before
    assert len(basic.nodes) >= 2 * 220
