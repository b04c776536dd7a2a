"""What it takes to have again what a block's operations make, in the midst of a backward.

An operation of the forward reads what the one before it has just written. When it is repeated, its inputs were written
long ago, and other data and other code have gone through the caches since: on a CPU small operations take several
times as long then. They are therefore timed with empty caches, and in the way in which they will be repeated: from a
smaller form, or from statistics, where these give the same bits. Views of leaves are made again with what reads them,
and handling takes its time, too: what stands for a forgotten tensor is made in the forward and asked in the backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch

from rkgb.devices.registry import device_of, host
from rkgb.errors import GraphError
from rkgb.ir.blocks import Block
from rkgb.ir.call import Ref, bind
from rkgb.ir.dgraph import DGraph, DNode, makers_of
from rkgb.ir.profiles import OpProfile
from rkgb.ir.restoration import Restoration
from rkgb.ir.sgraph import SNode
from rkgb.process.uncompiled import never_compiled
from rkgb.profile.block_run import Observer, run_block, stand_ins
from rkgb.restore.as_saved import writable
from rkgb.restore.batch_norm import normalised, statistics_among, takes_statistics
from rkgb.restore.packed_mask import compact_forms
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
    """Times in ms by node, and by batch normalisation that its statistics give again bit by bit.

    A node is missing where the time of its forward will do. Of a node with a smaller form, it is the time of making
    that form and of reading it. `values` are what the block reads, by name, and `ops` its measured operations.

    Raises:
        GraphError: a smaller form does not give back what it was made of.
    """
    others_bytes = _others_bytes(graph, ops)
    repeat_ms, normalise_ms = _timed(graph, block, values, ops, others_bytes)
    return {name: time_ms + _handling_ms(others_bytes) for name, time_ms in repeat_ms.items()}, normalise_ms


def _timed(
    graph: DGraph, block: Block, values: dict[str, Any], ops: Mapping[str, OpProfile], others_bytes: int
) -> tuple[dict[str, float], dict[str, float]]:
    """As `repetition_times`, without handling, for which there is another clock: not while this one takes memory."""
    forms = compact_forms(graph, block.nodes)
    nodes = [node for node in block.nodes if node not in forms and _is_worth_timing(graph, node, ops)]
    observer = _Repeating(graph, nodes, ops, ColdClock(others_bytes), forms)
    _run(graph, block, values, observer)
    return observer.repeat_ms, observer.normalise_ms


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


def given_by_statistics(graph: DGraph, block: Block, values: dict[str, Any]) -> set[str]:
    """The batch normalisations that their statistics give again bit by bit."""
    observer = _Repeating(graph)
    _run(graph, block, values, observer)
    return set(observer.given_again)


def _run(graph: DGraph, block: Block, values: dict[str, Any], observer: _Repeating) -> None:
    if not observer.is_idle(block):
        with torch.autograd.graph.saved_tensors_hooks(observer.pack, never_unpacked):
            run_block(graph, block, stand_ins(graph, block, values), observer, forward_only=True)


def _is_worth_timing(graph: DGraph, node: SNode, ops: Mapping[str, OpProfile]) -> bool:
    names = [name for op in node.ops for name in op.output_names]
    if not node.recomputable or not all(device_of(graph.values[name].device).times_cold for name in names):
        return False
    is_long = sum(ops[op.name].time_ms for op in node.ops) > _LONG_MS
    return not is_long or any(takes_statistics(graph, op) for op in node.ops)


def time_of_form(name: str, form: Restoration, tensor: torch.Tensor, clock: ColdClock) -> float:
    """Time in ms of making and of reading the form of `tensor`; `GraphError`, with `name`, if that gives another."""
    packed, pack_ms = clock.time(partial(form.pack, tensor))
    given_back, unpack_ms = clock.time(partial(form.unpack, packed))
    if not torch.equal(given_back, tensor):
        raise GraphError(f"the smaller form that stands for what {name} makes does not give it back.")
    return pack_ms + unpack_ms


class _Repeating(Observer):
    """Repeats batch normalisations from their statistics as soon as they have run, and nodes at their end."""

    def __init__(
        self,
        graph: DGraph,
        nodes: Iterable[SNode] = (),
        ops: Mapping[str, OpProfile] | None = None,
        clock: ColdClock | None = None,
        forms: Mapping[SNode, Restoration] | None = None,
    ) -> None:
        self._graph = graph
        self._ops = ops or {}
        self._clock = clock
        self._node_of = {op: node for node in nodes for op in node.ops}
        self._forms = {node.ops[-1]: (node.name, form) for node, form in (forms or {}).items()}
        self._read: dict[SNode, dict[str, Any]] = {node: {} for node in self._node_of.values()}
        self._leaf_views: dict[str, DNode] = {}  # by output
        self._viewed: dict[str, Any] = {}  # leaves that these read, and what is read for its shape or type alone
        self._saved: list[torch.Tensor] | None = None  # by the normalisation that runs
        self._quicker: dict[str, Again] = {}  # normalisations of nodes that are not yet at their end
        self.given_again: set[str] = set()
        self.repeat_ms: dict[str, float] = {}
        self.normalise_ms: dict[str, float] = {}

    def is_idle(self, block: Block) -> bool:
        """Whether there is nothing in `block` to be repeated."""
        return not (self._node_of or self._forms) and not any(takes_statistics(self._graph, op) for op in block.ops)

    @never_compiled  # it is no part of the compiled submodules that save
    def pack(self, tensor: torch.Tensor) -> None:
        """Note what a normalisation saves."""
        if self._saved is not None:
            self._saved.append(tensor.detach())

    def before_op(self, op: DNode) -> None:
        self._saved = [] if takes_statistics(self._graph, op) else None

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        saved, self._saved = self._saved, None
        again = None if saved is None else _again_from(op, values, saved)
        if again is not None:
            self.given_again.add(op.name)
        if self._clock is not None and op in self._node_of:
            self._time(op, values, again, self._clock)
        elif self._clock is not None and op in self._forms:
            name, form = self._forms[op]
            self.repeat_ms[name] = time_of_form(name, form, values[op.output_names[0]].detach(), self._clock)
        elif not op.written and all(self._graph.owner(name) in self._graph.leaves for name in op.output_names):
            self._leaf_views.update(dict.fromkeys(op.output_names, op))
            self._viewed.update((name, values[name]) for name in op.call.inputs if name not in self._leaf_views)

    def _time(self, op: DNode, values: dict[str, Any], again: Again | None, clock: ColdClock) -> None:
        node = self._node_of[op]
        if again is not None:
            self.normalise_ms[op.name] = clock.time(again)[1]
            if self.normalise_ms[op.name] < self._ops[op.name].time_ms:
                self._quicker[op.name] = again
        made = {name for other in node.ops for name in other.output_names}
        self._read[node].update((name, values[name]) for name in op.call.inputs if name not in made)
        if op is node.ops[-1]:
            ops = [*self._views_read(node), *node.ops]
            self.repeat_ms[node.name] = clock.time(partial(self._repeat, ops, self._viewed | self._read.pop(node)))[1]
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
                        name: writable(local[name]) if op.tracks(name, self._graph.values) else local[name].detach()
                        for name in op.written
                        if name not in self._graph.leaves
                    }
                    bind(op.outputs, op.call.evaluate(local | targets), local)
            else:
                bind(op.outputs, op.call.evaluate(local), local)
        return local


def _again_from(op: DNode, values: dict[str, Any], saved: list[torch.Tensor]) -> Again | None:
    """What gives the batch normalisation `op` again from what it `saved`, if that is the same bit by bit."""
    given = [values[arg.name] if isinstance(arg, Ref) else None for arg in op.call.args[:5]]
    found = statistics_among(saved, [tensor for tensor in given if tensor is not None])
    if len(found) != 2:
        return None
    x, weight, bias = given[:3]
    assert x is not None
    again = partial(normalised, x, weight, bias, *found)
    output = values[op.output_names[0]]
    with torch.no_grad():
        result = again()
        same = result.stride() == output.stride() and torch.equal(result, output)
        del result
        return again if same and _repeats_for_all(x, weight, bias) else None


def _repeats_for_all(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether statistics give the output again for other parameters too.

    A model starts with weights of one and biases of zero, with which any order of the products and sums gives the same.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    weight, bias = (
        None if given is None else torch.randn(given.shape, dtype=given.dtype, generator=generator, device="cpu")
        for given in (weight, bias)
    )
    output, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
    return torch.equal(normalised(x, weight, bias, mean, inverse), output)


@never_compiled
def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@never_compiled
def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()
