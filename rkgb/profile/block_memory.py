"""What a run of a block allocates and saves, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.registry import device_of, stored_bytes
from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.profiles import BlockProfile, OpProfile, StageProfile
from rkgb.profile.block_run import Around, Observer, run_block, stand_ins
from rkgb.profile.saved import Packed, SavedObserver
from rkgb.profile.timeline import StageWindow, forward_peaks, join_windows, measure_windows


class MemoryObserver(SavedObserver):
    """Records storages, saved tensors, and the windows of the allocation log."""

    def __init__(self, graph: DGraph, block: Block, log: AllocationLog) -> None:
        super().__init__(graph, block)
        self.log = log
        self.storages: list[tuple[int, int]] = []  # that may live on: address, and a mark after its allocation
        self._followed: list[tuple[StorageWeakRef, int]] = []  # the same with their bytes, for a log without addresses
        self.marks_of_op: dict[str, int] = {}
        self.windows: list[StageWindow] = []
        self._marks = 0
        self.parameter_gradient_bytes: dict[str, int] = {}
        self.input_gradient_bytes: dict[str, int] = {}

    def mark(self) -> int:
        self.log.mark()
        self._marks += 1
        return self._marks - 1

    def unpack(self, packed: Packed) -> torch.Tensor:
        if self.windows:
            self.windows[-1].needs[packed.source] = None
        return packed.tensor

    def before_op(self, op: DNode) -> None:
        super().before_op(op)
        self.marks_of_op[op.name] = self.mark()

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        super().after_op(op, values)
        self.mark()  # before anything is freed, and its address used again

    def before_node(self, op: DNode) -> None:
        self._followed = [(storage, size) for storage, size in self._followed if not storage.expired()]
        saved_bytes = sum(size_bytes for _, size_bytes in self._followed)
        self.windows.append(StageWindow(op.name, self.mark(), saved_bytes=saved_bytes, nodes=[op.name]))

    def gathered(self, gradients: Sequence[torch.Tensor | None]) -> None:
        names = [name for name in self.block.inputs if self.graph.values[name].requires_grad]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                self.input_gradient_bytes[name] = stored_bytes(gradient)
        self.mark()

    def finished(self) -> None:
        self.mark()

    def _remember(self, tensor: torch.Tensor) -> None:
        if tensor.device != self.log.device:
            return  # the log does not have it
        storage = tensor.untyped_storage()
        self.storages.append((self.log.address_of(tensor), self._marks))  # the next mark follows it
        if not self.log.has_addresses:
            self._followed.append((StorageWeakRef(storage), storage.nbytes()))

    def measured_windows(self) -> list[StageWindow]:
        """Each autograd node's stretch of the backward, in order, with its bytes."""
        for window in self.windows:
            window.needs.pop("", None)
        measure_windows(self.log, self.windows, self.storages)
        return self.windows

    def profile(self) -> BlockProfile:
        """What was seen, without times."""
        peaks = forward_peaks(self.log, [self.marks_of_op[op.name] for op in self.block.ops])
        ops = {
            op.name: OpProfile(0.0, peak_bytes, tuple(self.saved[op.name]), tuple(self.phantoms[op.name]))
            for op, peak_bytes in zip(self.block.ops, peaks, strict=True)
        }
        return BlockProfile(
            ops,
            tuple(
                StageProfile(w.op, 0.0, tuple(w.needs), w.resident_bytes, w.peak_bytes, tuple(w.nodes))
                for w in join_windows(self.measured_windows())
            ),
            self.parameter_gradient_bytes,
            self.input_gradient_bytes,
        )


def observe_memory(
    graph: DGraph, block: Block, values: dict[str, Any], device: torch.device, timing: Observer | None = None
) -> MemoryObserver:
    """Run `block` on the `values` that it reads, by name, and watch: its second run, where the first takes more.

    `timing` is told of the same run.
    """
    at = device_of(device)
    at.warm_up(lambda: run_block(graph, block, stand_ins(graph, block, values), Observer()))
    return at.unwatched(lambda: _observed(graph, block, values, device, timing))


def _observed(
    graph: DGraph, block: Block, values: dict[str, Any], device: torch.device, timing: Observer | None
) -> MemoryObserver:
    leaves = stand_ins(graph, block, values)  # outside of the log: copies of buffers are not the block's bytes
    with AllocationLog(device) as log:
        observer = MemoryObserver(graph, block, log)
        with torch.autograd.graph.saved_tensors_hooks(observer.pack, observer.unpack):
            run_block(graph, block, leaves, observer if timing is None else Around(observer, timing))
        observer.parameter_gradient_bytes = {
            name: stored_bytes(leaf.grad)
            for name, leaf in leaves.items()
            if name in graph.leaves and leaf.grad is not None
        }
    return observer
