"""From a module and a sample to all its graphs: the whole story on one screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.bgraph import BGraph, LeafKind
from rkgb.cut import Block, cut
from rkgb.dgraph import DGraph, b_to_d
from rkgb.equivalence import equivalent_classes
from rkgb.errors import ReplayMismatch, TraceError
from rkgb.expand import expand_composites
from rkgb.kgraph import KGraph, s_to_k
from rkgb.measure import measure_blocks
from rkgb.replay import replay_check
from rkgb.sample import Sample, make_sample
from rkgb.sgraph import SGraph, d_to_s
from rkgb.state import autocast_in_force, training_mode
from rkgb.trace import trace

Stage = Callable[[str, int, int], None]
"""Told of progress: the stage's name, how many of its parts are done, and how many there are."""


@dataclass(eq=False, slots=True)
class AllGraphs:
    """Every graph of one module on one sample."""

    B_graph: BGraph
    D_graph: DGraph
    S_graph: SGraph
    blocks: list[Block]
    equivalent_classes: list[list[int]]  # indices of blocks that are the same but for names
    K_graph: KGraph


def make_all_graphs(
    model: torch.nn.Module,
    sample: Any,
    model_kwargs: dict[str, Any] | None = None,
    *,
    on_stage: Stage | None = None,
) -> AllGraphs:
    """Trace, inspect, simplify, cut and measure `model` in training mode on `sample`.

    `sample` is a tensor, a tuple of positional arguments or a dict of keyword arguments. The model
    is left as it was: modes, buffers, gradients, random streams. Raises `SampleError` for a sample
    that does not fit, `TraceError` for a module that cannot be traced exactly.
    """
    tell = on_stage or (lambda name, done, total: None)
    arguments = make_sample(model, sample, model_kwargs)
    kind = autocast_in_force({tensor.device for tensor in (*model.parameters(), *arguments.tensors)})
    if kind is not None:
        raise TraceError(
            f"autocast is on for {kind}: graphs of a module under autocast are not supported yet. Leave the autocast "
            "region, or convert the module to the lower precision."
        )
    with training_mode(model):
        tell("trace", 0, 4)
        basic, dataflow = _exact_trace(model, arguments, tell)
        simplified = d_to_s(dataflow)
        blocks = cut(simplified)
        profiles = measure_blocks(simplified, blocks, model, arguments, on_stage)
        tell("measure", len(blocks), len(blocks))
        backward = s_to_k(simplified, blocks, profiles)
    return AllGraphs(basic, dataflow, simplified, blocks, equivalent_classes(dataflow, blocks), backward)


def _exact_trace(model: torch.nn.Module, sample: Sample, tell: Stage) -> tuple[BGraph, DGraph]:
    """The finest trace that the replay check accepts."""
    # On copies: a forward that writes into its input would change the user's data at each run.
    composite = trace(model, sample.copy())
    tell("trace", 1, 4)
    coarse = b_to_d(composite, model, sample.copy())
    _refuse_input_writes(model, coarse)
    tell("trace", 2, 4)
    fine = expand_composites(composite, model, sample)
    tell("trace", 3, 4)
    basic, dataflow = composite, coarse
    if len(fine.nodes) > len(composite.nodes):
        basic, dataflow = fine, b_to_d(fine, model, sample)
    try:
        replay_check(dataflow, model, sample)
    except ReplayMismatch:
        if basic is composite:
            raise
        basic, dataflow = composite, coarse
        replay_check(dataflow, model, sample)
    tell("trace", 4, 4)
    return basic, dataflow


def _refuse_input_writes(model: torch.nn.Module, graph: DGraph) -> None:
    for op in graph:
        for name in op.written:
            leaf = graph.leaves.get(graph.owner(name))
            if leaf is not None and leaf.kind is LeafKind.INPUT:
                raise TraceError(
                    f"{op.name} ({op.source}) writes into input {leaf.index} of {type(model).__name__} in place: "
                    "running it again would start from changed data. Clone the input first in forward."
                )
