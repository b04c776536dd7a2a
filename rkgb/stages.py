"""The stages one by one, under the names that users of such graphs know."""
# ruff: noqa: N802, the graphs are called B, D, S and K

from __future__ import annotations

from typing import Any

import torch

from rkgb.capture.trace import Tracer
from rkgb.ir.bgraph import BGraph
from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DGraph
from rkgb.ir.kgraph import KGraph
from rkgb.ir.sample import make_sample
from rkgb.ir.sgraph import SGraph
from rkgb.passes.b_to_d import b_to_d
from rkgb.passes.cut import chain, cut
from rkgb.passes.d_to_s import d_to_s
from rkgb.passes.equivalence import equivalent_classes
from rkgb.passes.s_to_k import s_list_to_k_list, s_to_k
from rkgb.pipeline import exact_trace
from rkgb.profile.measure import measure_blocks
from rkgb.state.module_state import training_mode


def make_B(
    model: torch.nn.Module, sample: Any, model_kwargs: dict[str, Any] | None = None, *, tracer: Tracer = "auto"
) -> BGraph:
    """What `model` runs on `sample` in training, as a list of calls that was checked by a replay on other data.

    Raises `SampleError` and `TraceError` as `make_all_graphs` does.
    """
    with training_mode(model):
        return exact_trace(model, make_sample(model, sample, model_kwargs), tracer)[0]


def B_to_D(graph: BGraph, model: torch.nn.Module, sample: Any, model_kwargs: dict[str, Any] | None = None) -> DGraph:
    """The data flow of `graph`, inspected on `sample` and without dead code."""
    with training_mode(model):
        return b_to_d(graph, model, make_sample(model, sample, model_kwargs))


def D_to_S(graph: DGraph) -> SGraph:
    """One node per freshly filled storage. `rkgb.passes.d_to_s.STEPS` are what it consists of."""
    return d_to_s(graph)


def S_to_K(graph: SGraph, model: torch.nn.Module, sample: Any, model_kwargs: dict[str, Any] | None = None) -> KGraph:
    """Forward and backward computations with times and bytes measured on `sample`."""
    blocks = cut(graph, chain(graph).skip_values)
    with training_mode(model):
        profiles = measure_blocks(graph, blocks, model, make_sample(model, sample, model_kwargs))
    return s_to_k(graph, blocks, profiles)


def S_list_to_K_list_eco(
    blocks: list[Block],
    graph: SGraph,
    model: torch.nn.Module,
    sample: Any,
    model_kwargs: dict[str, Any] | None = None,
) -> tuple[list[KGraph], list[list[int]]]:
    """The K graph of each of `blocks`, a cut of `graph`, and the classes of equivalent ones.

    One block of each class is measured: that is the economy.
    """
    with training_mode(model):
        profiles = measure_blocks(graph, blocks, model, make_sample(model, sample, model_kwargs))
    return s_list_to_k_list(graph, blocks, profiles), equivalent_classes(graph.dgraph, blocks)
