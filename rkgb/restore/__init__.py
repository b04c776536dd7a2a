"""How a forgotten tensor comes back.

Each way has a file, and an entry in `KINDS`: what measures, plans, writes code and runs it asks `Restoration` alone.
That data are kept, and that operations run again, are ways as well, which every node has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.kgraph import KGraph
from rkgb.ir.profiles import OpProfile
from rkgb.ir.restoration import Restoration
from rkgb.ir.sgraph import SNode
from rkgb.restore.batch_norm import BatchNormStatistics
from rkgb.restore.kept import Kept, never_forgotten
from rkgb.restore.packed_mask import PackedMask
from rkgb.restore.pool_indices import WindowIndices
from rkgb.restore.recomputed import Recomputed

KINDS: list[type[Restoration]] = [PackedMask, WindowIndices, BatchNormStatistics]
"""The ways beside keeping and repeating, those that are asked first before the others."""


def prepared(graph: DGraph) -> DGraph:
    """The graph with all that the ways need as operations of their own."""
    for kind in KINDS:
        graph = kind.prepared(graph)
    return graph


def restorations(
    graph: DGraph, nodes: Iterable[SNode], profiles: Mapping[str, OpProfile]
) -> dict[SNode, tuple[Restoration, ...]]:
    """For those of `nodes` that have any, the ways beside keeping and repeating, at most one for each operation."""
    found: dict[SNode, tuple[Restoration, ...]] = {}
    for node in nodes:
        chosen: list[Restoration] = []
        covered: set[DNode] = set()
        for way in sorted((way for kind in KINDS for way in kind.find(graph, node, profiles)), key=_after_whole):
            if covered.isdisjoint(way.ops(node)):
                chosen.append(way)
                covered.update(way.ops(node))
        if chosen:
            found[node] = tuple(chosen)
    return found


def _after_whole(way: Restoration) -> bool:
    """Orders ways for single operations after those that stand for whole nodes."""
    return not way.of_node


def ways_back(graph: KGraph) -> dict[SNode, tuple[Restoration, ...]]:
    """For each node of the forward the ways that stand for its operations, and `Kept` where they may not be taken."""
    once = never_forgotten(graph)
    found: dict[SNode, tuple[Restoration, ...]] = {}
    for comp in graph.forward:
        ways = graph.restorations.get(comp.node, ())
        covered = {op for way in ways for op in way.ops(comp.node)}
        others = tuple(op.name for op in comp.node.ops if op not in covered)
        repeated = (Recomputed(others),) if others else ()
        found[comp.node] = (*((Kept(),) if comp.node in once else ()), *ways, *repeated)
    return found
