"""A graph in which regions are one operation each."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rkgb import DGraph, DNode
from rkgb.errors import GraphError
from rkgb.ir.bgraph import Source
from rkgb.ir.call import Call, Ref
from rkgb.ir.compiled import CompiledCall, Handed
from rkgb.ir.values import ValueInfo
from rkgb.passes.b_to_d import statistics_written
from rockmate.regions.find import Region
from rockmate.regions.function import normalisations

_WRITE = torch.ops.aten.lerp_.Scalar  # a statistic comes nearer to the batch's by its momentum


def joined(graph: DGraph, calls: Sequence[tuple[Region, CompiledCall]], divided: bool = True) -> DGraph:
    """`graph` with one operation for each of these regions, and one for each statistic that they have written.

    Where a region has parts, each is an operation, unless they are not to be `divided`. Whatever else it does, it does
    in the order in which it did. Raises `GraphError` where regions need each other.
    """
    inside = {op: region for region, _ in calls for op in region.ops}
    made = {region: _operations(graph, number, region, call, divided) for number, (region, call) in enumerate(calls)}
    values = {name: info for name, info in graph.values.items() if name in graph.leaves}
    renamed: dict[str, str] = {}  # storages that are another's now: that of what is read outside
    for region, _ in calls:
        for name in region.outputs:
            renamed[graph.owner(name)] = name
    nodes: list[DNode] = []
    for group in _in_order(graph, inside):
        nodes += [group] if isinstance(group, DNode) else made[group][0]
    for node in nodes:
        for name in node.output_names:
            if name in graph.values:
                info = graph.values[name]
                values[name] = replace(info, owner=renamed.get(info.owner, info.owner))
    for region, _ in calls:
        values |= {name: _alone(values[name]) for name in region.outputs} | made[region][1]
    result = replace(graph, nodes=nodes, values=values)
    result.verify()
    return result


def _alone(info: ValueInfo) -> ValueInfo:
    count = 1
    for size in info.shape:
        count *= size
    return replace(info, offset=0, storage_bytes=count * info.dtype.itemsize)


def _operations(
    graph: DGraph, number: int, region: Region, compiled: CompiledCall, divided: bool
) -> tuple[list[DNode], dict[str, ValueInfo]]:
    """The operations of a region, those that write its statistics, and the values that are new with them."""
    new: dict[str, ValueInfo] = {}
    writes: list[DNode] = []
    statistics: list[str] = []
    for op in normalisations(region):
        for place, what in zip(statistics_written(op.call) or (), ("mean", "variance"), strict=True):
            leaf, momentum = op.call.args[place], op.call.args[6]
            name = f"{op.name}_{what}"
            info = graph.values[leaf.name]
            new[name] = replace(
                info,
                owner=name,
                shape=info.shape,
                stride=(1,),
                offset=0,
                requires_grad=False,
                storage_bytes=info.shape[0] * info.dtype.itemsize,
            )
            statistics.append(name)
            moved = f"{name}_written"
            new[moved] = replace(info, owner=leaf.name)
            write = Call(_WRITE, (leaf, Ref(name), momentum))
            writes.append(DNode(moved, write, Ref(moved), False, op.source, written=[leaf.name]))
    name, source = f"compiled_{number}", region.ops[0].source
    if not (divided and compiled.parts):
        node = _node(name, compiled, region.inputs, [*region.outputs, *statistics], source)
        return [node, *writes], new
    kernels = compiled.kernels[0]
    taken = [region.inputs[place] for place in kernels.takes]
    given = {f"{name}_given_{place}": one for place, one in enumerate(kernels.hands_on)}
    new |= {one: _handed(graph.values[taken[0]], one, handed, compiled) for one, handed in given.items()}
    first, rest = compiled.parts
    return [
        _node(f"{name}_statistics", first, taken, [*given, *statistics], source),
        *writes,
        _node(name, rest, [*region.inputs, *given], region.outputs, source),
    ], new


def _node(name: str, call: CompiledCall, read: Sequence[str], made: Sequence[str], source: Source) -> DNode:
    pattern: Any = Ref(made[0]) if len(made) == 1 else [Ref(one) for one in made]
    return DNode(name, Call(call, tuple(map(Ref, read))), pattern, True, source)


def _handed(read: ValueInfo, name: str, handed: Handed, call: CompiledCall) -> ValueInfo:
    """The tensor that is handed on of one like what is `read`."""
    sizes, strides = handed.layout(call.numbers)
    fresh = replace(read, owner=name, shape=sizes, stride=strides, dtype=handed.dtype, requires_grad=False)
    return _alone(fresh)


def _in_order(graph: DGraph, inside: Mapping[DNode, Region]) -> list[DNode | Region]:
    """Operations and regions, each after what it needs, and otherwise as they were traced."""
    place: dict[Any, int] = {}
    needs: dict[Any, set[Any]] = defaultdict(set)
    maker = {name: op for op in graph for name in op.output_names}
    writer: dict[str, DNode] = {}  # by storage: the last
    readers: dict[str, list[DNode]] = defaultdict(list)  # by storage: those since
    last_draw: DNode | None = None
    for number, op in enumerate(graph):
        group = inside.get(op, op)
        place.setdefault(group, number)
        before = [maker[name] for name in op.inputs if name in maker]
        read, written = ({graph.owner(name) for name in names} for names in (op.inputs, op.written))
        before += [writer[owner] for owner in read | written if owner in writer]
        for owner in written:
            before += readers.pop(owner, [])
            writer[owner] = op
        for owner in read - written:
            readers[owner].append(op)
        if op.is_random or op.is_guard:
            before += [] if last_draw is None else [last_draw]
            last_draw = op
        needs[group].update(inside.get(one, one) for one in before)
        needs[group].discard(group)
    missing = {group: len(found) for group, found in needs.items()}
    users: dict[Any, list[Any]] = defaultdict(list)
    for group, found in needs.items():
        for one in found:
            users[one].append(group)
    by_place = {number: group for group, number in place.items()}
    ready = [place[group] for group, count in missing.items() if not count]
    heapq.heapify(ready)
    ordered: list[DNode | Region] = []
    while ready:
        group = by_place[heapq.heappop(ready)]
        ordered.append(group)
        for user in users[group]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place[user])
    if len(ordered) < len(place):
        raise GraphError("a region of the graph needs what needs it. Leave one of its operations out.")
    return ordered
