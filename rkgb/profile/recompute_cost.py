"""What it takes to have again what a block's operations make, in the midst of a backward.

An operation of the forward reads what the one before it has just written. When it is repeated, its inputs were written
long ago, and other data and other code have gone through the caches since: on a CPU small operations take several
times as long then. They are therefore timed with empty caches, and in the way in which they will come back
(`rkgb.restore`), where that gives the same bits. Views of leaves are made again with what reads them,
and handling takes its time, too: what stands for a forgotten tensor is made in the forward and asked in the backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch

from rkgb.devices.registry import device_of, host
from rkgb.ir.blocks import Block
from rkgb.ir.call import bind
from rkgb.ir.dgraph import DGraph, DNode, makers_of
from rkgb.ir.profiles import OpProfile
from rkgb.ir.restoration import Clock, Restoration, Seen
from rkgb.ir.sgraph import SNode
from rkgb.process.uncompiled import never_compiled
from rkgb.profile.block_run import Observer, run_block, stand_ins
from rkgb.restore import restorations
from rkgb.restore.as_saved import as_nonleaf
from rkgb.state.module_state import never_unpacked

_FIRST_RUNS = 2  # which allocate what the others find free: memory that is new to the process is slower
_TIMED_RUNS = 3
# Written to empty the caches. As much as they hold leaves a part of what was there: this is three times a common last
# level of 32 MiB, from where on times no longer grow.
CACHES_BYTES = 96 << 20
_LONG_MS = 10.0  # what takes so long in the forward hardly takes longer in the backward

Again = Callable[[], torch.Tensor]


class ColdClock:
    """Times after so many other bytes have been written, which empties the caches of what they hold."""

    def __init__(self, others_bytes: int) -> None:
        self.others_bytes = others_bytes
        self._others: torch.Tensor | None = None

    def time(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """What `run` gives, without gradients, and the least time that it took, in ms."""
        if self._others is None:
            self._others = torch.empty(self.others_bytes, dtype=torch.uint8, device="cpu")
        times_ms = []
        result = None
        with torch.no_grad():
            for number in range(_FIRST_RUNS + _TIMED_RUNS):
                if number >= _FIRST_RUNS:
                    self._others.fill_(0)
                started = time.perf_counter()
                again = run()  # what the run before made is still there, or its memory would go back to the system
                times_ms.append((time.perf_counter() - started) * 1e3)
                result = again
        return result, min(times_ms[_FIRST_RUNS:])


def repetition_times(
    graph: DGraph, block: Block, values: dict[str, Any], ops: Mapping[str, OpProfile]
) -> tuple[dict[str, float], dict[str, float]]:
    """Times in ms by node, and by operation that comes back in another way than by its repetition, bit by bit.

    A node is missing where the time of its forward will do. Of a node that is not repeated at all, it is the time of
    what is done instead. `values` are what the block reads, by name, and `ops` its measured operations.

    Raises:
        GraphError: what is kept in the place of data does not give them back.
    """
    others_bytes = _others_bytes(graph, ops)
    repeat_ms, restore_ms = _timed(graph, block, values, ops, others_bytes)
    return {name: time_ms + _handling_ms(others_bytes) for name, time_ms in repeat_ms.items()}, restore_ms


def _timed(
    graph: DGraph, block: Block, values: dict[str, Any], ops: Mapping[str, OpProfile], others_bytes: int
) -> tuple[dict[str, float], dict[str, float]]:
    """As `repetition_times`, without handling, for which there is another clock: not while this one takes memory."""
    ways = restorations(graph, block.nodes, ops)
    whole = {node for node, (first, *_) in ways.items() if first.of_node}
    nodes = [node for node in block.nodes if node not in whole and _is_worth_timing(graph, node, ops, node in ways)]
    tried = {node: found for node, found in ways.items() if node in whole or node in nodes}
    observer = _Repeating(graph, nodes, ops, ColdClock(others_bytes), tried)
    _run(graph, block, values, observer)
    return observer.repeat_ms, observer.restore_ms


def _others_bytes(graph: DGraph, ops: Mapping[str, OpProfile]) -> int:
    """How much to write before something is timed: what empties the caches, or all that the model has, if it is less.

    Where memory is short it is half of what a run of `ops` leaves of it, with two repetitions at a time: times may be
    too short then, but planning fails for no want of memory that only they would take.
    """
    storages = {value.owner: value.storage_bytes for value in graph.values.values()}
    run_bytes = 3 * sum(op.peak_bytes for op in ops.values())
    left_bytes = max(0, host().available_bytes() - run_bytes)
    return min(CACHES_BYTES, sum(storages.values()), left_bytes // 2)


@cache
def _handling_ms(others_bytes: int) -> float:
    """What it takes to pack something else for a saved tensor, and to be asked for the tensor: Python's part of it."""
    clock = ColdClock(others_bytes)
    factor = torch.zeros(1, device="cpu")
    given = torch.zeros(1, device="cpu", requires_grad=True)

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            return given * factor

    def forward_with_hooks() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(_detached, _unchanged):
            return forward()

    times_ms = []
    for run in (forward_with_hooks, forward):
        result, forward_ms = clock.time(run)
        times_ms.append(forward_ms + clock.time(partial(result.grad_fn, factor))[1])
    return max(0.0, times_ms[0] - times_ms[1])


