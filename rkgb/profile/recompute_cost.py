"""What it takes to have again what a block's operations make, in the midst of a backward.

An operation of the forward reads what the one before it has just written. When it is repeated, its inputs were written
long ago, and other data and other code have gone through the caches since: on a CPU small operations take several
times as long then. They are therefore timed with empty caches, and in the way in which they will come back
(`rkgb.restore`), where that gives the same bits. Views of leaves are made again with what reads them,
and handling takes its time, too: what stands for a forgotten tensor is made in the forward and asked in the backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from rkgb.devices.registry import device_of, host
from rkgb.ir.blocks import Block
from rkgb.ir.call import bind
from rkgb.ir.dgraph import DGraph, DNode, makers_of
from rkgb.ir.profiles import OpProfile
from rkgb.ir.restoration import Restoration, Seen, Trial
from rkgb.ir.sgraph import SNode
from rkgb.process.uncompiled import never_compiled
from rkgb.profile.block_run import Observer, run_block, stand_ins
from rkgb.restore import restorations
from rkgb.restore.as_saved import as_nonleaf
from rkgb.state.module_state import never_unpacked

_FIRST_RUNS = 2  # which allocate what the others find free: memory that is new to the process is slower
_TIMED_RUNS = 3
_TIMED_RUNS_MS = 30.0  # what takes longer than this in all is timed fewer times, but at least twice
# Written to empty the caches. As much as they hold leaves a part of what was there: this is three times a common last
# level of 32 MiB, from where on times no longer grow.
CACHES_BYTES = 96 << 20
_LONG_MS = 10.0  # what takes so long in the forward hardly takes longer in the backward

Again = Callable[[], torch.Tensor]


class OtherData:
    """What is written to empty the caches: memory that is new to the process takes longer to get than to write."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def held_bytes(self) -> int:
        """What it takes until it is released."""
        return self._held.nbytes

    def of(self, size_bytes: int) -> torch.Tensor:
        """So many bytes, and no more are held."""
        if self.held_bytes != size_bytes:
            self.release()  # before there is other memory
            self._held = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return self._held

    def release(self) -> None:
        """Hold nothing."""
        self._held = torch.empty(0, dtype=torch.uint8, device="cpu")


class ColdClock:
    """Times after so many bytes of other data have been written, which empties the caches of what they hold."""

    def __init__(self, others_bytes: int, others: OtherData | None = None) -> None:
        self.others_bytes = others_bytes
        self._others = others or OtherData()

    def times(self, runs: Sequence[Callable[[], Any]]) -> list[float]:
        """The least time of each of `runs`, in ms, without gradients.

        They run one after another, several times over, and the caches are emptied before each round: writing takes far
        longer than most runs do, and each run reads data of its own, which those before it in the round have not read.
        """
        others = self._others.of(self.others_bytes)
        least_ms = [math.inf] * len(runs)
        results: list[Any] = [None] * len(runs)
        timed_ms = 0.0
        with torch.no_grad():
            for number in range(_FIRST_RUNS + _TIMED_RUNS):
                if number >= _FIRST_RUNS:
                    if number >= _FIRST_RUNS + 2 and timed_ms > _TIMED_RUNS_MS:
                        break
                    others.fill_(0)
                for place, run in enumerate(runs):
                    started = time.perf_counter()
                    again = run()  # what the run before made is still there, or its memory would go back to the system
                    elapsed_ms = (time.perf_counter() - started) * 1e3
                    results[place] = again
                    if number >= _FIRST_RUNS:
                        timed_ms += elapsed_ms
                        least_ms[place] = min(least_ms[place], elapsed_ms)
        return least_ms


