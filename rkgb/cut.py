"""S graph to a chain of blocks: ranges of nodes between which at most one differentiable value passes."""

from __future__ import annotations

from dataclasses import dataclass

from rkgb.dgraph import DNode
from rkgb.sgraph import SGraph, SNode


@dataclass(eq=False, slots=True)
class Block:
    """A contiguous range of the S graph, runnable alone from `inputs`."""

    nodes: list[SNode]
    ops: list[DNode]  # in traced order: its nodes' and the leaf views that they use
    leaves: list[str]  # parameters, buffers, inputs, constants read, in order of first use
    inputs: list[str]  # values of earlier blocks read, in order of first use
    outputs: list[str]  # values that later blocks or the model's output read


def cut(graph: SGraph) -> list[Block]:
    """Split after every node where no more than one differentiable value is still to be read.

    Nodes that no gradient reaches (masks, position tables) may be read from anywhere: they do not
    prevent a cut.
    """
    ranges: list[list[SNode]] = [[]]
    place = {node: index for index, node in enumerate(graph.nodes)}
    on_chain = _chain_nodes(graph)
    last_user = {node: max((place[user] for user in node.users), default=-1) for node in on_chain}
    open_values: set[SNode] = set()
    for index, node in enumerate(graph.nodes):
        ranges[-1].append(node)
        if node in on_chain:
            open_values.add(node)
        open_values = {value for value in open_values if last_user[value] > index}
        # Before the first differentiable value there is nothing to cut between.
        if len(open_values) == 1 and index + 1 < len(graph.nodes):
            ranges.append([])
    return [_make_block(graph, nodes) for nodes in _join_trivial(graph, ranges, on_chain)]


def _chain_nodes(graph: SGraph) -> set[SNode]:
    chain: set[SNode] = set()
    for node in graph.nodes:
        if graph.requires_grad(node) or any(dep in chain for dep in node.deps):
            chain.add(node)
    return chain


def _join_trivial(graph: SGraph, ranges: list[list[SNode]], on_chain: set[SNode]) -> list[list[SNode]]:
    """Ranges in which nothing is differentiable join the next one: alone they have no backward."""
    joined: list[list[SNode]] = []
    waiting: list[SNode] = []
    for nodes in ranges:
        waiting += nodes
        if any(node in on_chain for node in nodes):
            joined.append(waiting)
            waiting = []
    if waiting:
        joined = [*joined[:-1], joined[-1] + waiting] if joined else [waiting]
    return joined


def _make_block(graph: SGraph, nodes: list[SNode]) -> Block:
    own = {op for node in nodes for op in node.ops}
    own |= _needed_leaf_views(graph, own)
    ops = [op for op in graph.dgraph if op in own]
    defined = {name for op in ops for name in op.output_names}
    read = dict.fromkeys(name for op in ops for name in op.call.inputs if name not in defined)
    node_outputs = {name for node in nodes for op in node.ops for name in op.output_names}
    elsewhere = {name for op in graph.dgraph if op not in own for name in op.call.inputs}
    elsewhere |= set(graph.dgraph.output_names)
    return Block(
        nodes=nodes,
        ops=ops,
        leaves=[name for name in read if name in graph.dgraph.leaves],
        inputs=[name for name in read if name not in graph.dgraph.leaves],
        outputs=[name for op in ops for name in op.output_names if name in node_outputs and name in elsewhere],
    )


def _needed_leaf_views(graph: SGraph, ops: set[DNode]) -> set[DNode]:
    """The views of leaves and the in-place writes to them whose results `ops` use, directly or through one another."""
    producer = {name: op for op in (*graph.leaf_views, *graph.effects) for name in op.output_names}
    needed: set[DNode] = set()
    waiting = [name for op in ops for name in op.call.inputs]
    while waiting:
        op = producer.get(waiting.pop())
        if op is not None and op not in needed:
            needed.add(op)
            waiting += op.call.inputs
    return needed