def still_given(graph: DGraph, block: Block, values: dict[str, Any], ops: Mapping[str, OpProfile]) -> set[str]:
    """The operations that come back bit by bit in ways for which code answers that is not ours."""
    ways = restorations(graph, block.nodes, ops)
    seen = {node: tuple(way for way in found if way.rests_on_kernels) for node, found in ways.items()}
    observer = _Repeating(graph, (), ops, _NoClock(), {node: found for node, found in seen.items() if found})
    _run(graph, block, values, observer)
    return set(observer.restore_ms)


class _NoClock:
    """Runs what others time: once, in no time."""

    def time(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """What `run` gives."""
        with torch.no_grad():
            return run(), 0.0


def _run(graph: DGraph, block: Block, values: dict[str, Any], observer: _Repeating) -> None:
    if not observer.is_idle:
        with torch.autograd.graph.saved_tensors_hooks(observer.pack, never_unpacked):
            run_block(graph, block, stand_ins(graph, block, values), observer, forward_only=True)


def _is_worth_timing(graph: DGraph, node: SNode, ops: Mapping[str, OpProfile], has_ways: bool) -> bool:
    names = [name for op in node.ops for name in op.output_names]
    if not node.recomputable or not all(device_of(graph.values[name].device).times_cold for name in names):
        return False
    is_long = sum(ops[op.name].time_ms for op in node.ops) > _LONG_MS
    return not is_long or has_ways


class _Repeating(Observer):
    """Tries ways to have data again as soon as their operations have run, and repeats nodes at their end."""

    def __init__(
        self,
        graph: DGraph,
        nodes: Iterable[SNode],
        ops: Mapping[str, OpProfile],
        clock: Clock,
        ways: Mapping[SNode, tuple[Restoration, ...]],
    ) -> None:
        self._graph = graph
        self._ops = ops
        self._clock = clock
        self._node_of = {op: node for node in nodes for op in node.ops}
        self._ways = {way.ops(node)[-1]: (node, way) for node, found in ways.items() for way in found}
        self._read: dict[SNode, dict[str, Any]] = {node: {} for node in self._node_of.values()}
        self._leaf_views: dict[str, DNode] = {}  # by output
        self._viewed: dict[str, Any] = {}  # leaves that these read, and what is read for its shape or type alone
        self._saved: list[torch.Tensor] | None = None  # by the operation that runs
        self._quicker: dict[str, Again] = {}  # operations of nodes that are not yet at their end
        self.repeat_ms: dict[str, float] = {}
        self.restore_ms: dict[str, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to be repeated."""
        return not (self._node_of or self._ways)

    @never_compiled  # it is no part of the compiled submodules that save
    def pack(self, tensor: torch.Tensor) -> None:
        """Note what the operation that runs saves, where a way takes it."""
        if self._saved is not None:
            self._saved.append(tensor.detach())

    def before_op(self, op: DNode) -> None:
        self._saved = [] if op in self._ways and self._ways[op][1].saved else None

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        saved, self._saved = self._saved, None
        if op in self._ways:
            self._try(*self._ways[op], Seen(op, values, saved or ()))
        if op in self._node_of:
            self._time(op, values)
        elif not op.written and all(self._graph.owner(name) in self._graph.leaves for name in op.output_names):
            self._leaf_views.update(dict.fromkeys(op.output_names, op))
            self._viewed.update((name, values[name]) for name in op.call.inputs if name not in self._leaf_views)

    def _try(self, node: SNode, way: Restoration, seen: Seen) -> None:
        trial = way.measured(seen, self._clock)
        if trial is None:
            return
        if way.of_node:
            self.repeat_ms[node.name] = trial.compute_ms
            return
        self.restore_ms[seen.op.name] = trial.compute_ms
        if trial.compute_ms < sum(self._ops[op.name].time_ms for op in way.ops(node)):
            self._quicker[seen.op.name] = trial.again

    def _time(self, op: DNode, values: dict[str, Any]) -> None:
        node = self._node_of[op]
        made = {name for other in node.ops for name in other.output_names}
        self._read[node].update((name, values[name]) for name in op.call.inputs if name not in made)
        if op is node.ops[-1]:
            ops = [*self._views_read(node), *node.ops]
            repeat = partial(self._repeat, ops, self._viewed | self._read.pop(node))
            self.repeat_ms[node.name] = self._clock.time(repeat)[1]
            self._quicker.clear()

    def _views_read(self, node: SNode) -> list[DNode]:
        """The views of leaves, and views of these, that `node` reads, in order."""
        found = makers_of((name for op in node.ops for name in op.inputs), self._leaf_views)
        return [view for view in dict.fromkeys(self._leaf_views.values()) if view in found]

    def _repeat(self, ops: list[DNode], values: dict[str, Any]) -> dict[str, Any]:
        local = dict(values)
        for op in ops:
            if op.name in self._quicker:
                bind(op.outputs, self._quicker[op.name](), local)
            elif op.name in self._ops and self._ops[op.name].phantoms:  # what autograd saves is wanted
                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_detached, never_unpacked):
                    targets = {
                        name: as_nonleaf(local[name]) if op.tracks(name, self._graph.values) else local[name].detach()
                        for name in op.written
                        if name not in self._graph.leaves
                    }
                    bind(op.outputs, op.call.evaluate(local | targets), local)
            else:
                bind(op.outputs, op.call.evaluate(local), local)
        return local


@never_compiled
def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@never_compiled
def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()
