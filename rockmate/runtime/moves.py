"""Data of a step that are in a second memory for a while: where code says so, and what holds them.

A schedule's transfers become lines of the forward, and what the backward does before some of its operations. No line
waits for what comes back: who reads it finds that it is away.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from rk_solvers import Schedule
from rk_solvers.schedule import Backward, Compute, Leave, Offload, Recall
from rkgb import KGraph
from rkgb.ir.profiles import SavedKind
from rkgb.ir.sgraph import SNode
from rockmate.errors import OffloadError, OffloadWarning
from rockmate.offload.tier import Parcel, Shape, Tier
from rockmate.runtime.step import Handle, Step
from rockmate.runtime.tables import StepTables

Line = tuple[str, str]  # what the step is told, and of which data


@dataclass(slots=True)
class Moves:
    """What generated code says of moves, and who holds the data that are moved."""

    names: tuple[str, ...]  # of the data
    after_op: dict[str, list[Line]] = field(default_factory=dict)  # in the forward, by operation
    before_stage: dict[str, list[Line]] = field(default_factory=dict)  # by operation: before its backward
    at_end: list[Line] = field(default_factory=list)  # of the forward
    places: dict[str, dict[int, str]] = field(default_factory=dict)  # data, by what an operation saves
    keys: dict[str, list[str]] = field(default_factory=dict)  # of what is kept for segments, by data


def moves_of(graph: KGraph, schedule: Schedule, forgotten: Mapping[str, set[int]], kept: Iterable[str]) -> Moves | None:
    """The moves of `schedule`; None where it has none.

    `forgotten` has the places of those saved tensors, by operation, that recomputation makes anew: they are no holders.
    `kept` are the values that the forward keeps for a segment, each under its own name.
    """
    if not schedule.offloaded:
        return None
    moves = Moves(tuple(dict.fromkeys(schedule.offloaded)))
    moved = set(moves.names)
    for op, profile in graph.op_profiles.items():
        for place, tensor in enumerate(profile.saved):
            if tensor.source in moved and tensor.kind is not SavedKind.LEAF and place not in forgotten.get(op, set()):
                moves.places.setdefault(op, {})[place] = tensor.source
    for value in kept:
        owner = graph.sgraph.dgraph.owner(value)
        if owner in moved:
            moves.keys.setdefault(owner, []).append(value)
    _place_lines(moves, graph, schedule)
    return moves


def _place_lines(moves: Moves, graph: KGraph, schedule: Schedule) -> None:
    position = {op.name: place for place, op in enumerate(graph.sgraph.dgraph.nodes)}
    made_by = {comp.name: _last_that_computes(graph, comp.node) for comp in graph.forward}
    touching = _touching(graph, set(schedule.offloaded))
    latest: dict[str, str] = {}  # by data: the last operation that touches it so far, or that one of its lines is after
    trigger = _triggers(graph)
    computed = ""
    remaining = len(graph.forward)
    waiting: list[Line] = []  # for the next operation of the backward
    for op in schedule.ops:
        if isinstance(op, Compute) and remaining:
            computed, remaining = op.name, remaining - 1
            for name, touched in touching.get(computed, ()):
                latest[name] = max(touched, latest.get(name, touched), key=position.__getitem__)
        elif isinstance(op, Backward):
            place = trigger.get(op.name)
            lines = moves.at_end if place is None else moves.before_stage.setdefault(place, [])
            lines += waiting
            waiting = []
        elif isinstance(op, Offload | Leave | Recall):
            line = op.word, op.name
            if remaining:
                # Nodes overlap: views of what one makes may come later than operations of the nodes after it. Only
                # those of the data itself are waited for.
                place = max(made_by[computed], latest.get(op.name, made_by[computed]), key=position.__getitem__)
                latest[op.name] = place
                moves.after_op.setdefault(place, []).append(line)
            else:
                waiting.append(line)
    moves.before_stage = {place: lines for place, lines in moves.before_stage.items() if lines}


def _last_that_computes(graph: KGraph, node: SNode) -> str:
    """The last operation of a node that is no view."""
    owner = graph.sgraph.dgraph.owner
    computing = [op for op in node.ops if op.written or any(owner(name) == name for name in op.output_names)]
    return (computing or node.ops)[-1].name


def _touching(graph: KGraph, moved: set[str]) -> dict[str, list[tuple[str, str]]]:
    """By computation of the forward: data among the `moved`, each with an operation that reads, views or saves it."""
    owner = graph.sgraph.dgraph.owner
    found: dict[str, list[tuple[str, str]]] = {}
    for comp in graph.forward:
        for op in comp.node.ops:
            profile = graph.op_profiles.get(op.name)
            touched = {owner(name) for name in (*op.inputs, *op.output_names)}
            touched |= {tensor.source for tensor in profile.saved} if profile is not None else set()
            found.setdefault(comp.name, []).extend((name, op.name) for name in sorted(touched & moved))
    return found


def _triggers(graph: KGraph) -> dict[str, str]:
    """For each stage the operation whose backward begins with it, or has begun last before it."""
    found: dict[str, str] = {}
    begun: set[str] = set()
    last = ""
    for comp in graph.backward:
        if comp.op not in begun:
            begun.add(comp.op)
            last = comp.op
        found[comp.name] = last
    return found


def _tell_kept(error: OffloadError) -> None:
    warnings.warn(
        f"what was to be moved stays in memory, and steps may take more than the budget: {error}",
        OffloadWarning,
        stacklevel=3,
    )


class MovingStep(Step):
    """A step some of whose data are in a second memory for a while.

    Values are right whether or not the backward comes as it was planned: what is away comes back when it is read.
    """

    __slots__ = ("_holders", "_kept_away", "_moves", "_numbers", "_parcels", "_tier")

    def __init__(self, tables: StepTables, moves: Moves, tier: Tier) -> None:
        super().__init__(tables)
        self._moves, self._tier = moves, tier
        self._numbers = {name: -number for number, name in enumerate(moves.names, 1)}  # as segments have them
        self._holders: dict[str, list[tuple[ref[Handle], Shape | None]]] = {}
        self._parcels: dict[str, Parcel] = {}
        self._kept_away: dict[str, tuple[str, Shape]] = {}  # by key: its data, and what it is of that

    def accept(self, op: str, handles: list[Handle]) -> None:
        """Note who holds what may move."""
        super().accept(op, handles)
        if handles:  # not called for those that `settle` keeps
            for place, name in self._moves.places.get(op, {}).items():
                self._holders.setdefault(name, []).append((ref(handles[place]), None))

    # ---- what generated code says ------------------------------------------------------------------------

    def offload(self, name: str) -> None:
        """Begin to send the storage of a data, if anybody holds it: without gradients nobody does."""
        tensors = [handle.value for handle in self._alive(name) if handle.value is not None]
        tensors += [self._values[key] for key in self._moves.keys.get(name, ()) if key in self._values]
        if tensors:
            try:
                self._parcels[name] = self._tier.send(tensors[0].untyped_storage())
            except OffloadError as error:
                _tell_kept(error)

    def leave(self, name: str) -> None:
        """Let go of it once it is there. Who has written into it since keeps it, and is told in the backward."""
        parcel = self._parcels.get(name)
        if parcel is None:
            return
        try:
            parcel.wait_sent()
        except OffloadError as error:  # it is still here: the step goes on, with more memory than was planned
            _tell_kept(error)
            self._parcels.pop(name).drop()
            return
        holders: list[tuple[ref[Handle], Shape | None]] = []
        itself = ref(self)  # the step is not to hold itself: it would be there until the collector comes

        def gone(_: ref[Handle]) -> None:
            step = itself()
            if step is not None:
                step.forget(name)

        for handle in self._alive(name):
            value = handle.value
            if value is not None and value._version == handle.version:
                holders.append((ref(handle, gone), Shape.of(value)))
                handle.value, handle.step, handle.segment = None, self, self._numbers[name]
        self._holders[name] = holders
        for key in self._moves.keys.get(name, ()):
            value = self._values.get(key)
            if value is not None and value._version == self._versions.get(key, value._version):
                self._kept_away[key] = name, Shape.of(value)
                del self._values[key]

    def recall(self, name: str) -> None:
        """Begin to bring it back."""
        parcel = self._parcels.get(name)
        if parcel is not None:
            parcel.recall()

    def arrive(self, name: str) -> None:
        """Wait for it, and give it to all who had it."""
        parcel = self._parcels.pop(name, None)
        if parcel is None:
            raise OffloadError(
                f"%{name} is not in {self._tier.name} any more: it could not be brought back before. Run the forward "
                "again."
            )
        try:
            storage = parcel.take()
        finally:
            parcel.drop()
        for holder, shape in self._holders.pop(name, ()):
            handle = holder()
            if handle is not None and shape is not None:
                handle.value = shape.within(storage)
                handle.version = handle.value._version
        for key in [key for key, (owner, _) in self._kept_away.items() if owner == name]:
            self._values[key] = self._kept_away.pop(key)[1].within(storage)
            self._versions.pop(key, None)

    def forget(self, name: str) -> None:
        """Drop it in both memories if nobody is left who could read it: not all that is saved is read."""
        if self._alive(name) or any(owner == name for owner, _ in self._kept_away.values()):
            return
        parcel = self._parcels.pop(name, None)
        if parcel is not None:
            parcel.drop()

    def watch(self, op: str, output: torch.Tensor) -> None:
        """Before the backward of `op` begins, do what is to be done before it."""
        if output.grad_fn is None:
            return
        lines = self._moves.before_stage[op]

        def before(_: Any) -> None:
            for verb, name in lines:
                getattr(self, verb)(name)

        output.grad_fn.register_prehook(before)

    # ---- who reads what is away --------------------------------------------------------------------------

    def run(self, segment: int) -> None:
        """A segment, or what is away under its number."""
        if segment < 0:
            self.arrive(self._moves.names[-segment - 1])
        else:
            super().run(segment)

    def _make(self, key: str) -> None:
        away = self._kept_away.get(key)
        if away is None:
            super()._make(key)
        else:
            self.arrive(away[0])

    def _alive(self, name: str) -> list[Handle]:
        return [handle for holder, _ in self._holders.get(name, ()) if (handle := holder()) is not None]
