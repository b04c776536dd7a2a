"""Parts of a graph that have one layout each: convolutions, and all through which their layout is handed on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx

from rkgb import DGraph
from rkgb.ir.bgraph import LeafKind
from rkgb.ir.dgraph import DNode
from rkgb.ir.kgraph import KGraph
from rkgb.ir.values import ValueInfo
from rockmate.layouts.weights import FORMATS, channels_last_strides

_CONVOLUTION = "conv"  # in the names of all of PyTorch's: aten::_convolution, conv2d, conv_transpose2d.input
_SAME_PLACES = frozenset({"to", "_to_copy", "clone", "detach", "alias"})  # their result lies as what they are given


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a graph in channels_last."""

    weights: tuple[str, ...]  # paths of the parameters that its convolutions read
    operations: frozenset[str]  # that read or make its tensors, those at its borders among them


def convolution_weights(graph: DGraph) -> dict[str, str]:
    """By the name of each convolution whose weight is a parameter of 4 or 5 dimensions: the path of that."""
    maker = {name: op for op in graph for name in op.output_names}
    found = {op.name: _weight_of(op, graph, maker) for op in graph}
    return {name: path for name, path in found.items() if path}


def regions_of(graph: DGraph) -> list[Region]:
    """The regions of a graph that was traced with its weights in channels_last, in the order of their weights."""
    weights = convolution_weights(graph)
    joined = networkx.Graph()
    touched: dict[str, list[str]] = {}  # by operation: the values in channels_last that it reads or makes
    for op in graph:
        inside = [
            name
            for name in (*op.inputs, *op.output_names)
            if name not in graph.leaves and _is_channels_last(graph.values[name])
        ]
        touched[op.name] = inside
        networkx.add_path(joined, [*inside, *([_key(weights[op.name])] if op.name in weights else [])])
    found = []
    for part in networkx.connected_components(joined):
        paths = dict.fromkeys(path for path in weights.values() if _key(path) in part)
        if paths:
            operations = frozenset(name for name, inside in touched.items() if not part.isdisjoint(inside))
            found.append(Region(tuple(paths), operations))
    return sorted(found, key=lambda region: min(_place(graph, region.weights)))


def times_ms(graph: KGraph, region: Region) -> float:
    """What the operations of a region take, forward and backward, with all kept."""
    total_ms = 0.0
    for comp in graph:
        ops = (comp.op,) if comp.is_backward else (op.name for op in comp.node.ops)
        if not region.operations.isdisjoint(ops):
            total_ms += comp.time_ms
    return total_ms


def _place(graph: DGraph, weights: Iterable[str]) -> Iterable[int]:
    places = {leaf.path: place for place, leaf in enumerate(graph.leaves.values()) if leaf.kind is LeafKind.PARAMETER}
    return (places[path] for path in weights)


def _key(path: str) -> tuple[str, str]:
    """Of a weight, beside the names of values."""
    return ("weight", path)


def _weight_of(op: DNode, graph: DGraph, maker: dict[str, DNode]) -> str:
    """The path of the parameter that is the weight of a convolution; "" for any other operation or weight."""
    if _CONVOLUTION not in op.call.op_name:
        return ""
    name = next((value.name for argument, value in op.call.schema_pairs() if argument.name == "weight"), "")
    while name in maker and maker[name].call.op_name in _SAME_PLACES:  # autocast's copies
        name = maker[name].inputs[0]
    leaf = graph.leaves.get(name)
    if leaf is None or leaf.kind is not LeafKind.PARAMETER or len(graph.values[name].shape) not in FORMATS:
        return ""
    return leaf.path


def _is_channels_last(value: ValueInfo) -> bool:
    """Whether a value lies so; where dimensions of one make it both, it counts as such."""
    if len(value.shape) not in FORMATS:
        return False
    strides = channels_last_strides(value.shape)
    return all(
        size == 1 or stride == wanted for size, stride, wanted in zip(value.shape, value.stride, strides, strict=True)
    )
