"""S graph: one node per freshly filled storage, together with its views and in-place operations.

A node is the unit of recomputation: running its operations again gives its storages their bytes
again. Views of parameters, buffers and inputs cost nothing and belong to whoever uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rkgb.errors import GraphError
from rkgb.ir.dgraph import DGraph, DNode


@dataclass(eq=False, slots=True)
class SNode:
    """A real operation with its body: views, in-place operations, shapes of the same storages."""

    name: str
    ops: list[DNode]  # in traced order; the first one fills a storage
    data: list[str]  # owners of the storages that it fills
    deps: dict[SNode, None] = field(default_factory=dict, repr=False)  # ordered set
    users: dict[SNode, None] = field(default_factory=dict, repr=False)  # ordered set
    keep_reason: str = ""  # why it must not run twice; empty when it may

    @property
    def recomputable(self) -> bool:
        """Whether running it a second time gives the same values and no side effect."""
        return not self.keep_reason

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return any(op.is_random for op in self.ops)

    def __str__(self) -> str:
        calls = " ".join(op.call.op_name for op in self.ops)
        reads = ", ".join(dep.name for dep in self.deps) or "nothing"
        fills = ", ".join(self.data) or "nothing"
        once = f"; runs once: {self.keep_reason}" if self.keep_reason else ""
        return f"%{self.name} = {calls}; reads {reads}; fills {fills}{once}"


@dataclass(eq=False, slots=True)
class SGraph:
    """Nodes in topological order, and the operations that fill no storage of their own."""

    dgraph: DGraph
    nodes: list[SNode]
    leaf_views: list[DNode]  # views of parameters, buffers, inputs, constants
    effects: list[DNode]  # in-place writes to them, such as a step counter; and guards

    def __iter__(self) -> Iterator[SNode]:
        return iter(self.nodes)

    def __str__(self) -> str:
        lines = [f"S graph: {len(self.nodes)} nodes"]
        lines += [f"  {node}" for node in self.nodes]
        for title, ops in (("views of leaves", self.leaf_views), ("effects", self.effects)):
            if ops:
                lines += [f"{title}:", *(f"  %{op.name} = {op.call.op_name}" for op in ops)]
        return "\n".join(lines)

    def producer_of(self) -> dict[str, SNode]:
        """For each value defined by a node, that node."""
        return {name: node for node in self.nodes for op in node.ops for name in op.output_names}

    def requires_grad(self, node: SNode) -> bool:
        """Whether autograd records the node."""
        return any(self.dgraph.values[name].requires_grad for op in node.ops for name in op.output_names)

    def verify(self) -> None:
        """Check topological order, ownership and that every operation has one place."""
        done: set[SNode] = set()
        placed = [op.name for op in (*self.leaf_views, *self.effects)]
        for node in self.nodes:
            if not node.data or not node.ops:
                raise GraphError(f"S node {node.name} fills no storage. Its operations belong to another node.")
            for dep in node.deps:
                if dep not in done:
                    raise GraphError(f"S node {node.name} comes before {dep.name}, which it needs. Sort the nodes.")
            done.add(node)
            placed += [op.name for op in node.ops]
        if sorted(placed) != sorted(op.name for op in self.dgraph):
            raise GraphError("an operation of D has no place in S, or two. Group every operation exactly once.")
