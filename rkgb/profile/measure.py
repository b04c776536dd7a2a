"""Measure blocks: each distinct one runs alone, forward and backward, on the values of a real step.

One run records what is allocated and saved, and when; a few more take times. The rest of the
model only runs forward, so that measuring needs inference memory plus one block's step.

What else the machine does can only add to a time, and goes on for a while. So times are taken at several moments, of
equivalent blocks and in two walks through the model: the least of them is what comes out again the next time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from rkgb.devices.base import Device
from rkgb.devices.registry import device_of
from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DGraph, DNode, leaf_tensors, run_nodes
from rkgb.ir.profiles import BlockProfile
from rkgb.ir.sample import Sample
from rkgb.ir.sgraph import SGraph
from rkgb.passes.equivalence import CanonicalForm, canonical_form
from rkgb.process.autocast import without_autocast
from rkgb.profile.block_memory import observe_memory
from rkgb.profile.block_run import Observer, forget_gradients, run_block, stand_ins
from rkgb.profile.recompute_cost import OtherData, estimated_restorations, repetition_times
from rkgb.state.module_state import main_device, module_devices, module_state_kept

_WALKS = ("measure", "time")  # through the model, as progress names them
_LONG_WALK_MS = 1_000.0  # where the first takes longer, there is no second: long operations vary less
_TIMED_BLOCKS = 2  # of each class, in each walk
_TIMED_RUNS = 3
# Where the forward of a block takes longer, others of its class are not timed, and watching it hardly adds to its time.
_LONG_BLOCK_MS = 30.0
_TIMED_RUNS_MS = 150.0  # a block that takes longer than this in all is timed fewer times, but at least twice

Progress = Callable[[str, int, int], None]
Compare = Callable[[DGraph, Block, dict[str, Any], BlockProfile], None]
MeasuredBlocks = dict[str, tuple[tuple[str, ...], BlockProfile]]
"""What was measured of one module on one device, by the digest of a block: the names of its values, and its profile."""


def measure_blocks(
    graph: SGraph,
    blocks: list[Block],
    module: torch.nn.Module,
    sample: Sample,
    progress: Progress | None = None,
    known: MeasuredBlocks | None = None,
    compare: Compare | None = None,
) -> list[BlockProfile]:
    """Profile every block, running representatives of each equivalence class: one for its bytes, a few for its times.

    Blocks equal to those that are `known` are not measured again, and what is measured is added there. `compare` is
    called once for each class that is known, on the values that its first block reads.
    The module's buffers, its gradients and the random streams are left as they were.
    """
    dgraph = graph.dgraph
    forms = [canonical_form(dgraph, block) for block in blocks]
    measured: MeasuredBlocks = {} if known is None else known
    classes: dict[str, list[int]] = {}
    for index, form in enumerate(forms):
        classes.setdefault(form.digest, []).append(index)
    compared = {indices[0] for digest, indices in classes.items() if digest in measured}
    new = [indices for digest, indices in classes.items() if digest not in measured]
    timed = {index for indices in new for index in _spread(indices, device_of(_device(dgraph, blocks[indices[0]])))}
    has_data = all(device_of(device).has_data for device in module_devices(module, sample.tensors))
    others = OtherData()
    started = time.perf_counter()
    for walk in _WALKS:
        if walk != _WALKS[0] and (not timed or not has_data or (time.perf_counter() - started) * 1e3 > _LONG_WALK_MS):
            break
        with module_state_kept(module, module_devices(module, sample.tensors), dgraph.generators), without_autocast():
            for index, values in _walked(blocks, dict(leaf_tensors(dgraph.leaves, module, sample.tensors))):
                if progress is not None:
                    progress(walk, index, len(blocks))
                block, form = blocks[index], forms[index]
                if index in timed:
                    _measure(dgraph, block, form, values, measured, others)
                elif compare is not None and walk == _WALKS[0] and index in compared:
                    compare(dgraph, block, values, _profile_of(form, measured))
        if progress is not None:
            progress(walk, len(blocks), len(blocks))
    return [_profile_of(form, measured) for form in forms]


def _spread(indices: list[int], device: Device) -> list[int]:
    """The first of equivalent blocks, and others far from each other where their times are measured."""
    if not device.has_data:
        return indices[:1]
    return [indices[number * len(indices) // _TIMED_BLOCKS] for number in range(_TIMED_BLOCKS)]


def _walked(blocks: list[Block], values: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each block's index and what a forward without gradients, which starts from `values`, has there for it."""
    last_reader = {name: index for index, block in enumerate(blocks) for name in block.inputs}
    for index, block in enumerate(blocks):
        yield index, values
        with torch.no_grad():
            run_nodes(block.ops, values, [name for name in block.outputs if last_reader.get(name, -1) > index])
        for name in block.inputs:
            if last_reader[name] == index:
                del values[name]


