"""Measure blocks: each distinct one runs alone, forward and backward, on the values of a real step.

One run records what is allocated and saved, and when; a few more take times. The rest of the
model only runs forward, so that measuring needs inference memory plus one block's step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.call import bind
from rkgb.cut import Block
from rkgb.dgraph import DGraph, DNode, last_uses, leaf_tensors, run_nodes
from rkgb.equivalence import canonical_form
from rkgb.errors import GraphError
from rkgb.memory import AllocationLog
from rkgb.profile import BlockProfile, OpProfile, Phantom, SavedKind, SavedTensor, StageProfile
from rkgb.sample import Sample
from rkgb.sgraph import SGraph
from rkgb.state import borrowed, module_devices, without_autocast
from rkgb.timeline import StageWindow, forward_peaks, merge_stages

_TIMED_RUNS = 5
_TIMED_RUNS_MS = 800.0  # a block that takes longer than this in all is timed fewer times, but at least twice

Progress = Callable[[str, int, int], None]


def measure_blocks(
    graph: SGraph,
    blocks: list[Block],
    module: torch.nn.Module,
    sample: Sample,
    progress: Progress | None = None,
) -> list[BlockProfile]:
    """Profile every block, running one representative of each equivalence class.

    The module's buffers, its gradients and the random streams are left as they were.
    """
    forms = [canonical_form(graph.dgraph, block) for block in blocks]
    measured: dict[str, tuple[tuple[str, ...], BlockProfile]] = {}
    profiles: list[BlockProfile] = []
    last_reader = {name: index for index, block in enumerate(blocks) for name in block.inputs}
    devices = module_devices(module, sample.tensors)
    with borrowed(module, devices), without_autocast():
        values: dict[str, Any] = dict(leaf_tensors(graph.dgraph.leaves, module, sample.tensors))
        for index, (block, form) in enumerate(zip(blocks, forms, strict=True)):
            if progress is not None:
                progress("measure", index, len(blocks))
            if form.digest not in measured:
                measured[form.digest] = (form.names, _measure(graph, block, values))
            names, profile = measured[form.digest]
            profiles.append(profile.renamed(dict(zip(names, form.names, strict=True))))
            with torch.no_grad():
                run_nodes(block.ops, values, [name for name in block.outputs if last_reader.get(name, -1) > index])
            for name in block.inputs:
                if last_reader[name] == index:
                    del values[name]
    return profiles


def _measure(graph: SGraph, block: Block, values: dict[str, Any]) -> BlockProfile:
    device = _main_device(graph.dgraph, block)
    observed = _observe_memory(graph.dgraph, block, values, device)
    timings: list[_Timing] = []
    started = time.perf_counter()
    while len(timings) < _TIMED_RUNS:
        timings.append(_take_times(graph.dgraph, block, values, device))
        if len(timings) >= 2 and (time.perf_counter() - started) * 1e3 > _TIMED_RUNS_MS:
            break
    return observed.profile(timings)


def _main_device(graph: DGraph, block: Block) -> torch.device:
    devices = {graph.values[name].device for op in block.ops for name in op.output_names}
    accelerators = [device for device in devices if device.type != "cpu"]
    return accelerators[0] if accelerators else torch.device("cpu")


# ---- one run of a block ----------------------------------------------------------------------------


class FreshGradients(torch.autograd.Function):
    """Stands for the rest of the model: consumes the block's outputs, hands back new gradients."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        # Only the layouts are kept: holding an output here would keep its bytes alive.
        ctx.layouts = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)  # real, for complex outputs too

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradients = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(1e-3)
            for shape, stride, dtype, device in ctx.layouts
        ]
        return tuple(gradients)


class _Entrance(torch.autograd.Function):
    """Stands for the blocks before: their values pass, and their gradients gather until the block is done."""

    @staticmethod
    def forward(ctx: Any, observer: _Observer, *values: torch.Tensor) -> Any:
        ctx.observer = observer
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.observer.gathered(gradients)
        return (None,) * (len(gradients) + 1)


class _Observer:
    """Told of each operation and of each autograd node that a run of a block goes through."""

    def given(self, leaves: dict[str, torch.Tensor]) -> None: ...

    def before_op(self, op: DNode) -> None: ...

    def after_op(self, op: DNode, values: dict[str, Any]) -> None: ...

    def before_node(self, op: DNode) -> None: ...

    def gathered(self, gradients: Sequence[torch.Tensor | None]) -> None: ...

    def finished(self) -> None: ...


