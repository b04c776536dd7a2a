"""Bytes of the backward measured in context: in one run of the whole step.

Blocks are measured alone, with gradients made up for what comes after them. In the step itself a gradient may be a
view of a larger one, as that of a concatenation's part is, and autograd adds gradients from several blocks in an order
and in storages of its own. One run of everything, where it fits, tells what really is alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from rkgb.devices.out_of_memory import if_it_fits
from rkgb.devices.registry import device_of
from rkgb.ir.dgraph import leaf_tensors
from rkgb.ir.kgraph import KGraph
from rkgb.ir.profiles import BlockProfile, backward_stages
from rkgb.ir.sample import Sample
from rkgb.passes.cut import BlockMaker
from rkgb.process.autocast import without_autocast
from rkgb.profile.block_memory import observe_memory
from rkgb.profile.timeline import StageWindow, joined_windows
from rkgb.state.module_state import main_device, module_devices, module_state_kept


def measure_in_context(
    graph: KGraph, profiles: Sequence[BlockProfile], module: torch.nn.Module, sample: Sample
) -> bool:
    """Run the whole step once, keeping everything, and put the bytes found there into the backward of `graph`.

    `profiles` are those of which `graph` was made. Returns False, and leaves the graph as it was, where such a step
    does not fit the memory, or where autograd goes through other nodes than in the blocks one by one. The module's
    buffers, its gradients and the random streams are left as they were.
    """
    if not graph.backward or _step_bytes(graph) > device_of(_device(graph)).available_bytes():
        return False
    windows = if_it_fits(lambda: windows_of_the_step(graph, module, sample))
    if windows is None:
        return False
    by_op: dict[str, list[StageWindow]] = {}
    for window in windows:
        by_op.setdefault(window.op, []).append(window)
    stages = backward_stages(profiles)
    if Counter(op for stage in stages for op in stage.nodes) != {op: len(windows) for op, windows in by_op.items()}:
        return False
    # Autograd may go through the step in another order than through its blocks, but not through one operation.
    rest = {op: iter(windows) for op, windows in by_op.items()}
    for comp, stage in zip(graph.backward, stages, strict=True):
        window = joined_windows([next(rest[op]) for op in stage.nodes])
        comp.resident_bytes, comp.peak_bytes = window.resident_bytes, window.peak_bytes
    return True


def windows_of_the_step(graph: KGraph, module: torch.nn.Module, sample: Sample) -> list[StageWindow]:
    """Of the backward of a step that keeps everything, in the order in which autograd goes through it."""
    dgraph = graph.sgraph.dgraph
    whole = BlockMaker(graph.sgraph).block(list(graph.sgraph.nodes))
    with module_state_kept(module, module_devices(module, sample.tensors), dgraph.generators), without_autocast():
        values: dict[str, Any] = dict(leaf_tensors(dgraph.leaves, module, sample.tensors))
        return observe_memory(dgraph, whole, values, _device(graph)).measured_windows()


def _device(graph: KGraph) -> torch.device:
    return main_device(info.device for info in graph.sgraph.dgraph.values.values())


def _step_bytes(graph: KGraph) -> int:
    """At least what the step takes that keeps everything."""
    kept = sum(data.size_bytes for comp in graph.forward for data in comp.outputs)
    return kept + max(comp.peak_bytes for comp in graph.backward)
