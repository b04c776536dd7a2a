"""Each case of `cases.py` taken through the stages once, for all the tests that look at it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from rkgb import AllGraphs, DGraph
from tests.graph.cases import CASES
from tests.graph.programs import bytes_of, graphs_of, state_of, traced, with_gradients


@dataclass(frozen=True)
class Examined:
    """What was before, what came out, what was after."""

    module: nn.Module
    sample: Any
    graph: DGraph  # of the trace as it came, composite operations left whole
    graphs: AllGraphs
    before: dict[str, Any]
    after_tracing: dict[str, Any]
    after_all: dict[str, Any]


@cache
def examined(name: str) -> Examined:
    """The case of that name; its module has gradients as in the middle of training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, sample = CASES[name]()
        with_gradients(module)
        before = everything(module, sample)
        graph = traced(module, sample)
        after_tracing = everything(module, sample)
        graphs = graphs_of(module, sample)
        return Examined(module, sample, graph, graphs, before, after_tracing, everything(module, sample))


def everything(module: nn.Module, sample: Any) -> dict[str, Any]:
    """The state of the module and of the sample."""
    tensors = torch.utils._pytree.tree_leaves(sample)
    return {
        **state_of(module),
        "sample": [(id(t), bytes_of(t), t.grad) for t in tensors if isinstance(t, torch.Tensor)],
    }
