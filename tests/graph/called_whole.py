"""Modules that call others as one operation, and what their graphs say of that."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkgb
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.sample import make_sample
from rkgb.replay.replay import record_step, run_graph

WIDTH = 8


class Mix(nn.Module):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(p)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Around(nn.Module):
    """Calls `inner` between two layers, as `call` says."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(inner)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        for inner in self.inner:
            x = self.call(inner, x)
        return self.last(x)

    def call(self, inner: nn.Module, x: Tensor) -> Tensor:
        return inner(x)


def sample() -> Tensor:
    return torch.randn(6, WIDTH)


def traced(model: nn.Module, *opaque: nn.Module, given: object = None) -> rkgb.AllGraphs:
    """All graphs by the first front end that is exact, which the recorder is, too: run once more, and compared."""
    given = sample() if given is None else given
    arguments = make_sample(model, given)
    for tracer in ("record", "auto"):
        graphs = rkgb.make_all_graphs(model, given, opaque=opaque or [model.inner], tracer=tracer)
        own = graphs.D_graph.generators
        model.train()
        expected = record_step(model, arguments.copy(), lambda data: data.call(model), 3, own=own)
        found = record_step(
            model, arguments.copy(), lambda data, g=graphs.D_graph: run_graph(g, model, data), 3, own=own
        )
        assert found.first_difference(expected) is None
    return graphs


def calls(graphs: rkgb.AllGraphs) -> list[rkgb.DNode]:
    return [op for op in graphs.D_graph if isinstance(op.call.function, OpaqueCall)]


def reasons(graphs: rkgb.AllGraphs) -> list[str]:
    whole = set(calls(graphs))
    return [node.keep_reason for node in graphs.S_graph if not whole.isdisjoint(node.ops)]
