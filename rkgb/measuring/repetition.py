"""What it takes to have again what a block's operations make, where that is not running them again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo

from rkgb.call import Ref
from rkgb.compact import TwoValues, compact_forms
from rkgb.cut import Block
from rkgb.dgraph import DGraph, DNode, run_nodes
from rkgb.errors import GraphError
from rkgb.measuring.block_run import Observer, run_block, stand_ins
from rkgb.normalisation import normalised, statistics_among, takes_statistics

_TIMED_RUNS = 5


def times_from_forms(graph: DGraph, block: Block) -> dict[str, float]:
    """For each node whose data have a smaller form: the time in ms of making that form and reading it.

    Raises `GraphError` if a form does not give back what it was made of.
    """
    found: dict[str, float] = {}
    for node, form in compact_forms(graph, block.nodes).items():
        values: dict[str, Any] = {}
        with torch.no_grad():
            run_nodes(node.ops, values, [node.ops[-1].output_names[0]])
        (tensor,) = values.values()
        given_back, found[node.name] = _timed(partial(_there_and_back, form, tensor))
        if not torch.equal(given_back, tensor):
            raise GraphError(f"the bits that stand for what {node.name} draws do not give it back.")
    return found


def times_from_statistics(graph: DGraph, block: Block, values: dict[str, Any]) -> dict[str, float]:
    """For each batch normalisation that its statistics give again bit by bit: the time in ms of that.

    `values` are what the block reads, by name.
    """
    if not any(takes_statistics(graph, op) for op in block.ops):
        return {}
    observer = _Normalising(graph)
    with torch.autograd.graph.saved_tensors_hooks(observer.pack, lambda saved: saved):
        run_block(graph, block, stand_ins(graph, block, values), observer, forward_only=True)
    return observer.times_ms


def _there_and_back(form: TwoValues, tensor: torch.Tensor) -> torch.Tensor:
    return form.unpack(form.pack(tensor))


class _Normalising(Observer):
    """Repeats each batch normalisation from what it saved, and compares."""

    def __init__(self, graph: DGraph) -> None:
        self._graph = graph
        self._saved: list[torch.Tensor] = []
        self.times_ms: dict[str, float] = {}

    @_disable_dynamo  # it is no part of the compiled submodules that save
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.append(tensor.detach())
        return tensor

    def before_op(self, op: DNode) -> None:
        self._saved = []

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        saved, self._saved = self._saved, []
        if not takes_statistics(self._graph, op):
            return
        given = [values[arg.name] if isinstance(arg, Ref) else None for arg in op.call.args[:5]]
        found = statistics_among(saved, [tensor for tensor in given if tensor is not None])
        if len(found) != 2:
            return
        x, weight, bias = given[:3]
        assert x is not None
        output = values[op.output_names[0]]
        with torch.no_grad():
            again, time_ms = _timed(lambda: normalised(x, weight, bias, *found))
            same = again.stride() == output.stride() and torch.equal(again, output)
            del again
            if same and _repeats_for_all(x, weight, bias):
                self.times_ms[op.name] = time_ms


def _repeats_for_all(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether statistics give the output again for other parameters too.

    A model starts with weights of one and biases of zero, with which any order of the products and sums gives the same.
    """
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        None if given is None else torch.randn(given.shape, dtype=given.dtype, generator=generator)
        for given in (weight, bias)
    )
    output, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
    return torch.equal(normalised(x, weight, bias, mean, inverse), output)


def _timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    times_ms = []
    for _ in range(_TIMED_RUNS):
        result = None  # its bytes are free again
        started = time.perf_counter()
        result = run()
        times_ms.append((time.perf_counter() - started) * 1e3)
    assert result is not None
    return result, statistics.median(times_ms)
