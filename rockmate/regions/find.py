"""Regions of a graph: connected operations whose loops the compiler joins, between products and random draws.

Products, convolutions and attention stay what they are, operations by themselves: what the compiler gains is in what
lies between them, and so whatever a plan keeps, forgets or moves are tensors of the graph as ever.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import networkx
import torch

from rkgb import DGraph
from rkgb.ir.call import Ref, is_ref
from rkgb.ir.dgraph import DNode
from rkgb.passes.b_to_d import statistics_written
from rkgb.state.generators import is_own_generator
from rkgb.torch_private.operations import OpOverload
from rkgb.tree import leaves

_JOINED = frozenset(
    "layer_norm native_layer_norm group_norm native_group_norm rms_norm softmax _softmax log_softmax _log_softmax mean "
    "sum var_mean amax amin to _to_copy type_as clone contiguous batch_norm masked_fill where".split()
)
"""Operations beside those tagged as pointwise whose loops are joined with others."""

_COPYING = frozenset({"cat", "stack"})  # joined where they read little, some of which is made there
_MOST_COPIED = 4  # tensors
# What their backward reads is their input: where that is made in the same region, they begin another.
_OF_INPUT = frozenset("layer_norm native_layer_norm group_norm native_group_norm rms_norm batch_norm".split())
_PLAIN = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.int32})
_LEAST_OPERATIONS = 2  # that compute: a single one is a single loop already


@dataclass(frozen=True, slots=True)
class Region:
    """Operations that may be compiled to one."""

    ops: tuple[DNode, ...]  # in traced order
    inputs: tuple[str, ...]  # values that they read from outside, in order of first use
    outputs: tuple[str, ...]  # values of theirs that are read outside


def regions_of(graph: DGraph, apart: Collection[str] = ()) -> list[Region]:
    """The regions of a graph, in its order; operations of the names in `apart` are in none."""
    finder = _Finder(graph, apart)
    while True:
        found = finder.regions()
        out = {op.name for ops in found for op in finder.unfit(ops)}
        ends = {op for ops in found for op in finder.ends_of(ops)} if not out else set()
        if not out and ends <= finder.ends:
            break
        finder.apart |= out
        finder.ends |= ends
    made = (finder.region_of(ops) for ops in found if sum(map(finder.computes, ops)) >= _LEAST_OPERATIONS)
    return [region for region in made if region.outputs]


def named_regions(graph: DGraph, names: Iterable[tuple[str, ...]]) -> list[Region]:
    """The regions of these operations, each by the names of its own; those that are not all there are left out."""
    finder, by_name = _Finder(graph, ()), {op.name: op for op in graph}
    return [finder.region_of([by_name[name] for name in one]) for one in names if by_name.keys() >= set(one)]


def _statistics(op: DNode) -> list[str]:
    """Running statistics that a batch normalisation writes: that is done apart from it."""
    places = statistics_written(op.call)
    if places is None:
        return []
    return [given.name for given in (op.call.args[place] for place in places) if isinstance(given, Ref)]


class _Finder:
    def __init__(self, graph: DGraph, apart: Collection[str]) -> None:
        self._graph = graph
        self.apart = set(apart)
        self.ends: set[DNode] = set()  # operations whose readers are in other regions than they are
        self._place = {op: place for place, op in enumerate(graph)}
        self._maker = {name: op for op in graph for name in op.output_names}
        self._readers: dict[str, list[DNode]] = defaultdict(list)
        self._writers: dict[str, list[DNode]] = defaultdict(list)  # by storage, in order
        for op in graph:
            for name in op.inputs:
                self._readers[name].append(op)
            for owner in {graph.owner(name) for name in op.written}:
                self._writers[owner].append(op)
        self._kept = set(graph.output_names)
        self._reading = {op: self._before(op) for op in graph}
        self._fit = {op for op in graph if self._may_ever_join(op)}
        drawing = [op for op in graph if op.is_random or op.is_guard]  # they stay in their order
        for one, other in itertools.pairwise(drawing):
            self._reading[other].append(one)

    def region_of(self, ops: list[DNode]) -> Region:
        """These operations, with what they read from outside and what is read outside of them."""
        own = set(ops)
        made = {name for op in ops for name in op.output_names}
        statistics = {name for op in ops for name in _statistics(op)}
        read = dict.fromkeys(name for op in ops for name in op.inputs if name not in made and name not in statistics)
        outputs = [name for op in ops for name in op.output_names if self._is_read_outside(op, own, name)]
        return Region(tuple(ops), tuple(read), tuple(outputs))

    def _before(self, op: DNode) -> list[DNode]:
        """Operations after which `op` runs: those that make, and have written, what it reads or writes."""
        found = {self._maker[name]: None for name in op.inputs if name in self._maker}
        place = self._place[op]
        owners = {self._graph.owner(name) for name in op.inputs}
        for owner in owners:
            found |= {writer: None for writer in self._writers[owner] if self._place[writer] < place}
        return list(found)

    def regions(self) -> list[list[DNode]]:
        """Connected operations of one depth: how many that are joined with none lie before them, in a row.

        No way leads out of a region and back into it: it would go through one that adds to the depth.
        """
        depth: dict[DNode, int] = {}
        joined = networkx.Graph()
        readers: dict[str, list[DNode]] = defaultdict(list)  # by storage, those before
        for op in self._graph:
            before = list(self._reading[op])
            for name in op.written:  # whoever reads what was there before runs before
                before += readers[self._graph.owner(name)]
            own = self.may_join(op)
            depth[op] = max((depth[other] + self._is_border(other) for other in before), default=0)
            if own:
                joined.add_node(op)
                joined.add_edges_from((op, other) for other in before if other in joined and depth[other] == depth[op])
            for name in op.inputs:
                readers[self._graph.owner(name)].append(op)
        parts = [sorted(part, key=self._place.__getitem__) for part in networkx.connected_components(joined)]
        return sorted(parts, key=lambda part: self._place[part[0]])

    def _is_border(self, op: DNode) -> bool:
        return op in self.ends or not self.may_join(op)

    def ends_of(self, ops: list[DNode]) -> list[DNode]:
        """Those of a region that make what is read in it and kept for others, or for the backward, anyway.

        They are to be its last ones: whatever follows on such a value can then be had again from that value alone,
        and needs nothing of what it was made of.
        """
        own = set(ops)
        return [op for op in ops if self._is_read_inside(op, own) and self._is_kept(op, own)]

    def _is_read_inside(self, op: DNode, own: set[DNode]) -> bool:
        return any(reader in own for name in op.output_names for reader in self._readers[name])

    def _is_kept(self, op: DNode, own: set[DNode]) -> bool:
        normalised = {
            reader.inputs[0]
            for name in op.output_names
            for reader in self._readers[name]
            if reader in own and reader.call.op_name in _OF_INPUT
        }
        return self._is_read_outside(op, own) or not normalised.isdisjoint(op.output_names)

    def may_join(self, op: DNode) -> bool:
        """Whether it may be in a region, by itself."""
        return op in self._fit and op.name not in self.apart

    def _may_ever_join(self, op: DNode) -> bool:
        function = op.call.function
        if not isinstance(function, OpOverload) or not function._schema.name.startswith("aten::"):
            return False
        if op.is_random or op.is_guard or not op.grad_enabled or op.plain_inputs:
            return False
        graph, names = self._graph, {*op.inputs, *op.output_names}
        if not graph.varying.isdisjoint(names) or not graph.handed.isdisjoint(names):
            return False
        infos = [graph.values[name] for name in names]
        if any(info.dtype not in _PLAIN for info in infos) or len({info.device for info in infos}) != 1:
            return False
        if leaves((op.call.args, op.call.kwargs), is_own_generator):
            return False
        if torch.Tag.nondeterministic_seeded in function.tags or torch.Tag.dynamic_output_shape in function.tags:
            return False
        if statistics_written(op.call) is not None:
            return _is_known_normalisation(op)
        return self._is_view(op) or torch.Tag.pointwise in function.tags or op.call.op_name in _JOINED | _COPYING

    def computes(self, op: DNode) -> bool:
        """Whether it does more than to look at a tensor."""
        return not self._is_view(op)

    def _is_view(self, op: DNode) -> bool:
        names = op.output_names
        return not op.written and bool(names) and all(self._graph.owner(name) != name for name in names)

    def unfit(self, ops: list[DNode]) -> list[DNode]:
        """Those of a region that must not be in it."""
        own = set(ops)
        made = {name for op in ops for name in op.output_names}
        fresh = {name for name in made if self._graph.owner(name) == name}
        return [op for op in ops if not self._fits(op, own, made, fresh)]

    def _fits(self, op: DNode, own: set[DNode], made: set[str], fresh: set[str]) -> bool:
        graph = self._graph
        statistics = set(_statistics(op))
        if any(graph.owner(name) not in fresh for name in op.written if name not in statistics):
            return False  # it writes what is not the region's
        if op.call.op_name in _COPYING and (made.isdisjoint(op.inputs) or len(op.inputs) > _MOST_COPIED):
            return False
        for name in op.inputs:
            # What a compiled backward computes again must find its inputs as they were.
            if name not in statistics and any(
                writer not in own and self._place[writer] > self._place[op]
                for writer in self._writers[graph.owner(name)]
            ):
                return False
        if self._is_view(op) and (graph.owner(op.output_names[0]) not in fresh or self._is_read_outside(op, own)):
            return False
        for name in op.output_names:
            owner = graph.owner(name)
            if not all(writer in own for writer in self._writers[owner]):
                return False
            if self._is_read_outside(op, own, name):
                last = self._writers[owner][-1] if self._writers[owner] else op
                if last is not op:  # others read it as it was before it was written, or under another name
                    return False
                if graph.owner(name) != name and not op.written:
                    return False
        return True

    def _is_read_outside(self, op: DNode, own: set[DNode], name: str | None = None) -> bool:
        names = op.output_names if name is None else [name]
        return any(one in self._kept or any(reader not in own for reader in self._readers[one]) for one in names)


def _is_known_normalisation(op: DNode) -> bool:
    """Whether it is a batch normalisation by the batch's own statistics, with numbers that are there."""
    if not isinstance(op.call.function, OpOverload) or op.call.function._schema.name != "aten::batch_norm":
        return False
    _, weight, bias, mean, variance, training, momentum, eps, *_ = op.call.args
    return (
        all(is_ref(one) for one in (weight, bias, mean, variance))
        and training is True
        and isinstance(momentum, float)
        and isinstance(eps, float)
    )
