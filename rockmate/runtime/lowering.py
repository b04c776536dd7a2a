"""From a recomputation plan to a program: what each computation leaves behind, for whom, how long.

The plan says which nodes are recomputed before which backward stage. Each computation of a node
makes a new instance of its storages; every use is served by the latest instance. A use by the
forward's instance is eager autograd; a use by a later one goes through a handle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rk_solvers import Schedule
from rkgb import DNode, KGraph, LeafKind, SNode
from rkgb.ir.call import Call, Ref, ref_names
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.dgraph import last_uses, makers_of
from rkgb.ir.kgraph import held_storages
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.profiles import SavedKind, SavedTensor
from rkgb.ir.restoration import Restoration
from rkgb.recording.record import UnderAutocast
from rkgb.torch_private.operations import OpOverload
from rockmate.resting.tensor import rested_of
from rockmate.runtime.moves import Moves, moves_of
from rockmate.runtime.resting import Placed, Rests, backward_of
from rockmate.runtime.tables import saved_key

_aten = torch.ops.aten
# Operations whose kernels are the same with and without gradients, and return all that their backwards read.
_SAME_WITHOUT_GRADIENTS = frozenset(
    {
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten.max_pool2d_with_indices.default,
        _aten.max_pool3d_with_indices.default,
        _aten.max.dim,
        _aten.min.dim,
        _aten.sort.default,
        _aten.sort.stable,
        _aten.topk.default,
    }
)

FORWARD = -1  # the instance that the forward itself computes; other instances are named by their segment


@dataclass(frozen=True, slots=True)
class Slot:
    """A saved tensor that is forgotten: the `index`-th that `op` packs, refilled by `segment`."""

    op: str
    index: int
    segment: int
    tensor: SavedTensor


@dataclass(frozen=True, slots=True)
class Kept:
    """A value kept on purpose for a later recomputation."""

    value: str
    made_by: int  # FORWARD or a segment

    @property
    def key(self) -> str:
        """Its name in the step's store."""
        return self.value if self.made_by == FORWARD else f"{self.value}@{self.made_by}"


@dataclass(frozen=True, slots=True)
class Restored:
    """What operations make, had again in another way than by repeating them."""

    way: Restoration
    node: SNode  # whose operations these are
    op: DNode  # stands in a segment for them
    kept: tuple[str, ...]  # names in the step's store of what it is made of
    last: bool  # whether for the last time

    @property
    def key(self) -> str:
        """Under which generated code asks for it."""
        return self.way.key(self.node)


