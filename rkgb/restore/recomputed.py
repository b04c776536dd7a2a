"""Operations run again, on the random numbers that they drew in the forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rkgb.devices.registry import device_of
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.restoration import CodeWriter, Restoration
from rkgb.ir.sgraph import SNode


@dataclass(frozen=True, slots=True)
class Recomputed(Restoration):
    """Operations of a node run again. Their time is measured with that of the whole node, by `rkgb.profile`."""

    names: tuple[str, ...]  # of the operations

    def ops(self, node: SNode) -> list[DNode]:
        return [op for op in node.ops if op.name in self.names]

    def kept_bytes(self, graph: DGraph, node: SNode, sizes_bytes: Mapping[str, int]) -> int:
        random = [op.output_names[0] for op in self.ops(node) if op.is_random]
        return sum(device_of(graph.values[name].device).random_state_bytes for name in random)

    def lines(self, op: DNode, key: str, last: bool, code: CodeWriter) -> list[str]:
        return code.repeated(op)
