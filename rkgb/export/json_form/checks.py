"""What must hold of graphs out of a file beyond the rules that they check themselves: names that mean something."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rkgb.errors import GraphError
from rkgb.export.json_form.classes import KINDS, Things
from rkgb.export.json_form.errors import GraphFormatError
from rkgb.ir.bgraph import BGraph, Leaf, LeafKind
from rkgb.ir.blocks import Block
from rkgb.ir.call import Ref
from rkgb.ir.dgraph import DGraph
from rkgb.ir.kgraph import KGraph
from rkgb.ir.sgraph import SGraph
from rkgb.pipeline import AllGraphs


def check(things: Things) -> None:
    """Raise `GraphFormatError` where a graph breaks a rule, its own or that a name stands for something."""
    for kind in KINDS.values():
        for graph in things.of(kind):
            try:
                _check_graph(graph)
            except GraphError as error:
                raise GraphFormatError(f"the {kind.__name__} in the file is damaged: {error}") from error
    dataflows = things.of(DGraph)
    for block in things.of(Block) if len(dataflows) == 1 else ():
        named = (*block.leaves, *block.inputs, *block.outputs, *block.shared_inputs)
        _check_known("a block reads or makes", named, dataflows[0])


def check_constants(things: Things) -> None:
    """Raise `GraphFormatError` where a constant is in the memory of a parameter, buffer or input.

    It would follow when training changes these; a copy of its bytes in a file would not.
    """
    for graph in things.of(DGraph):
        for name, leaf in graph.leaves.items():
            owner = graph.leaves.get(graph.owner(name), leaf)
            constants = [one for one in (leaf, owner) if one.kind is LeafKind.CONSTANT]
            if len(constants) == 1:
                (other,) = {leaf.name, owner.name} - {constants[0].name}
                raise GraphFormatError(
                    f"the constant {constants[0].name} is in the memory of %{other}, which no file can tell. "
                    "Register it as a buffer of the module, or detach and clone it."
                )


def _check_graph(graph: Any) -> None:
    if isinstance(graph, AllGraphs):
        _check_indices((i for one in graph.equivalent_classes for i in one), len(graph.blocks), "a class of blocks")
        return
    if isinstance(graph, BGraph | DGraph):
        _check_leaves(graph.leaves)
        for node in graph.nodes:
            _check_pattern(node.name, node.outputs)
    graph.verify()
    if isinstance(graph, DGraph):
        _check_values(graph)
    if isinstance(graph, SGraph):
        _check_known("an S node fills", (owner for node in graph for owner in node.data), graph.dgraph)
        ops = (*graph.leaf_views, *graph.effects, *(op for node in graph for op in node.ops))
        _check_same("an operation of S", ops, graph.dgraph.nodes)
    if isinstance(graph, KGraph):
        _check_indices((comp.block for comp in graph), len(graph.blocks), "a K computation")
        _check_same("a node of K", (comp.node for comp in graph), graph.sgraph.nodes)
        for name, data in graph.data.items():
            if data.name != name:
                raise GraphFormatError(f"the data {name} say that they are called {data.name}")


def _check_leaves(leaves: dict[str, Leaf]) -> None:
    for name, leaf in leaves.items():
        if leaf.name != name:
            raise GraphFormatError(f"the leaf {name} says that it is called {leaf.name}")
        if (leaf.kind is LeafKind.CONSTANT) != (leaf.constant is not None):
            raise GraphFormatError(f"the leaf {name} is a {leaf.kind.value}: constants, and no others, have a tensor")
        if leaf.kind is LeafKind.INPUT and leaf.index < 0:
            raise GraphFormatError(f"the leaf {name} is input {leaf.index}")


def _check_pattern(name: str, pattern: Any) -> None:
    if isinstance(pattern, list | tuple):
        for part in pattern:
            _check_pattern(name, part)
    elif pattern is not None and not isinstance(pattern, Ref):
        raise GraphFormatError(
            f"the outputs of %{name} are {type(pattern).__name__}: they are names, or lists of names"
        )


def _check_values(graph: DGraph) -> None:
    _check_known("the graph reads", graph.leaves, graph)
    for node in graph:
        _check_known(f"%{node.name} makes or writes", (*node.output_names, *node.written), graph)
    _check_known("a storage belongs to", (info.owner for info in graph.values.values()), graph)


def _check_known(what: str, names: Iterable[str], graph: DGraph) -> None:
    for name in names:
        if name not in graph.values:
            raise GraphFormatError(f"{what} %{name}, of which the file says nothing")


def _check_same(what: str, things: Iterable[Any], known: Iterable[Any]) -> None:
    own = set(known)
    for thing in things:
        if thing not in own:
            raise GraphFormatError(f"{what}, %{thing.name}, is not among those of the graph below")


def _check_indices(indices: Iterable[int], count: int, what: str) -> None:
    for index in indices:
        if not 0 <= index < count:
            raise GraphFormatError(f"{what} names block {index} of {count}")
