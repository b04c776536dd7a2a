"""Measure blocks: each distinct one runs alone, forward and backward, on the values of a real step.

One run records what is allocated and saved, and when; a few more take times. The rest of the
model only runs forward, so that measuring needs inference memory plus one block's step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rkgb.cut import Block
from rkgb.dgraph import DGraph, DNode, leaf_tensors, run_nodes
from rkgb.equivalence import canonical_form
from rkgb.measuring.block_memory import observe_memory
from rkgb.measuring.block_run import Observer, run_block, stand_ins
from rkgb.measuring.profile import BlockProfile
from rkgb.measuring.repetition import repetition_times
from rkgb.sample import Sample
from rkgb.sgraph import SGraph
from rkgb.state import borrowed, main_device, module_devices, without_autocast

_TIMED_RUNS = 5
_TIMED_RUNS_MS = 800.0  # a block that takes longer than this in all is timed fewer times, but at least twice

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
    """Profile every block, running one representative of each equivalence class.

    Blocks equal to those that are `known` are not measured again, and what is measured is added there. `compare` is
    called once for each class that is known, on the values that its first block reads.
    The module's buffers, its gradients and the random streams are left as they were.
    """
    forms = [canonical_form(graph.dgraph, block) for block in blocks]
    measured: MeasuredBlocks = {} if known is None else known
    profiles: list[BlockProfile] = []
    met: set[str] = set()
    last_reader = {name: index for index, block in enumerate(blocks) for name in block.inputs}
    devices = module_devices(module, sample.tensors)
    with borrowed(module, devices, graph.dgraph.generators), without_autocast():
        values: dict[str, Any] = dict(leaf_tensors(graph.dgraph.leaves, module, sample.tensors))
        for index, (block, form) in enumerate(zip(blocks, forms, strict=True)):
            if progress is not None:
                progress("measure", index, len(blocks))
            if form.digest not in measured:
                measured[form.digest] = (form.names, _measure(graph, block, values))
                met.add(form.digest)
            names, profile = measured[form.digest]
            profiles.append(profile.renamed(dict(zip(names, form.names, strict=True))))
            if compare is not None and form.digest not in met:
                compare(graph.dgraph, block, values, profiles[-1])
                met.add(form.digest)
            with torch.no_grad():
                run_nodes(block.ops, values, [name for name in block.outputs if last_reader.get(name, -1) > index])
            for name in block.inputs:
                if last_reader[name] == index:
                    del values[name]
    return profiles


def _measure(graph: SGraph, block: Block, values: dict[str, Any]) -> BlockProfile:
    device = main_device(graph.dgraph.values[name].device for op in block.ops for name in op.output_names)
    observed = observe_memory(graph.dgraph, block, values, device)
    timings: list[_Timing] = []
    started = time.perf_counter()
    while len(timings) < _TIMED_RUNS:
        timings.append(_take_times(graph.dgraph, block, values, device))
        if len(timings) >= 2 and (time.perf_counter() - started) * 1e3 > _TIMED_RUNS_MS:
            break
    op_ms = {name: statistics.median(timing.op_ms[name] for timing in timings) for name in timings[0].op_ms}
    node_ms = [statistics.median(times) for times in zip(*(timing.node_ms for timing in timings), strict=True)]
    profile = observed.profile(op_ms, node_ms)
    repeat_ms, normalise_ms = repetition_times(graph.dgraph, block, values, profile.ops)
    return replace(profile, repeat_ms=repeat_ms, normalise_ms=normalise_ms)


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


class _Timing(Observer):
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
    run_block(graph, block, stand_ins(graph, block, values), timing)
    return timing