@dataclass(slots=True)
class Segment:
    """What is recomputed just before one backward stage."""

    index: int
    stage: str  # name of the backward stage that it serves
    ops: list[DNode] = field(default_factory=list)  # in traced order, views of leaves included
    takes: list[tuple[Kept, bool]] = field(default_factory=list)  # values read, and whether for the last time
    keeps: list[Kept] = field(default_factory=list)  # its own values that later segments read
    fills: list[Slot] = field(default_factory=list)
    captured: set[str] = field(default_factory=set)  # operations repeated for what autograd saves for them
    restores: dict[str, Restored] = field(default_factory=dict)  # by the name of the operation that stands there

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers again."""
        return any(op.is_random for op in self.ops)


@dataclass(slots=True)
class Program:
    """Everything that code generation writes down."""

    graph: KGraph
    segments: list[Segment]
    slots: dict[str, list[Slot]]  # by operation: its forgotten tensors
    forward_keeps: set[str]  # values of the forward that segments read
    random_marks: dict[str, int]  # random operations that are repeated: the last segment to do so
    restored: dict[str, Restored] = field(default_factory=dict)  # by the last operation that it stands for
    moves: Moves | None = None  # to a second memory and back


def make_program(graph: KGraph, schedule: Schedule) -> Program:
    """Assign instances. `schedule` names operations of the graph; nothing is computed again for the loss."""
    node_of = {comp.name: comp.node for comp in graph.forward}
    stage_of = {comp.name: stage for stage, comp in enumerate(graph.backward)}
    groups = {stage_of[stage]: [node_of[name] for name in names] for stage, names in schedule.recomputed.items()}
    program = _Assigner(graph, groups).program()
    forgotten = {op: {slot.index for slot in slots} for op, slots in program.slots.items()}
    program.moves = moves_of(graph, schedule, forgotten, sorted(program.forward_keeps))
    return program


class _Assigner:
    def __init__(self, graph: KGraph, groups: dict[int, list[SNode]]) -> None:
        self.graph = graph
        self.groups = groups
        self.dgraph = graph.sgraph.dgraph
        self._leaf_views = {name: op for op in graph.sgraph.leaf_views for name in op.output_names}
        self.segment_of_stage = {stage: index for index, stage in enumerate(sorted(groups))}
        self._ways = {
            op: (node, way) for node, ways in graph.restorations.items() for way in ways for op in way.ops(node)
        }
        held = held_storages(graph)
        self.instances: dict[str, list[int]] = {}  # by storage: stages at which it is made anew
        for stage in sorted(groups):
            for node in groups[stage]:
                for name in self._storages(node):
                    if name not in held:
                        self.instances.setdefault(name, []).append(stage)

    def _storages(self, node: SNode) -> list[str]:
        phantoms = [phantom.name for op in node.ops for phantom in self.graph.op_profiles[op.name].phantoms]
        return [*node.data, *phantoms]

    def served_by(self, storage: str, stage: int) -> int:
        """The segment whose instance of `storage` serves a use at `stage`, or FORWARD."""
        made = [at for at in self.instances.get(storage, ()) if at <= stage]
        return self.segment_of_stage[made[-1]] if made else FORWARD

    def program(self) -> Program:
        slots = self._slots()
        segments = []
        for stage, index in self.segment_of_stage.items():
            fills = [slot for group in slots.values() for slot in group if slot.segment == index]
            segments.append(Segment(index, self.graph.backward[stage].name, fills=fills))
        readers: dict[Kept, list[int]] = {}
        for stage, index in self.segment_of_stage.items():
            for kept in self._reads_from_outside(stage):
                readers.setdefault(kept, []).append(index)
        for kept, users in readers.items():
            if kept.made_by != FORWARD:
                segments[kept.made_by].keeps.append(kept)
            for index in users:
                segments[index].takes.append((kept, index == max(users)))
        for stage, index in self.segment_of_stage.items():
            self._fill_in(segments[index], self.groups[stage])
        restored: dict[str, Restored] = {}
        for segment in reversed(segments):
            self._restore(segment, slots, restored)
        return Program(
            self.graph,
            segments,
            slots,
            {kept.value for segment in segments for kept, _ in segment.takes if kept.made_by == FORWARD},
            {op.name: segment.index for segment in segments for op in segment.ops if op.is_random},
            restored,
        )

    def _restore(self, segment: Segment, slots: dict[str, list[Slot]], restored: dict[str, Restored]) -> None:
        """Put, in place of operations for which there is another way, one that reads what is kept for that.

        What no later segment has again is added to what is `restored`.
        """
        found = dict.fromkeys(self._ways[op] for op in segment.ops if op in self._ways)
        for node, way in found:
            ops = way.ops(node)
            last = ops[-1].name
            if way.saved and last not in slots:
                continue  # autograd keeps what it saves to itself
            # Where the last of them stood, all of their values are there.
            outputs = ops[0].outputs if len(ops) == 1 else [Ref(name) for op in ops for name in op.output_names]
            stands = DNode(last, Call(_restored, way.reads(ops[-1])), outputs, False, ops[-1].source)
            kept = tuple(saved_key(last, place) for place, _ in way.saved) or (way.key(node),)
            segment.restores[last] = Restored(way, node, stands, kept, last=last not in restored)
            segment.ops[max(segment.ops.index(op) for op in ops if op in segment.ops)] = stands
            segment.ops = [op for op in segment.ops if op not in ops]
            segment.captured.discard(last)
            restored.setdefault(last, segment.restores[last])

    def _slots(self) -> dict[str, list[Slot]]:
        """Forgotten saved tensors, by the operation that saves them."""
        first_stage: dict[tuple[str, str], int] = {}
        for stage, comp in enumerate(self.graph.backward):
            for data in comp.deps:
                first_stage.setdefault((comp.op, data.name), stage)
        slots: dict[str, list[Slot]] = {}
        for op, profile in self.graph.op_profiles.items():
            for index, tensor in enumerate(profile.saved):
                first = first_stage.get((op, tensor.source))
                if tensor.kind is SavedKind.LEAF or first is None:
                    continue
                segment = self.served_by(tensor.source, first)
                if segment != FORWARD:
                    slots.setdefault(op, []).append(Slot(op, index, segment, tensor))
        return slots

    def _reads_from_outside(self, stage: int) -> Iterable[Kept]:
        """Values that the segment at `stage` reads but does not make."""
        own = {name for node in self.groups[stage] for op in node.ops for name in op.output_names}
        found: dict[Kept, None] = {}
        for node in self.groups[stage]:
            for op in node.ops:
                for name in self._inputs(op):
                    owner = self.dgraph.owner(name)
                    if name not in own and owner not in self.dgraph.leaves:
                        found[Kept(name, self.served_by(owner, stage))] = None
        return found

    def _inputs(self, op: DNode) -> list[str]:
        """What `op` reads when it is repeated."""
        _, way = self._ways.get(op, (None, None))
        # What is kept of autograd's may not be there: then it is repeated.
        return op.call.inputs if way is None or way.saved else ref_names(way.reads(op))

    def _fill_in(self, segment: Segment, nodes: list[SNode]) -> None:
        phantom_op = {
            phantom.name: op.name
            for node in nodes
            for op in node.ops
            for phantom in self.graph.op_profiles[op.name].phantoms
        }
        segment.captured = {
            phantom_op[slot.tensor.source] for slot in segment.fills if slot.tensor.source in phantom_op
        }
        needed = {kept.value for kept in segment.keeps}
        storages = {slot.tensor.source for slot in segment.fills} | {self.dgraph.owner(name) for name in needed}
        own = {op for node in nodes for op in node.ops}
        own |= makers_of((name for op in own for name in op.inputs), self._leaf_views).keys()
        live: list[DNode] = []
        for op in reversed([op for op in self.dgraph if op in own]):
            if (
                op.name in segment.captured
                or not needed.isdisjoint(op.output_names)
                or not storages.isdisjoint(op.output_names)
                or any(self.dgraph.owner(name) in storages for name in op.written)
            ):
                live.append(op)
                needed.update(self._inputs(op))
                storages.update(self.dgraph.owner(name) for name in self._inputs(op))
        segment.ops = live[::-1]
        # With gradients, as they first ran: without them, compiled code is other code.
        segment.captured |= {op.name for op in segment.ops if self._fills_several(op) or _is_tracked_whole(op)}
        read = dict.fromkeys(name for op in segment.ops for name in op.call.inputs)
        inputs = [n for n in read if n in self.dgraph.leaves and self.dgraph.leaves[n].kind is LeafKind.INPUT]
        # The caller's own tensors cost nothing to keep, and a graph walked twice needs them twice.
        segment.takes += [(Kept(name, FORWARD), False) for name in inputs]

    def _fills_several(self, op: DNode) -> bool:
        """Such operations may leave out, without gradients, what only their backward reads (LSTM's workspace)."""
        if op.call.function in _SAME_WITHOUT_GRADIENTS or isinstance(op.call.function, CompiledCall):
            return False
        fresh = [name for name in op.output_names if self.dgraph.owner(name) == name]
        return len(fresh) > 1 and any(self.dgraph.values[name].requires_grad for name in op.output_names)


def _restored() -> None:
    """Stands in an operation for what the runtime does: it is never called."""


def _is_tracked_whole(op: DNode) -> bool:
    return isinstance(op.call.function, OpaqueCall) and op.grad_enabled


def dropped_after(ops: list[DNode], kept: list[str], leaves: Iterable[str]) -> list[list[str]]:
    """For each operation, the variables to delete once it has run."""
    given = set(leaves)
    return [[name for name in names if name not in given] for names in last_uses(ops, kept)]


# ---- parameters that rest ----------------------------------------------------------------------------------


def rests_of(program: Program, places: dict[str, Placed]) -> Rests | None:
    """How a program uses what is in these `places` and rests; None where nothing does."""
    resting = {name: place for name, place in places.items() if rested_of(place[0][place[1]]) is not None}
    return uses_of(program.graph, resting, program.segments) if resting else None


def uses_of(graph: KGraph, places: dict[str, Placed], segments: Sequence[Segment] = ()) -> Rests:
    """How a program uses the parameters in these `places`, if they rest."""
    rests = Rests(places)
    dgraph = graph.sgraph.dgraph

    def note(event: str, names: Iterable[str]) -> None:
        names = tuple(dict.fromkeys(name for name in names if name in places))
        if names:
            rests.reads[event] = names

    for op in dgraph.nodes:
        note(op.name, map(dgraph.owner, op.inputs))
    for op_name, profile in graph.op_profiles.items():
        for index, tensor in enumerate(profile.saved):
            if tensor.kind is SavedKind.LEAF and tensor.source in places:
                rests.saved.setdefault(op_name, {})[index] = tensor.source
    # Autograd takes what was called last first; stages tell of those operations alone that read more than leaves.
    op_of = {comp.name: comp.op for comp in graph.backward}
    for op in reversed(dgraph.nodes):
        for segment in segments:
            if op_of[segment.stage] == op.name:
                for repeated in segment.ops:
                    note(again(repeated, segment.index), map(dgraph.owner, repeated.call.inputs))
        if op.name in rests.saved:
            note(backward_of(op.name), rests.saved[op.name].values())
    return rests


def again(op: DNode, segment: int) -> str:
    """The event that a segment repeats `op`."""
    return f"{op.name} in {segment}"


def is_whole(op: DNode) -> bool:
    """Whether code that is not PyTorch's own decides in each call what is saved for the backward of an operation."""
    function = op.call.function
    if isinstance(function, OpaqueCall | UnderAutocast):
        return True
    if isinstance(function, OpOverload):
        return function.namespace not in ("aten", "prims")
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def may_rest(graph: KGraph) -> list[str]:
    """Names of the parameters of `graph` whose reads and saved tensors are all in our hands."""
    dgraph = graph.sgraph.dgraph
    elsewhere = {dgraph.owner(name) for op in dgraph.nodes if is_whole(op) for name in op.inputs}
    return [name for name, leaf in dgraph.leaves.items() if leaf.kind is LeafKind.PARAMETER and name not in elsewhere]
