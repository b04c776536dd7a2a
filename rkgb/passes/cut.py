"""S graph to a chain of blocks: ranges of nodes between which at most one differentiable value passes.

Some values jump over many blocks: a U-Net's skip connections, an encoder's output, a position bias. Where such a skip
value may be read from anywhere, the chain can be cut beneath it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rkgb.ir.blocks import Block, Chain
from rkgb.ir.dgraph import DNode, makers_of
from rkgb.ir.sgraph import SGraph, SNode
from rkgb.passes.skip_values import Line, choose_skip_values

MAX_NODES = 30  # a block of more is worth skip values


def cut(graph: SGraph, skips: Collection[SNode] = ()) -> list[Block]:
    """Split after every node where no more than one differentiable value is still to be read.

    Nodes that no gradient reaches (masks, position tables) may be read from anywhere: they do not
    prevent a cut. Neither do `skips` (see `Chain`). The blocks are ranges of the graph's nodes, in order.
    """
    on_chain = _chain_nodes(graph)
    parts = Line.of(graph.nodes, on_chain, _taken_over(graph)).split(set(skips))
    make = BlockMaker(graph)
    return [make.block(nodes) for nodes in _join_trivial([part.nodes for part in parts], on_chain)]


def chain(graph: SGraph, max_nodes: int = MAX_NODES) -> Chain:
    """Cut `graph` with skip values where a block would have more than `max_nodes` nodes.

    What no gradient reaches is off the chain: in the one block that reads it, else in the prologue.
    The nodes of a block are then not always neighbours in the graph's order.
    """
    on_chain = _chain_nodes(graph)
    movable = _movable(graph, on_chain)
    line = Line.of([node for node in graph if node not in movable], on_chain, _taken_over(graph))
    skips = choose_skip_values(line, max_nodes)
    groups = _join_trivial([part.nodes for part in line.split(set(skips))], on_chain)
    prologue = _bring_home(graph, groups, movable)
    place = {node: index for index, node in enumerate(graph)}
    make = BlockMaker(graph)
    result = Chain(
        make.block(prologue) if prologue else None,
        [make.block(sorted(nodes, key=place.__getitem__)) for nodes in groups],
        skips,
    )
    result.verify(graph)
    return result


def _chain_nodes(graph: SGraph) -> set[SNode]:
    """Nodes that a gradient reaches, and those that depend on one."""
    found: set[SNode] = set()
    for node in graph.nodes:
        if graph.requires_grad(node) or any(dep in found for dep in node.deps):
            found.add(node)
    return found


def _taken_over(graph: SGraph) -> dict[SNode, SNode]:
    """The nodes that take a storage over, each with the node that hands it: both belong to one block."""
    handed = graph.dgraph.handed
    if not handed:
        return {}
    producer = graph.producer_of()
    return {node: producer[name] for node in graph for name in node.ops[0].inputs if name in handed}


def _join_trivial(ranges: Sequence[Sequence[SNode]], on_chain: set[SNode]) -> list[list[SNode]]:
    """Ranges in which nothing is differentiable join a neighbour: alone they have no backward.

    What only the next block reads belongs there; masks for several go with the block before, so
    that equal blocks stay equal.
    """
    joined: list[list[SNode]] = []
    waiting: list[SNode] = []
    for nodes in ranges:
        if not any(node in on_chain for node in nodes):
            waiting += nodes
            continue
        start = _private_from(waiting, nodes) if joined else 0
        if start:
            joined[-1] += waiting[:start]
        joined.append([*waiting[start:], *nodes])
        waiting = []
    if joined:
        joined[-1] += waiting
    elif waiting:
        joined.append(waiting)
    return joined


def _private_from(waiting: list[SNode], nodes: Sequence[SNode]) -> int:
    """The place in `waiting` from which on everything is read by `nodes` alone."""
    inside = {*waiting, *nodes}
    start = len(waiting)
    while start and waiting[start - 1].users and all(user in inside for user in waiting[start - 1].users):
        start -= 1
    return start


def _movable(graph: SGraph, on_chain: set[SNode]) -> set[SNode]:
    """Nodes off the chain that give the same values wherever they run."""
    movable: set[SNode] = set()
    for node in graph:
        same = node.recomputable and not node.is_random and all(dep in movable for dep in node.deps)
        if same and node not in on_chain:
            movable.add(node)
    return movable


def _bring_home(graph: SGraph, groups: list[list[SNode]], movable: set[SNode]) -> list[SNode]:
    """Add each movable node to the one group that needs it; return those that several need, or the user."""
    home: dict[SNode, int] = {node: index for index, nodes in enumerate(groups) for node in nodes}
    several = -1
    for node in reversed(graph.nodes):
        if node in movable:
            homes = {home[user] for user in node.users}
            home[node] = homes.pop() if len(homes) == 1 else several
    prologue: list[SNode] = []
    for node in graph:
        if node in movable:
            (prologue if home[node] == several else groups[home[node]]).append(node)
    return prologue


class BlockMaker:
    """Makes blocks of one graph, each in time that grows with its own operations."""

    def __init__(self, graph: SGraph) -> None:
        self._graph = graph
        self._leaves = graph.dgraph.leaves
        self._place = {op: index for index, op in enumerate(graph.dgraph)}
        self._on_leaves = {name: op for op in (*graph.leaf_views, *graph.effects) for name in op.output_names}
        self._writes_reading: dict[str, list[DNode]] = {}  # writes to leaves by what they read
        for op in graph.effects:
            for name in op.inputs:
                self._writes_reading.setdefault(name, []).append(op)
        self._readers: dict[str, int] = {}  # how many operations read a value
        for op in graph.dgraph:
            for name in op.inputs if not op.is_guard else ():
                self._readers[name] = self._readers.get(name, 0) + 1
        self._node_place = {node: place for place, node in enumerate(graph)}
        self._kept = set(graph.dgraph.output_names)
        self._trained = set(graph.dgraph.gradient_outputs)
        self._passing: dict[str, list[int]] = {}  # places of the nodes that hand a value a gradient, in order
        reached, values = graph.dgraph.storages_with_gradient(), graph.dgraph.values
        for place, node in enumerate(graph):
            for op in node.ops:
                made = {values[name].owner for name in (*op.output_names, *op.written)}
                if op.grad_enabled and not made.isdisjoint(reached):
                    for name in op.inputs:
                        self._passing.setdefault(name, []).append(place)

    def block(self, nodes: list[SNode]) -> Block:
        """The block of these nodes, which must be in an order in which they can run."""
        node_ops = [op for node in nodes for op in node.ops]
        ops = sorted({*node_ops, *self._needed_on_leaves(node_ops)}, key=self._place.__getitem__)
        defined = {name for op in ops for name in op.output_names}
        read = dict.fromkeys(name for op in ops for name in op.inputs if name not in defined)
        inputs = [name for name in read if name not in self._leaves]
        inside: dict[str, int] = {}
        for op in ops:
            for name in op.inputs:
                inside[name] = inside.get(name, 0) + 1
        own = {name for op in node_ops for name in op.output_names}
        places = {self._node_place[node] for node in nodes}
        last = max(places, default=-1)
        outputs = [name for op in ops for name in op.output_names if name in own and self._leaves_block(name, inside)]
        return Block(
            nodes=nodes,
            ops=ops,
            leaves=[name for name in read if name in self._leaves],
            inputs=inputs,
            outputs=outputs,
            shared_inputs=[name for name in inputs if self._has_gradient_after(name, last)],
            dead_outputs=[name for name in outputs if self._is_dead(name, places)],
        )

    def _leaves_block(self, name: str, inside: dict[str, int]) -> bool:
        """Whether what is outside needs `name`: to read it, or for a write to a leaf that runs there too."""
        reached = [name]
        for name in reached:  # which grows meanwhile: a value, and what is written from it, one after the other
            if name in self._kept or self._readers.get(name, 0) > inside.get(name, 0):
                return True
            reached += (written for op in self._writes_reading.get(name, ()) for written in op.output_names)
        return False

    def _has_gradient_after(self, name: str, place: int) -> bool:
        """Whether the backward of what comes after node `place` begins the gradient of `name`."""
        if not self._graph.dgraph.values[name].requires_grad:
            return False
        return name in self._trained or self._passing.get(name, [-1])[-1] > place

    def _is_dead(self, name: str, places: set[int]) -> bool:
        """Whether neither the loss nor another block hands `name` a gradient, though it takes one."""
        if not self._graph.dgraph.values[name].requires_grad or name in self._trained:
            return False
        return places.issuperset(self._passing.get(name, ()))

    def _needed_on_leaves(self, ops: Iterable[DNode]) -> dict[DNode, None]:
        """The views of leaves and the in-place writes to them whose results `ops` use, directly or through others."""
        return makers_of((name for op in ops for name in op.inputs), self._on_leaves)
