"""D graph to S graph: the operations grouped by the storage that they fill, step by step.

The graph begins with one node per operation; `STEPS` make it the S graph, one after another. Each takes an S graph and
returns another, and can be applied alone: print the graph between two of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import networkx as nx

from rkgb.errors import GraphError
from rkgb.ir.call import Ref
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.dgraph import DGraph, DNode, makers_of
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.sgraph import SGraph, SNode
from rkgb.passes.nondeterminism import reason_against_repetition
from rkgb.torch_private.operations import OpOverload


def d_to_s(graph: DGraph) -> SGraph:
    """Group the operations of `graph` by the storage that they fill."""
    result = one_node_per_operation(graph)
    for step in STEPS:
        result = step(result)
    result.verify()
    return result


def one_node_per_operation(graph: DGraph) -> SGraph:
    """What the steps begin with; `verify` accepts it only once they are done."""
    return _graph_of(graph, [[op] for op in graph])


# ---- the steps -----------------------------------------------------------------------------------------


def set_leaf_operations_aside(graph: SGraph) -> SGraph:
    """Take away the nodes that only look at parameters, buffers, inputs and constants, or write into them.

    Views of leaves are repeated by whoever uses them. Writes into leaves and guards run once, in traced order.
    """
    kept: list[SNode] = []
    leaf_views, effects = list(graph.leaf_views), list(graph.effects)
    for node in graph:
        if any(_storages(graph.dgraph, op) for op in node.ops):
            kept.append(node)
        else:
            for op in node.ops:
                (effects if op.written or op.is_guard else leaf_views).append(op)
    return _regrouped(graph, [[node] for node in kept], leaf_views, effects)


def join_storages(graph: SGraph) -> SGraph:
    """Put what fills, views or writes one storage into one node."""
    groups = _Groups()
    holder: dict[str, SNode] = {}
    for node in graph:
        for op in node.ops:
            for owner in _storages(graph.dgraph, op):
                groups.unite(holder.setdefault(owner, node), node)
    return _regrouped(graph, groups.of(graph.nodes))


def join_early_readers(graph: SGraph) -> SGraph:
    """Put who reads a storage before its last write into the storage's node.

    It reads a value that recomputation would not give again: reads and writes are repeated together.
    """
    dgraph = graph.dgraph
    last_write = {dgraph.owner(name): place for place, op in enumerate(dgraph) for name in op.written}
    node_of = {op: node for node in graph for op in node.ops}
    producer = graph.producer_of()
    groups = _Groups()
    for place, op in enumerate(dgraph):
        if op not in node_of or not last_write or not _storages(dgraph, op):
            continue
        for name in op.inputs:
            owner = dgraph.owner(name)
            if owner in producer and place < last_write.get(owner, -1):
                groups.unite(producer[owner], node_of[op])
    return _regrouped(graph, groups.of(graph.nodes))


def merge_cycles(graph: SGraph) -> SGraph:
    """Make one node of nodes that need each other, as an in-place operation that reads what came from its target."""
    edges = nx.DiGraph()
    edges.add_nodes_from(graph.nodes)
    edges.add_edges_from((dep, node) for node in graph for dep in node.deps)
    groups = _Groups()
    for component in nx.strongly_connected_components(edges):
        first, *others = component
        for node in others:
            groups.unite(first, node)
    return _regrouped(graph, groups.of(graph.nodes))


def sort_nodes(graph: SGraph) -> SGraph:
    """Order the nodes after what they need, and otherwise by their first operations.

    Raises `GraphError` where nodes need each other.
    """
    place = {node: index for index, node in enumerate(graph)}
    missing = {node: len(node.deps) for node in graph}
    ready = [place[node] for node in graph if not node.deps]
    ordered: list[SNode] = []
    while ready:
        node = graph.nodes[heapq.heappop(ready)]
        ordered.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place[user])
    if len(ordered) < len(graph.nodes):
        stuck = next(node for node in graph if missing[node])
        raise GraphError(f"S node {stuck.name} needs what needs itself. Merge the cycles before sorting the nodes.")
    return _regrouped(graph, [[node] for node in ordered])


def mark_unrepeatable(graph: SGraph) -> SGraph:
    """Name the nodes that must run once, and why."""
    result = _regrouped(graph, [[node] for node in graph])
    dgraph = graph.dgraph
    writers = {
        op: [dgraph.owner(name) for name in op.written if dgraph.owner(name) in dgraph.leaves]
        for op in dgraph
        if op.written and not repeats_without_statistics(dgraph, op)
    }
    rewritten = {owner for owners in writers.values() for owner in owners}
    bound = _views_bound_to_values(graph)
    for node in result:
        for op in node.ops:
            if not bound.isdisjoint(op.inputs):
                node.keep_reason = f"{op.name} reads a view of the module's state whose shape is that of another value"
            elif isinstance(op.call.function, OpaqueCall):
                node.keep_reason = op.call.function.traits.keep_reason or _varying(dgraph, op)
                if not node.keep_reason and rewritten and any(dgraph.owner(name) in rewritten for name in op.inputs):
                    node.keep_reason = f"{op.name} reads module state that the forward rewrites"
            elif not isinstance(op.call.function, OpOverload | CompiledCall):
                node.keep_reason = f"{op.call.op_name} is a custom function, which may keep tensors of its own"
            elif reason := _varying(dgraph, op):
                node.keep_reason = reason
            elif writers.get(op):
                node.keep_reason = f"{op.name} writes into the module's state"
            elif rewritten and any(dgraph.owner(name) in rewritten for name in op.inputs):
                node.keep_reason = f"{op.name} reads module state that the forward rewrites"
            elif reason := reason_against_repetition(op, dgraph.values):
                node.keep_reason = reason
    return result


def _views_bound_to_values(graph: SGraph) -> set[str]:
    """Views of leaves that also read what is none: whoever uses them cannot repeat them by itself."""
    bound: set[str] = set()
    for op in graph.leaf_views:
        if any(name in bound or graph.dgraph.owner(name) not in graph.dgraph.leaves for name in op.inputs):
            bound.update(op.output_names)
    return bound


def _varying(dgraph: DGraph, op: DNode) -> str:
    varies = not dgraph.varying.isdisjoint((*op.output_names, *op.inputs))
    return f"{op.name} handles a value whose shape depends on data" if varies else ""


def run_once(graph: SGraph, reasons: Mapping[str, str]) -> SGraph:
    """Besides what must run once anyway, the nodes that hold one of these operations, given with the reason why.

    Views of leaves belong to no node: they compute nothing, and whoever uses them repeats them.
    """
    result = _regrouped(graph, [[node] for node in graph])
    for node in result:
        given = (reasons[op.name] for op in node.ops if op.name in reasons)
        node.keep_reason = node.keep_reason or next(given, "")
    return result


STEPS: tuple[Callable[[SGraph], SGraph], ...] = (
    set_leaf_operations_aside,
    join_storages,
    join_early_readers,
    merge_cycles,
    sort_nodes,
    mark_unrepeatable,
)


def repeats_without_statistics(dgraph: DGraph, op: DNode) -> bool:
    """Whether `op` is a normalisation whose only writes are running statistics, left out when repeated."""
    function = op.call.function
    # instance_norm is not one: it saves copies of the statistics, so that leaving them out changes what it saves.
    if not isinstance(function, OpOverload) or function._schema.name != "aten::batch_norm":
        return False
    x, weight, bias, *statistics = (
        dgraph.values[given.name].dtype if isinstance(given, Ref) else None for given in op.call.args[:5]
    )
    # It saves mean and deviation in float32 where a parameter is of that type and the input is not: if only the running
    # statistics are, then without them it saves others than its backward expects.
    return {x, weight, bias} >= set(statistics) - {None}


# ---- regrouping ----------------------------------------------------------------------------------------


class _Groups:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parent: dict[SNode, SNode] = {}

    def _root(self, node: SNode) -> SNode:
        while (parent := self._parent.get(node, node)) is not node:
            # Halving the way at each look keeps the ways short.
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def unite(self, one: SNode, other: SNode) -> None:
        self._parent[self._root(other)] = self._root(one)

    def of(self, nodes: Sequence[SNode]) -> list[list[SNode]]:
        """`nodes` by set, in order of the first of each."""
        found: dict[SNode, list[SNode]] = {}
        for node in nodes:
            found.setdefault(self._root(node), []).append(node)
        return list(found.values())


def _storages(graph: DGraph, op: DNode) -> list[str]:
    """Owners of the storages that `op` fills, views or writes, without leaves and what it hands to another node."""
    owners = dict.fromkeys(graph.owner(name) for name in (*op.output_names, *op.written) if name not in graph.handed)
    return [owner for owner in owners if owner not in graph.leaves]


def _regrouped(
    graph: SGraph,
    groups: Sequence[Sequence[SNode]],
    leaf_views: list[DNode] | None = None,
    effects: list[DNode] | None = None,
) -> SGraph:
    """A graph with a node for each of `groups`; what must run once still must."""
    operations = [group[0].ops for group in groups]
    if any(len(group) > 1 for group in groups):
        place = {op: index for index, op in enumerate(graph.dgraph)}
        operations = [sorted((op for node in group for op in node.ops), key=place.__getitem__) for group in groups]
    result = _graph_of(graph.dgraph, operations)
    result.leaf_views = list(graph.leaf_views) if leaf_views is None else leaf_views
    result.effects = list(graph.effects) if effects is None else effects
    for node, group in zip(result, groups, strict=True):
        node.keep_reason = next((old.keep_reason for old in group if old.keep_reason), "")
    return result


def _graph_of(graph: DGraph, operations: Sequence[list[DNode]]) -> SGraph:
    """One node for each list of operations, connected."""
    nodes: list[SNode] = []
    for ops in map(list, operations):
        fresh = [name for op in ops for name in op.output_names if graph.owner(name) == name]
        nodes.append(SNode(ops[0].name, ops, fresh))
    result = SGraph(graph, nodes, [], [])
    producer = result.producer_of()
    placed = {op for node in nodes for op in node.ops}
    beside = {name: op for op in graph if op not in placed for name in op.output_names}  # on leaves
    for node in nodes:
        names = [name for op in node.ops for name in op.inputs]
        for name in (*names, *(read for op in makers_of(names, beside) for read in op.inputs)):
            dep = producer.get(name, node)
            if dep is not node:
                node.deps[dep] = None
    for node in nodes:
        for dep in node.deps:
            dep.users[node] = None
    return result