def _run_block(graph: DGraph, block: Block, leaves: dict[str, torch.Tensor], observer: _Observer) -> None:
    """Forward and backward of `block` on `leaves`, which `_stand_ins` gives; gradients are in their ``.grad``."""
    observer.given(leaves)
    values: dict[str, Any] = dict(leaves)
    entering = [name for name in block.inputs if leaves[name].requires_grad]
    if entering:
        given_in = _Entrance.apply(observer, *(leaves[name] for name in entering))  # type: ignore[no-untyped-call]
        values.update(zip(entering, given_in, strict=True))
        del given_in
    nodes = _NodeFinder(observer)
    with torch.enable_grad():
        for op, dropped in zip(block.ops, last_uses(block.ops, [*block.outputs, *block.inputs]), strict=True):
            observer.before_op(op)
            with torch.set_grad_enabled(op.grad_enabled):
                bind(op.outputs, op.call.evaluate(values), values)
            observer.after_op(op, values)
            nodes.attribute(op, [values[name] for name in op.output_names])
            for name in dropped:
                values.pop(name, None)
        # The gradients of shared inputs are there before the block's backward adds to them.
        alive = [name for name in (*block.outputs, *block.shared_inputs) if name not in block.dead_outputs]
        outputs = [values[name] for name in alive if values[name].requires_grad]
        total = FreshGradients.apply(*outputs) if outputs else None  # type: ignore[no-untyped-call]
    values.clear()
    del outputs
    if total is not None:
        total.backward()
    observer.finished()


def _stand_ins(graph: DGraph, block: Block, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the block reads, by name: leaves of an autograd graph of its own."""
    return {name: _stand_in(graph, block, name, given[name]) for name in (*block.leaves, *block.inputs)}


def _stand_in(graph: DGraph, block: Block, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the storage of `tensor`, or a copy where the block writes into it."""
    written = {graph.owner(target) for op in block.ops for target in op.written}
    detached = tensor.detach()
    if graph.owner(name) in written:
        detached = detached.clone()
    return detached.requires_grad_(graph.values[name].requires_grad)


class _NodeFinder:
    """Attributes every autograd node to the operation that created it."""

    def __init__(self, observer: _Observer) -> None:
        self._observer = observer
        self._known: set[Any] = set()

    def attribute(self, op: DNode, outputs: list[torch.Tensor]) -> None:
        # A hook that knew this object would make a cycle with the nodes, which no collector sees.
        observer = self._observer
        pending = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        while pending:
            node = pending.pop()
            # Accumulation of parameter gradients belongs to the node that feeds it.
            if node is None or node in self._known or node.name().endswith(("AccumulateGrad", "_EntranceBackward")):
                continue
            self._known.add(node)
            node.register_prehook(lambda _, op=op: observer.before_node(op))
            pending += [parent for parent, _ in node.next_functions]


# ---- memory ----------------------------------------------------------------------------------------


class _Packed:
    """Stands in the autograd graph for a saved tensor, so that its use is seen."""

    __slots__ = ("source", "tensor")

    def __init__(self, tensor: torch.Tensor, source: str) -> None:
        self.tensor = tensor
        self.source = source


class _MemoryObserver(_Observer):
    """Records storages, saved tensors, and the windows of the allocation log."""

    def __init__(self, graph: DGraph, block: Block, log: AllocationLog) -> None:
        self.graph = graph
        self.block = block
        self.log = log
        self.saved: dict[str, list[SavedTensor]] = {}
        self.phantoms: dict[str, list[Phantom]] = {op.name: [] for op in block.ops}
        self.storages: list[tuple[int, int]] = []  # that may live on: address, and a mark after its allocation
        self.marks_of_op: dict[str, int] = {}
        self.windows: list[StageWindow] = []
        self._marks = 0
        self._packed: list[_Packed] = []
        self._sources: dict[int, tuple[StorageWeakRef, str, SavedKind]] = {}
        self.parameter_gradient_bytes: dict[str, int] = {}
        self.input_gradient_bytes: dict[str, int] = {}

    def mark(self) -> int:
        self.log.mark()
        self._marks += 1
        return self._marks - 1

    def know(self, name: str, tensor: torch.Tensor, kind: SavedKind) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._sources.setdefault(reference.cdata, (reference, name, kind))

    def pack(self, tensor: torch.Tensor) -> _Packed:
        packed = _Packed(tensor.detach(), "")
        self._packed.append(packed)
        return packed

    def unpack(self, packed: _Packed) -> torch.Tensor:
        if self.windows:
            self.windows[-1].needs[packed.source] = None
        return packed.tensor

    def given(self, leaves: dict[str, torch.Tensor]) -> None:
        for name, tensor in leaves.items():
            kind = SavedKind.LEAF if name in self.graph.leaves else SavedKind.DATA
            self.know(self.graph.owner(name), tensor, kind)

    def before_op(self, op: DNode) -> None:
        self._packed = []
        self.marks_of_op[op.name] = self.mark()

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        for name in op.output_names:
            owner = self.graph.owner(name)
            fresh = owner == name
            self.know(owner, values[name], SavedKind.DATA if owner not in self.graph.leaves else SavedKind.LEAF)
            if fresh:
                self._remember(values[name])
        self.saved[op.name] = [self._describe(op, packed) for packed in self._packed]
        self._packed = []
        self.mark()  # before anything is freed, and its address used again

    def before_node(self, op: DNode) -> None:
        self.windows.append(StageWindow(op.name, self.mark()))

    def gathered(self, gradients: Sequence[torch.Tensor | None]) -> None:
        names = [name for name in self.block.inputs if self.graph.values[name].requires_grad]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                self.input_gradient_bytes[name] = gradient.untyped_storage().nbytes()
        self.mark()

    def finished(self) -> None:
        self.mark()

    def _remember(self, tensor: torch.Tensor) -> None:
        self.storages.append((tensor.untyped_storage().data_ptr(), self._marks))  # the next mark follows it

    def _describe(self, op: DNode, packed: _Packed) -> SavedTensor:
        tensor = packed.tensor
        if tensor.layout != torch.strided:
            raise GraphError(f"%{op.name} saves a {tensor.layout} tensor: only dense tensors are supported.")
        reference = StorageWeakRef(tensor.untyped_storage())
        known = self._sources.get(reference.cdata)
        if known is None:
            name = f"{op.name}.saved{len(self.phantoms[op.name])}"
            known = (reference, name, SavedKind.PHANTOM)
            self._sources[reference.cdata] = known
            self.phantoms[op.name].append(Phantom(name, tensor.untyped_storage().nbytes()))
            self._remember(tensor)
        _, source, kind = known
        packed.source = source if kind is not SavedKind.LEAF else ""
        info = self.graph.values.get(source)
        plain = not tensor.is_conj() and not tensor.is_neg() and (info is None or info.dtype == tensor.dtype)
        return SavedTensor(
            kind, source, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), refillable=plain
        )

    def profile(self, timings: list[_Timing]) -> BlockProfile:
        peaks = forward_peaks(self.log, [self.marks_of_op[op.name] for op in self.block.ops])
        ops = {
            op.name: OpProfile(
                statistics.median(timing.op_ms[op.name] for timing in timings),
                peak_bytes,
                tuple(self.saved[op.name]),
                tuple(self.phantoms[op.name]),
            )
            for op, peak_bytes in zip(self.block.ops, peaks, strict=True)
        }
        for index, window in enumerate(self.windows):
            window.needs.pop("", None)
            window.time_ms = statistics.median(timing.node_ms[index] for timing in timings)
        stages = merge_stages(self.log, self.windows, self.storages)
        return BlockProfile(
            ops,
            tuple(StageProfile(w.op, w.time_ms, tuple(w.needs), w.resident_bytes, w.peak_bytes) for w in stages),
            self.parameter_gradient_bytes,
            self.input_gradient_bytes,
        )


