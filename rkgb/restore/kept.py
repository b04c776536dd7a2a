"""Data that are never forgotten: what made them must run once, or what autograd saved cannot be given back by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.kgraph import KGraph
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.profiles import SavedKind
from rkgb.ir.restoration import CodeWriter, Restoration
from rkgb.ir.sgraph import SNode


@dataclass(frozen=True, slots=True)
class Kept(Restoration):
    """Data that stay until they are read for the last time: nothing is kept beside them, and nothing is computed."""

    of_node: ClassVar[bool] = True
    comes_back: ClassVar[bool] = False

    def kept_bytes(self, graph: DGraph, node: SNode, sizes_bytes: Mapping[str, int]) -> int:
        return 0

    def lines(self, op: DNode, key: str, last: bool, code: CodeWriter) -> list[str]:
        return []


def never_forgotten(graph: KGraph) -> set[SNode]:
    """Nodes that must run once: by their nature, or because what they save cannot be given back by hand."""
    once = {comp.node for comp in graph.forward if not comp.node.recomputable}
    producer = {name: comp.node for comp in graph.forward for name in comp.node.data}
    for comp in graph.forward:
        for op in comp.node.ops:
            profile = graph.op_profiles[op.name]
            # With other data, such a call saves other tensors: none of those that it saves is told by its place.
            varies = isinstance(op.call.function, OpaqueCall) and op.call.function.traits.reads_data
            for saved in profile.saved:
                if varies or not saved.refillable:
                    once.add(comp.node if saved.kind is SavedKind.PHANTOM else producer.get(saved.source, comp.node))
    return once
