"""S graph: one node per freshly filled storage, together with its views and in-place operations.

A node is the unit of recomputation: running its operations again gives its storages their bytes
again. Views of parameters, buffers and inputs cost nothing and belong to whoever uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx
import torch

from rkgb.dgraph import DGraph, DNode
from rkgb.errors import GraphError

# Run without gradients, as recomputation is, they leave out the workspace that their backward reads.
_DEPEND_ON_GRADIENT_MODE = frozenset({"aten::mkldnn_rnn_layer"})


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


@dataclass(eq=False, slots=True)
class SGraph:
    """Nodes in topological order, and the operations that fill no storage of their own."""

    dgraph: DGraph
    nodes: list[SNode]
    leaf_views: list[DNode]  # views of parameters, buffers, inputs, constants
    effects: list[DNode]  # in-place writes to them, such as a step counter

    def __iter__(self) -> Iterator[SNode]:
        return iter(self.nodes)

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


def d_to_s(graph: DGraph) -> SGraph:
    """Group the operations of `graph` by the storage that they fill."""
    grouping = _group_by_storage(graph)
    leaf_views: list[DNode] = []
    effects: list[DNode] = []
    members: dict[str, list[DNode]] = {}
    for op in graph:
        root = grouping.group_of(op)
        if root is not None:
            members.setdefault(root, []).append(op)
        elif op.written:
            effects.append(op)
        else:
            leaf_views.append(op)
    members = _merge_cycles(graph, members)
    nodes = {root: _make_node(graph, ops) for root, ops in members.items()}
    ordered = _connect_and_sort(graph, list(nodes.values()), leaf_views)
    _mark_unrepeatable(graph, ordered, effects, leaf_views)
    result = SGraph(graph, ordered, leaf_views, effects)
    result.verify()
    return result


class _Grouping:
    """Disjoint sets of storages, named by their owners."""

    def __init__(self, graph: DGraph) -> None:
        self._graph = graph
        self._parent: dict[str, str] = {}

    def root(self, owner: str) -> str:
        self._parent.setdefault(owner, owner)
        while self._parent[owner] != owner:
            self._parent[owner] = self._parent[self._parent[owner]]
            owner = self._parent[owner]
        return owner

    def unite(self, owners: list[str]) -> None:
        for owner in owners[1:]:
            self._parent[self.root(owner)] = self.root(owners[0])

    def storages(self, op: DNode) -> list[str]:
        """Owners of the storages that `op` fills, views or writes, leaves' left out."""
        owners = dict.fromkeys(self._graph.owner(name) for name in (*op.output_names, *op.written))
        return [owner for owner in owners if owner not in self._graph.leaves]

    def group_of(self, op: DNode) -> str | None:
        storages = self.storages(op)
        return self.root(storages[0]) if storages else None


def _group_by_storage(graph: DGraph) -> _Grouping:
    grouping = _Grouping(graph)
    last_write: dict[str, int] = {}
    for position, op in enumerate(graph):
        grouping.unite(grouping.storages(op))
        for name in op.written:
            last_write[graph.owner(name)] = position
    # Who reads a storage before its last write reads a value that recomputation would not give
    # again: it joins the storage's node, so that reads and writes are repeated together.
    for position, op in enumerate(graph):
        storages = grouping.storages(op)
        for name in op.call.inputs:
            owner = graph.owner(name)
            if storages and owner not in graph.leaves and position < last_write.get(owner, -1):
                grouping.unite([owner, *storages])
    return grouping


def _merge_cycles(graph: DGraph, members: dict[str, list[DNode]]) -> dict[str, list[DNode]]:
    """An in-place operation that reads what came from its own target makes a cycle: one node."""
    group = {name: root for root, ops in members.items() for op in ops for name in op.output_names}
    edges = nx.DiGraph()
    edges.add_nodes_from(members)
    for root, ops in members.items():
        for op in ops:
            edges.add_edges_from((group[name], root) for name in op.call.inputs if group.get(name, root) != root)
    position = {op.name: index for index, op in enumerate(graph)}
    merged: dict[str, list[DNode]] = {}
    for component in nx.strongly_connected_components(edges):
        ops = [op for root in component for op in members[root]]
        merged[min(component)] = sorted(ops, key=lambda op: position[op.name])
    return merged


def _make_node(graph: DGraph, ops: list[DNode]) -> SNode:
    owners = dict.fromkeys(graph.owner(name) for op in ops for name in op.output_names)
    data = [owner for owner in owners if owner not in graph.leaves]
    return SNode(ops[0].name, ops, data)


def _connect_and_sort(graph: DGraph, nodes: list[SNode], leaf_views: list[DNode]) -> list[SNode]:
    producer = {name: node for node in nodes for op in node.ops for name in op.output_names}
    position = {op.name: index for index, op in enumerate(graph)}
    edges = nx.DiGraph()
    edges.add_nodes_from(nodes)
    for node in nodes:
        for op in node.ops:
            edges.add_edges_from((producer[n], node) for n in op.call.inputs if producer.get(n, node) is not node)
    ordered = list(nx.lexicographical_topological_sort(edges, key=lambda node: position[node.ops[0].name]))
    for node in ordered:
        for op in node.ops:
            for name in op.call.inputs:
                dep = producer.get(name, node)
                if dep is not node:
                    node.deps[dep] = None
                    dep.users[node] = None
    return ordered


def _mark_unrepeatable(graph: DGraph, nodes: list[SNode], effects: list[DNode], leaf_views: list[DNode]) -> None:
    """Name the nodes that must run once, and why."""
    everything = [op for node in nodes for op in node.ops] + effects + leaf_views
    rewritten = {
        graph.owner(name)
        for op in everything
        if not repeats_without_statistics(op)
        for name in op.written
        if graph.owner(name) in graph.leaves
    }
    for node in nodes:
        for op in node.ops:
            if not isinstance(op.call.function, torch._ops.OpOverload):
                node.keep_reason = f"{op.call.op_name} is a custom function, which may keep tensors of its own"
            elif op.call.function._schema.name in _DEPEND_ON_GRADIENT_MODE:
                node.keep_reason = f"{op.name} gives nothing to its backward where it is repeated without gradients"
            elif not repeats_without_statistics(op) and any(graph.owner(n) in graph.leaves for n in op.written):
                node.keep_reason = f"{op.name} writes into the module's state"
            elif any(graph.owner(name) in rewritten for name in op.call.inputs):
                node.keep_reason = f"{op.name} reads module state that the forward rewrites"


def repeats_without_statistics(op: DNode) -> bool:
    """Whether `op` is a normalisation whose only writes are running statistics, left out when repeated."""
    function = op.call.function
    # instance_norm is not one: it saves copies of the statistics, so that leaving them out changes what it saves.
    return isinstance(function, torch._ops.OpOverload) and function._schema.name == "aten::batch_norm"
