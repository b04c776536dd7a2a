"""S graph and what was measured of its blocks to K graph: the data between computations, and who reads them when."""

from __future__ import annotations

from collections import Counter

from rkgb.devices.registry import device_of
from rkgb.ir.blocks import Block
from rkgb.ir.kgraph import KComp, KData, KGraph, gradient_name
from rkgb.ir.profiles import BlockProfile
from rkgb.ir.restoration import Restoration
from rkgb.ir.sgraph import SGraph, SNode
from rkgb.restore import restorations


def s_to_k(graph: SGraph, blocks: list[Block], profiles: list[BlockProfile]) -> KGraph:
    """Join the measured blocks into the K graph of the whole model."""
    builder = _Builder(graph, profiles, _early_bytes(graph), _staged(graph, profiles), _owners_with_gradient(graph))
    for index, block in enumerate(blocks):
        for node in block.nodes:
            builder.add_forward(node, index)
    outside = _bytes_outside(graph, blocks, profiles)
    for index in range(len(blocks) - 1, -1, -1):
        builder.add_backward(index, profiles[index], outside[index])
    result = KGraph(
        graph,
        blocks,
        builder.forward,
        builder.backward,
        builder.data,
        builder.profile_of,
        sum(graph.dgraph.values[name].storage_bytes for name in _differentiable_outputs(graph)),
        builder.restorations,
    )
    result.verify()
    return result


def s_list_to_k_list(graph: SGraph, blocks: list[Block], profiles: list[BlockProfile]) -> list[KGraph]:
    """The K graph of each block by itself; what it reads of earlier blocks is given, as data without a producer."""
    early, staged, with_gradient = _early_bytes(graph), _staged(graph, profiles), _owners_with_gradient(graph)
    result = []
    for block, profile in zip(blocks, profiles, strict=True):
        builder = _Builder(graph, [profile], early, staged, with_gradient)
        for node in block.nodes:
            builder.add_forward(node, 0)
        builder.add_backward(0, profile, 0)
        outputs = sum(graph.dgraph.values[n].storage_bytes for n in _differentiable(graph, block.outputs))
        k_graph = KGraph(
            graph, [block], builder.forward, builder.backward, builder.data, profile.ops, outputs, builder.restorations
        )
        k_graph.verify()
        result.append(k_graph)
    return result


def _staged(graph: SGraph, profiles: list[BlockProfile]) -> set[SNode]:
    """Nodes with a stage of their own in the backward."""
    node_of_op = {op.name: node for node in graph.nodes for op in node.ops}
    return {node_of_op[stage.op] for profile in profiles for stage in profile.stages if stage.op in node_of_op}


def _differentiable_outputs(graph: SGraph) -> list[str]:
    return _differentiable(graph, graph.dgraph.gradient_outputs)


def _differentiable(graph: SGraph, names: list[str]) -> list[str]:
    values = graph.dgraph.values
    owners = dict.fromkeys(values[n].owner for n in names if values[n].requires_grad)
    return [owner for owner in owners if owner not in graph.dgraph.leaves]


def _bytes_outside(graph: SGraph, blocks: list[Block], profiles: list[BlockProfile]) -> list[int]:
    """Gradients that are alive during a block's backward but were not seen when it ran alone.

    They are the parameters' of the blocks after it, those that the loss gave to outputs of blocks
    before it, and those that blocks after it gave to values of blocks before it.
    """
    outputs = set(_differentiable_outputs(graph))
    owned = [{owner for node in block.nodes for owner in node.data} & outputs for block in blocks]
    sizes = graph.dgraph.values
    waiting = {owner: sizes[owner].storage_bytes for owners in owned for owner in owners}
    outside = []
    seen: set[str] = set()
    parameters = 0
    for index in range(len(blocks) - 1, -1, -1):
        # What the block hands on, and what it is handed, was seen when it ran.
        for name in (*owned[index], *blocks[index].outputs, *blocks[index].inputs):
            waiting.pop(name, None)
        outside.append(parameters + sum(waiting.values()))
        waiting.update(profiles[index].input_gradient_bytes)
        for name, size_bytes in profiles[index].parameter_gradient_bytes.items():
            # A parameter used in several blocks has one gradient: the first to come makes it.
            parameters += 0 if name in seen else size_bytes
            seen.add(name)
    return outside[::-1]


