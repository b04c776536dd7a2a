"""Any graph of rkgb in one form, from which pictures, tables and networkx graphs are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.errors import RenderError
from rkgb.ir.bgraph import BGraph, BNode, Leaf, Source
from rkgb.ir.blocks import Block
from rkgb.ir.call import Call
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.kgraph import KComp, KData, KGraph, gradient_name
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.sgraph import SGraph, SNode
from rkgb.ir.values import ValueInfo
from rkgb.torch_private.operations import OpOverload

Graph = BGraph | DGraph | SGraph | KGraph | Block

LEAF_KINDS = ("parameter", "buffer", "input", "constant", "leaf")
DATA_KINDS = ("data", "grad", "phantom")


@dataclass(frozen=True, slots=True)
class Element:
    """A vertex of a graph: an operation, a leaf, data, or the output.

    `kind` is "forward", "backward", "view", "in-place", "random", "data", "grad", "phantom", "parameter", "buffer",
    "input", "constant", "leaf" (of a block, which does not know more) or "output". Unknown sizes and times are None.
    """

    name: str  # unique in its structure
    kind: str
    op: str = ""  # of a computation: the operation's name; of an S node: its first one's
    ops: tuple[str, ...] = ()  # names of the operations of D that it stands for
    shape: str = ""  # of the first value that it defines, with its type
    size_bytes: int | None = None  # of the storages that it fills
    time_ms: float | None = None
    source: Source = field(default_factory=Source)
    notes: tuple[str, ...] = ()  # what else a reader wants to know, one fact each

    @property
    def is_computation(self) -> bool:
        """Whether it runs something, rather than being data, a leaf or the output."""
        return self.kind not in LEAF_KINDS and self.kind not in DATA_KINDS and self.kind != "output"


@dataclass(frozen=True, slots=True)
class Link:
    """An edge: `target` reads these values of `source`."""

    source: str
    target: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """Elements and links of one graph. Elements are ordered such that a forward link leads to a later one."""

    graph_kind: str  # "B", "D", "S", "K" or "block"
    elements: dict[str, Element]
    links: tuple[Link, ...]

    @property
    def computations(self) -> list[Element]:
        """Elements that run something, in order."""
        return [element for element in self.elements.values() if element.is_computation]


def structure_of(graph: Graph, values: Mapping[str, ValueInfo] | None = None) -> Structure:
    """The elements and links of `graph`.

    `values` tells shapes and bytes of a `Block`'s values, which a block does not hold itself; a D graph's `values` fit.

    Raises:
        RenderError: `graph` is none of the graphs of rkgb.
    """
    match graph:
        case BGraph():
            return _Forward("B", graph.leaves, {}).structure(graph.nodes, graph.output_names)
        case DGraph():
            return _Forward("D", graph.leaves, graph.values).structure(graph.nodes, graph.output_names)
        case SGraph():
            return _of_sgraph(graph)
        case Block():
            return _of_block(graph, values or {})
        case KGraph():
            return _of_kgraph(graph)
    raise RenderError(
        f"{type(graph).__name__} is no graph of rkgb. Give a BGraph, DGraph, SGraph, KGraph or Block, "
        "or what make_all_graphs returns to print_all_graphs."
    )


def _of_sgraph(graph: SGraph) -> Structure:
    position = {op: index for index, op in enumerate(graph.dgraph)}
    beside = sorted((*graph.leaf_views, *graph.effects), key=position.__getitem__)
    return _Forward("S", graph.dgraph.leaves, graph.dgraph.values).structure(
        _interleaved(graph.nodes, beside), graph.dgraph.output_names
    )


def _of_block(graph: Block, values: Mapping[str, ValueInfo]) -> Structure:
    grouped = {op for node in graph.nodes for op in node.ops}
    beside = [op for op in graph.ops if op not in grouped]
    builder = _Forward("block", {}, values)
    # A block names its leaves without their kinds.
    for kind, names in (("leaf", graph.leaves), ("input", graph.inputs)):
        for name in names:
            builder.add(Element(name, kind, shape=builder.shape([name])), [name])
    return builder.structure(_interleaved(graph.nodes, beside), graph.outputs)


def _interleaved(nodes: Sequence[SNode], beside: Sequence[DNode]) -> list[SNode | DNode]:
    """Nodes in order, each of the operations `beside` them before what first reads its results, or else at the end."""
    first_reader: dict[str, int] = {}
    for index in range(len(nodes) - 1, -1, -1):
        first_reader.update((name, index) for op in nodes[index].ops for name in op.call.inputs)
    before: dict[int, list[DNode]] = {}
    for op in reversed(beside):
        index = min((first_reader[name] for name in op.output_names if name in first_reader), default=len(nodes))
        before.setdefault(index, []).append(op)
        for name in op.call.inputs:
            first_reader[name] = min(index, first_reader.get(name, index))
    ordered: list[SNode | DNode] = []
    for index in range(len(nodes) + 1):
        ordered += reversed(before.get(index, []))
        ordered += nodes[index : index + 1]
    return ordered


class _Forward:
    """Builds the structure of a graph whose nodes read and define named values."""

    def __init__(self, graph_kind: str, leaves: Mapping[str, Leaf], values: Mapping[str, ValueInfo]) -> None:
        self.graph_kind = graph_kind
        self.values = values
        self.elements: dict[str, Element] = {}
        self.definer: dict[str, str] = {}  # value → the element that defines it
        self.links: list[Link] = []
        for leaf in leaves.values():
            note = (leaf.path,) if leaf.path else ()
            size_bytes = values[leaf.name].storage_bytes if leaf.name in values else None
            shape = self.shape([leaf.name])
            self.add(Element(leaf.name, leaf.kind.value, shape=shape, size_bytes=size_bytes, notes=note), [leaf.name])

    def structure(self, nodes: Iterable[BNode | DNode | SNode], outputs: list[str]) -> Structure:
        """Add `nodes` and the output; the whole."""
        nodes = list(nodes)
        for node in nodes:
            ops = node.ops if isinstance(node, SNode) else [node]
            self.add(self._element(node), [name for op in ops for name in op.output_names])
        for node in nodes:
            ops = node.ops if isinstance(node, SNode) else [node]
            self._connect(node.name, [name for op in ops for name in op.call.inputs])
        output = "output"
        while output in self.elements:
            output += "_"
        self.elements[output] = Element(output, "output", shape=self.shape(outputs))
        self._connect(output, outputs)
        return Structure(self.graph_kind, self.elements, tuple(self.links))

    def add(self, element: Element, defined: list[str]) -> None:
        """Add an element that defines these values."""
        self.elements[element.name] = element
        self.definer.update(dict.fromkeys(defined, element.name))

    def shape(self, names: list[str]) -> str:
        """Type and shape of the first of these values, where it is known."""
        if not names or names[0] not in self.values:
            return ""
        return self.values[names[0]].describe_array()

    def _connect(self, target: str, names: list[str]) -> None:
        read: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            source = self.definer.get(name, target)
            if source != target:
                read.setdefault(source, []).append(name)
        self.links += [Link(source, target, tuple(values)) for source, values in read.items()]

    def _element(self, node: BNode | DNode | SNode) -> Element:
        if isinstance(node, SNode):
            return self._s_element(node)
        owned = [name for name in node.output_names if name in self.values and self.values[name].owner == name]
        return Element(
            node.name,
            _kind_of(node, self.values),
            op=node.call.op_name,
            ops=(node.name,),
            shape=self.shape(node.output_names),
            size_bytes=sum(self.values[name].storage_bytes for name in owned) if self.values else None,
            source=node.source,
            notes=tuple(_notes(node)),
        )

    def _s_element(self, node: SNode) -> Element:
        sizes = [self.values[name].storage_bytes for name in node.data if name in self.values]
        body = _counted(op.call.op_name for op in node.ops[1:])
        notes = [f"then {body}"] if body else []
        if node.keep_reason:
            notes.append(f"never repeated: {node.keep_reason}")
        return Element(
            node.name,
            "random" if node.is_random else "forward",
            op=node.ops[0].call.op_name,
            ops=tuple(op.name for op in node.ops),
            shape=self.shape(node.data),
            size_bytes=sum(sizes) if len(sizes) == len(node.data) else None,
            source=node.ops[0].source,
            notes=tuple(notes),
        )


def _notes(node: BNode | DNode) -> Iterator[str]:
    if not node.grad_enabled:
        yield "without gradients"
    if isinstance(node, DNode) and node.is_guard:
        yield "guard: only checks a value"
    if isinstance(node.call.function, OpaqueCall):
        yield "opaque: one call of a submodule"


def _counted(names: Iterable[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in Counter(names).items())


def _kind_of(node: BNode | DNode, values: Mapping[str, ValueInfo]) -> str:
    if isinstance(node, DNode):
        is_random, written = node.is_random, bool(node.written)
        known = [values[name].owner for name in node.output_names if name in values]
        is_view = bool(known) and all(owner not in node.output_names for owner in known)
    else:
        is_random, written, is_view = _draws(node.call), bool(node.call.written), _schema_says_view(node.call)
    if is_random:
        return "random"
    if written:
        return "in-place"
    return "view" if is_view else "forward"


def _draws(call: Call) -> bool:
    return isinstance(call.function, OpOverload) and torch.Tag.nondeterministic_seeded in call.function.tags


def _schema_says_view(call: Call) -> bool:
    if not isinstance(call.function, OpOverload):
        return False
    returned: list[Any] = call.function._schema.returns
    return any(value.alias_info is not None for value in returned)


def _of_kgraph(graph: KGraph) -> Structure:
    """Computations of the forward are named `<S node>.forward`: their data have the S nodes' names.

    The backward of a node stands right after its forward, so that parts of the order are parts of the model.
    """
    backward_of: dict[SNode, list[KComp]] = {}
    for comp in graph.backward:
        backward_of.setdefault(comp.node, []).append(comp)
    elements: dict[str, Element] = {}
    values = graph.sgraph.dgraph.values
    for comp in graph.forward:
        for each in (comp, *backward_of.get(comp.node, [])):
            elements[_comp_name(each)] = _comp_element(each)
        for data in comp.outputs:
            gradient = graph.data.get(gradient_name(data.name))
            for each_data in (data, gradient) if gradient is not None else (data,):
                elements[each_data.name] = _data_element(each_data, values)
    for comp in graph.backward:  # of a node whose forward is not in this graph
        elements.setdefault(_comp_name(comp), _comp_element(comp))
    for data in graph.data.values():  # what this graph is given, or no forward of it makes
        if data.name not in elements:
            elements[data.name] = _data_element(data, values)
    links = []
    for comp in graph:
        name = _comp_name(comp)
        links += [Link(data.name, name, (data.name,)) for data in comp.deps]
        links += [Link(name, data.name, (data.name,)) for data in comp.outputs]
    return Structure("K", elements, tuple(links))


def _comp_name(comp: KComp) -> str:
    return comp.name if comp.is_backward else f"{comp.name}.forward"


def _comp_element(comp: KComp) -> Element:
    node = comp.node
    notes = [f"block {comp.block}"]
    if comp.workspace_bytes:
        notes.append(f"workspace_bytes {comp.workspace_bytes}")
    if not comp.is_backward and node.keep_reason:
        notes.append(f"never repeated: {node.keep_reason}")
    kind = "backward" if comp.is_backward else "random" if node.is_random else "forward"
    ops = tuple(op.name for op in node.ops)
    return Element(
        _comp_name(comp), kind, node.ops[0].call.op_name, ops, "", None, comp.time_ms, node.ops[0].source, tuple(notes)
    )


def _data_element(data: KData, values: Mapping[str, ValueInfo]) -> Element:
    info = values.get(data.gradient_of or data.name)
    shape = info.describe_array() if info is not None else ""
    return Element(data.name, data.kind, shape=shape, size_bytes=data.size_bytes)