def repetition_times(
    graph: DGraph, block: Block, values: dict[str, Any], ops: Mapping[str, OpProfile], others: OtherData
) -> tuple[dict[str, float], dict[str, float]]:
    """Times in ms by node, and by operation that comes back in another way than by its repetition, bit by bit.

    A node is missing where the time of its forward will do. Of a node that is not repeated at all, it is the time of
    what is done instead. `values` are what the block reads, by name, `ops` its measured operations, and `others` is
    written in between.

    Raises:
        GraphError: what is kept in the place of data does not give them back.
    """
    wanted_bytes, left_bytes = _wanted_bytes(graph), _left_bytes(ops, others)
    others_bytes = min(wanted_bytes, left_bytes // 2)
    if others_bytes < wanted_bytes:
        others.release()
    handling_ms = _handling_ms(others_bytes)  # first: it is known from then on, and takes as much memory again
    repeat_ms, restore_ms = _timed(graph, block, values, ops, ColdClock(others_bytes, others))
    if others_bytes < wanted_bytes:
        others.release()  # the next block may need this memory to run
    return {name: time_ms + handling_ms for name, time_ms in repeat_ms.items()}, restore_ms


def estimated_restorations(
    graph: DGraph, block: Block, ops: Mapping[str, OpProfile]
) -> tuple[dict[str, float], dict[str, float]]:
    """As `repetition_times`, where there are no data: what comes back in another way is read and written once.

    That it comes back bit by bit is taken for granted.
    """
    repeat_ms: dict[str, float] = {}
    restore_ms: dict[str, float] = {}
    for node, ways in restorations(graph, block.nodes, ops).items():
        for way in ways:
            last = way.ops(node)[-1]
            values = [graph.values[name] for name in last.output_names]
            time_ms = sum(device_of(value.device).copy_ms(value.storage_bytes) for value in values)
            if way.of_node:
                repeat_ms[node.name] = time_ms
            else:
                restore_ms[last.name] = time_ms
    return repeat_ms, restore_ms


def _timed(
    graph: DGraph, block: Block, values: dict[str, Any], ops: Mapping[str, OpProfile], clock: ColdClock
) -> tuple[dict[str, float], dict[str, float]]:
    """As `repetition_times`, without handling."""
    ways = restorations(graph, block.nodes, ops)
    whole = {node for node, (first, *_) in ways.items() if first.of_node}
    nodes = [node for node in block.nodes if node not in whole and _is_worth_timing(graph, node, ops, node in ways)]
    tried = {node: found for node, found in ways.items() if node in whole or node in nodes}
    observer = _Repeating(graph, nodes, ops, clock, tried)
    _run(graph, block, values, observer)
    return observer.repeat_ms, observer.restore_ms


def _wanted_bytes(graph: DGraph) -> int:
    """How much to write before something is timed: what empties the caches, or all that the model has if it is less."""
    storages = {value.owner: value.storage_bytes for value in graph.values.values()}
    return min(CACHES_BYTES, sum(storages.values()))


def _left_bytes(ops: Mapping[str, OpProfile], others: OtherData) -> int:
    """What a run of `ops` with two repetitions at a time leaves of the memory: half of it may be written.

    Times may be too short where it is little, but planning fails for no want of memory that only they would take.
    """
    run_bytes = 3 * sum(op.peak_bytes for op in ops.values())
    return max(0, host().available_bytes() + others.held_bytes - run_bytes)


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

    # Each alone: one would leave in the caches what the other finds there.
    def time_ms(run: Callable[[], torch.Tensor]) -> float:
        backward: Any = run().grad_fn
        return clock.times([run])[0] + clock.times([partial(backward, factor)])[0]

    times_ms = [time_ms(run) for run in (forward_with_hooks, forward)]
    return max(0.0, times_ms[0] - times_ms[1])


def still_given(graph: DGraph, block: Block, values: dict[str, Any], ops: Mapping[str, OpProfile]) -> set[str]:
    """The operations that come back bit by bit in ways for which code answers that is not ours."""
    ways = restorations(graph, block.nodes, ops)
    seen = {node: tuple(way for way in found if way.rests_on_kernels) for node, found in ways.items()}
    observer = _Repeating(graph, (), ops, None, {node: found for node, found in seen.items() if found})
    _run(graph, block, values, observer)
    return observer.given_again


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
    """Tries ways to have data again as soon as their operations have run, and times what is repeated after the block.

    Until then the values that are read again live: at most as much as a step of the block holds.
    """

    def __init__(
        self,
        graph: DGraph,
        nodes: Iterable[SNode],
        ops: Mapping[str, OpProfile],
        clock: ColdClock | None,  # None where nobody asks how long
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
        self._cut_off: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: values, and the same without a graph
        self._repeated: list[tuple[SNode, list[DNode], dict[str, Any]]] = []  # with what they read
        self._trials: list[tuple[SNode, Restoration, Trial]] = []
        self._quicker: dict[str, Again] = {}  # by operation
        self.given_again: set[str] = set()  # operations
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
            node, way = self._ways[op]
            trial = way.tried(Seen(op, values, saved or ()))
            if trial is not None:
                self.given_again.add(op.name)
                self._trials.append((node, way, trial))
        if op in self._node_of:
            self._note(op, values)
        elif not op.written and all(self._graph.owner(name) in self._graph.leaves for name in op.output_names):
            self._leaf_views.update(dict.fromkeys(op.output_names, op))
            self._viewed.update((name, values[name]) for name in op.call.inputs if name not in self._leaf_views)

    def finished(self) -> None:
        if self._clock is not None:
            self._time_ways(self._clock)
            nodes = [partial(self._repeat, ops, values) for _, ops, values in self._repeated]
            times_ms = self._clock.times(nodes) if nodes else []
            self.repeat_ms |= {node.name: ms for (node, *_), ms in zip(self._repeated, times_ms, strict=True)}
        # The hooks of autograd's nodes know this object: what it holds of them would be in a cycle that nobody sees.
        for held in (self._repeated, self._trials, self._quicker, self._cut_off, self._viewed):
            held.clear()

    def _time_ways(self, clock: ColdClock) -> None:
        """Before what is repeated, which takes the quicker of two ways."""
        runs = [run for *_, trial in self._trials for run in (trial.again, trial.keep) if run is not None]
        times_ms = iter(clock.times(runs) if runs else [])
        for node, way, trial in self._trials:
            compute_ms = next(times_ms) + (0.0 if trial.keep is None else next(times_ms))
            if way.of_node:
                self.repeat_ms[node.name] = compute_ms
                continue
            ops = way.ops(node)
            self.restore_ms[ops[-1].name] = compute_ms
            if compute_ms < sum(self._ops[op.name].time_ms for op in ops):
                self._quicker[ops[-1].name] = trial.again

    def _note(self, op: DNode, values: dict[str, Any]) -> None:
        node = self._node_of[op]
        made = {name for other in node.ops for name in other.output_names}
        self._read[node].update((name, values[name]) for name in op.call.inputs if name not in made)
        if op is node.ops[-1]:
            read = self._viewed | self._read.pop(node)
            ops = [*self._views_read(node), *node.ops]
            self._repeated.append((node, ops, {name: self._without_graph(value) for name, value in read.items()}))

    def _without_graph(self, value: Any) -> Any:
        """The values of what the block computed; leaves as they are, whose class compiled code looks at."""
        if not isinstance(value, torch.Tensor) or value.is_leaf:
            return value
        if id(value) not in self._cut_off:
            self._cut_off[id(value)] = value, value.detach().requires_grad_()
        return self._cut_off[id(value)][1]

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