class _Builder:
    def __init__(
        self,
        graph: SGraph,
        profiles: list[BlockProfile],
        early_bytes: dict[SNode, int],
        staged: set[SNode],
        with_gradient: set[str],
    ) -> None:
        self.graph = graph
        self.profile_of = {name: op for profile in profiles for name, op in profile.ops.items()}
        self.forward: list[KComp] = []
        self.backward: list[KComp] = []
        self.data: dict[str, KData] = {}
        self._with_gradient = with_gradient
        self._node_of_op = {op.name: node for node in graph.nodes for op in node.ops}
        self._stages: Counter[str] = Counter()
        self._early = early_bytes
        self._staged = staged
        self._repeat_ms = {name: time_ms for profile in profiles for name, time_ms in profile.repeat_ms.items()}
        self._restore_ms = {name: time_ms for profile in profiles for name, time_ms in profile.restore_ms.items()}
        self.restorations: dict[SNode, tuple[Restoration, ...]] = {}

    def add_forward(self, node: SNode, block: int) -> None:
        values = self.graph.dgraph.values
        comp = KComp(node.name, False, node, 0.0, block, repeat_ms=self._repeat_ms.get(node.name))
        for owner in node.data:
            size_bytes = device_of(values[owner].device).allocated_bytes(values[owner].storage_bytes)
            comp.outputs[self._add(owner, "data", size_bytes, comp)] = None
        alive = highest = 0
        for op in node.ops:
            profile = self.profile_of[op.name]
            comp.time_ms += profile.time_ms
            highest = max(highest, alive + profile.peak_bytes)
            alive += sum(values[n].storage_bytes for n in op.output_names if values[n].owner == n)
            for phantom in profile.phantoms:
                comp.outputs[self._add(phantom.name, "phantom", phantom.size_bytes, comp)] = None
                alive += phantom.size_bytes
        found = restorations(self.graph.dgraph, [node], self.profile_of).get(node, ())
        if taken := tuple(way for way in found if self._is_taken(way, node)):
            self.restorations[node] = taken
        own = sum(data.size_bytes for data in comp.outputs)
        comp.workspace_bytes = max(0, highest - own) + self._early.get(node, 0)
        read = dict.fromkeys(values[name].owner for op in node.ops for name in op.call.inputs)
        for owner in read:
            if owner in node.data or owner in self.graph.dgraph.leaves:
                continue
            if owner not in self.data:
                size_bytes = device_of(values[owner].device).allocated_bytes(values[owner].storage_bytes)
                self.data[owner] = KData(owner, "data", size_bytes)
            self._read(comp, self.data[owner])
        self.forward.append(comp)

    def _is_taken(self, way: Restoration, node: SNode) -> bool:
        """Whether `way` stands for operations of `node`, and not their repetition."""
        names = [op.name for op in way.ops(node)]
        repeated_ms = sum(self.profile_of[name].time_ms for name in names)
        return way.of_node or self._restore_ms.get(names[-1], repeated_ms) < repeated_ms

    def add_backward(self, index: int, profile: BlockProfile, outside_bytes: int) -> None:
        for stage in profile.stages:
            node = self._node_of_op.get(stage.op)
            if node is None:  # an operation on leaves alone, such as a view of a parameter
                node = self.forward[-1].node if not self.backward else self.backward[-1].node
            self._stages[stage.op] += 1
            count = self._stages[stage.op]
            name = f"{stage.op}.backward" + (f"_{count}" if count > 1 else "")
            comp = KComp(
                name,
                True,
                node,
                stage.time_ms,
                index,
                resident_bytes=stage.resident_bytes + outside_bytes,
                peak_bytes=stage.peak_bytes + outside_bytes,
                op=stage.op,
            )
            for need in stage.needs:
                self._read(comp, self.data[need])
            self._connect_gradients(comp)
            self.backward.append(comp)

    def _connect_gradients(self, comp: KComp) -> None:
        for owner in comp.node.data:
            if owner in self._with_gradient:
                self._read(comp, self._gradient(owner))
        for dep in self._receivers(comp.node):
            for owner in dep.data:
                # What is filled beside what this block reads has no place here.
                if owner in self.data and owner in self._with_gradient:
                    gradient = self._gradient(owner)
                    gradient.producers[comp] = None
                    comp.outputs[gradient] = None

    def _receivers(self, node: SNode) -> dict[SNode, None]:
        """Nodes to which the backward of `node` hands gradients.

        A node without a stage of its own (a reshape, a copy) hands its gradient on within the same stage.
        """
        found: dict[SNode, None] = {}
        waiting = list(node.deps)
        while waiting:
            dep = waiting.pop(0)
            if dep in found or not self.graph.requires_grad(dep):
                continue
            if dep in self._staged or not any(self.graph.requires_grad(other) for other in dep.deps):
                found[dep] = None
            else:
                waiting += dep.deps
        return found

    def _gradient(self, owner: str) -> KData:
        name = gradient_name(owner)
        if name not in self.data:
            self.data[name] = KData(name, "grad", self.data[owner].size_bytes, owner)
        return self.data[name]

    def _add(self, name: str, kind: str, size_bytes: int, producer: KComp) -> KData:
        data = KData(name, kind, size_bytes, producers={producer: None})
        self.data[name] = data
        return data

    def _read(self, comp: KComp, data: KData) -> None:
        comp.deps[data] = None
        data.users[comp] = None


def _owners_with_gradient(graph: SGraph) -> set[str]:
    """Storages to whose values gradients come: they require one, and something reads them or they are outputs."""
    values = graph.dgraph.values
    read = (name for op in graph.dgraph for name in op.call.inputs)
    return {values[name].owner for name in (*read, *graph.dgraph.output_names) if values[name].requires_grad}


def _early_bytes(graph: SGraph) -> dict[SNode, int]:
    """Storages that exist during a node's operations although their own node comes after it.

    A node stands where all that it needs is there: after the last operand of its in-place
    operations. Its first operation, which allocates, may run well before.
    """
    position = {op: index for index, op in enumerate(graph.dgraph)}
    values = graph.dgraph.values
    early: dict[SNode, int] = {}
    for place, node in enumerate(graph.nodes):
        start = position[node.ops[0]]
        size_bytes = sum(values[owner].storage_bytes for owner in node.data)
        for before in reversed(graph.nodes[:place]):
            if position[before.ops[-1]] < start:
                break
            if any(position[op] > start for op in before.ops):
                early[before] = early.get(before, 0) + size_bytes
    return early