def _observe_memory(graph: DGraph, block: Block, values: dict[str, Any], device: torch.device) -> _MemoryObserver:
    leaves = _stand_ins(graph, block, values)  # outside of the log: copies of buffers are not the block's bytes
    with AllocationLog(device) as log:
        observer = _MemoryObserver(graph, block, log)
        with torch.autograd.graph.saved_tensors_hooks(observer.pack, observer.unpack):
            _run_block(graph, block, leaves, observer)
        observer.parameter_gradient_bytes = {
            name: leaf.grad.untyped_storage().nbytes()
            for name, leaf in leaves.items()
            if name in graph.leaves and leaf.grad is not None
        }
    return observer


# ---- time ------------------------------------------------------------------------------------------


class _Clock:
    """Time stamps on the device's own line of time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))


class _Timing(_Observer):
    """Times of one run: of operations by name, of autograd nodes by their place in the backward."""

    def __init__(self, device: torch.device) -> None:
        self._clock = _Clock(device)
        self._op_stamps: list[tuple[str, Any, Any]] = []
        self._started: Any = None
        self._node_stamps: list[Any] = []
        self.op_ms: dict[str, float] = {}
        self.node_ms: list[float] = []

    def before_op(self, op: DNode) -> None:
        self._started = self._clock.now()

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        self._op_stamps.append((op.name, self._started, self._clock.now()))

    def before_node(self, op: DNode) -> None:
        self._node_stamps.append(self._clock.now())

    def finished(self) -> None:
        stamps = [*self._node_stamps, self._clock.now()]
        self.op_ms = {name: self._clock.elapsed_ms(start, end) for name, start, end in self._op_stamps}
        self.node_ms = [self._clock.elapsed_ms(a, b) for a, b in itertools.pairwise(stamps)]


def _take_times(graph: DGraph, block: Block, values: dict[str, Any], device: torch.device) -> _Timing:
    timing = _Timing(device)
    _run_block(graph, block, _stand_ins(graph, block, values), timing)
    return timing