def _measure(
    graph: DGraph,
    block: Block,
    form: CanonicalForm,
    values: dict[str, Any],
    measured: MeasuredBlocks,
    others: OtherData,
) -> None:
    """Add what `block` takes to what was `measured`: bytes where it is the first of its class, and times."""
    if form.digest in measured:
        before = _profile_of(form, measured)
        if _forward_ms(before) > _LONG_BLOCK_MS:
            return
        profile = before.least_times(_timed(graph, block, values, before, others))
    else:
        timing = _Timing(_device(graph, block))
        seen = timing.of(observe_memory(graph, block, values, _device(graph, block), timing).profile())
        if device_of(_device(graph, block)).has_data:
            profile = _timed(graph, block, values, seen, others)
        else:
            repeat_ms, restore_ms = estimated_restorations(graph, block, seen.ops)
            profile = replace(seen, repeat_ms=repeat_ms, restore_ms=restore_ms)
    measured[form.digest] = form.names, profile
    forget_gradients(block, values)


def _forward_ms(profile: BlockProfile) -> float:
    return sum(op.time_ms for op in profile.ops.values())


def _profile_of(form: CanonicalForm, measured: MeasuredBlocks) -> BlockProfile:
    names, profile = measured[form.digest]
    return profile if names == form.names else profile.renamed(dict(zip(names, form.names, strict=True)))


def _device(graph: DGraph, block: Block) -> torch.device:
    return main_device(graph.values[name].device for op in block.ops for name in op.output_names)


# ---- time ------------------------------------------------------------------------------------------


class _Timing(Observer):
    """Times of one run: of operations by name, of autograd nodes by their place in the backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._op_stamps: list[tuple[str, Any, Any]] = []
        self._started: Any = None
        self._node_stamps: list[Any] = []
        self.op_ms: dict[str, float] = {}
        self.node_ms: list[float] = []

    def before_op(self, op: DNode) -> None:
        self._started = self._device.stamp()

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        self._op_stamps.append((op.name, self._started, self._device.stamp()))

    def before_node(self, op: DNode) -> None:
        self._node_stamps.append(self._device.stamp())

    def finished(self) -> None:
        stamps = [*self._node_stamps, self._device.stamp()]
        self.op_ms = {name: self._device.elapsed_ms(start, end) for name, start, end in self._op_stamps}
        self.node_ms = [self._device.elapsed_ms(a, b) for a, b in itertools.pairwise(stamps)]

    def of(self, profile: BlockProfile) -> BlockProfile:
        """The `profile` of the block that ran, with the times of its run."""
        return profile.with_times(self.op_ms, self.node_ms)


def _timed(
    graph: DGraph, block: Block, values: dict[str, Any], profile: BlockProfile, others: OtherData
) -> BlockProfile:
    """The `profile` of `block` with the times that it takes now, or with those that it has where they are less.

    Those that it has count as of a run where the block is long, and as of none else.
    """
    started = time.perf_counter()
    runs = [profile] if _forward_ms(profile) > _LONG_BLOCK_MS else []
    while len(runs) < _TIMED_RUNS:
        timing = _Timing(_device(graph, block))
        run_block(graph, block, stand_ins(graph, block, values), timing)
        runs.append(timing.of(profile))
        if len(runs) >= 2 and (time.perf_counter() - started) * 1e3 > _TIMED_RUNS_MS:
            break
    least = reduce(BlockProfile.least_times, runs)
    repeat_ms, restore_ms = repetition_times(graph, block, values, least.ops, others)
    return replace(least, repeat_ms=repeat_ms, restore_ms=restore_ms)
