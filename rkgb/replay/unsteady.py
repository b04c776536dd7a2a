"""Submodules that read something else out of every batch: no guard of theirs would let a second batch through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rkgb.devices.out_of_memory import is_out_of_memory
from rkgb.errors import GuardError
from rkgb.ir.bgraph import BGraph, BNode, LeafKind
from rkgb.ir.dgraph import run_nodes
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.sample import Sample
from rkgb.recording.guard import Guard
from rkgb.replay.fresh import offers
from rkgb.replay.replay import given
from rkgb.replay.varying import Noting
from rkgb.state.module_state import module_state_kept, seed_default_streams

# What differs in all of them differs in nearly every batch; a branch with two ways does so once in sixteen times.
_ROUNDS = 4
# As training does, though more at once: of the standard deviation of a parameter.
_STEP = 0.1
# How a run ends in which what comes next in the trace does not fit what was read.
_END = Exception


def unsteady_submodules(graph: BGraph, module: torch.nn.Module, sample: Sample) -> list[str]:
    """Paths of the submodules in whose calls the module reads something else at each run; empty where there are none.

    Runs differ in floating-point data, random numbers and parameters, as steps of training do, and not in integers and
    masks: what these decide is mostly the same in many batches (full sentences, the longest one's length). Where the
    root itself reads so, there is none: then nothing of the model would be left to plan.
    """
    nodes = [node for node in graph.nodes if _reads_data(node.call.function)]
    if not nodes:
        return []
    always: set[str] | None = None
    with module_state_kept(module, own=graph.generators), torch.no_grad():
        for seed in range(_ROUNDS):
            different = _what_differs(graph, module, sample, seed)
            always = different if always is None else always & different
            if not always:
                return []
    # The same line is reached in every layer, though a run may have ended in the first of them.
    lines = {node.source.location for node in nodes if node.name in (always or ())}
    found = dict.fromkeys(_innermost(node) for node in nodes if node.source.location in lines)
    return [] if "" in found else list(found)


def _reads_data(function: object) -> bool:
    return isinstance(function, Guard) or (isinstance(function, OpaqueCall) and function.traits.reads_data)


def _innermost(node: BNode) -> str:
    """Path of the submodule in whose call `node` runs: of an opaque one, of what calls it. Empty for the root."""
    own = node.call.function.path if isinstance(node.call.function, OpaqueCall) else None
    return next((path for path in reversed(node.source.modules) if path != own), "")


def _what_differs(graph: BGraph, module: torch.nn.Module, sample: Sample, seed: int) -> set[str]:
    """Names of guards and opaque calls that refuse one run, as far as it comes."""
    for offer in offers(sample):
        if offer.integers_as_given:
            different, ended = _what_one_run_reads(graph, module, offer.of(sample, seed), seed)
            if ended or different:  # else these data are none for the module
                return different
    return set()


def _what_one_run_reads(graph: BGraph, module: torch.nn.Module, data: Sample, seed: int) -> tuple[set[str], bool]:
    """Names of guards and opaque calls that refuse a run on `data`, and whether it came to its end."""
    different: set[str] = set()
    seed_default_streams(seed)
    values: dict[str, Any] = dict(given(graph, module, data.tensors))
    for name, leaf in graph.leaves.items():
        if leaf.kind is LeafKind.PARAMETER and values[name].is_floating_point():
            values[name] = values[name] + _STEP * values[name].std(correction=0) * torch.randn_like(values[name])
    nodes = [
        replace(node, call=replace(node.call, function=Noting(node.call.function, node.name, different)))
        if isinstance(node.call.function, Guard)
        else node
        for node in graph.nodes
    ]
    run: list[str] = []
    try:
        run_nodes(nodes, values, [], lambda node, _: run.append(node.name))
    except GuardError:  # of an opaque call, whose output is another
        different.add(graph.nodes[len(run)].name)
    except _END as error:
        if is_out_of_memory(error):
            raise
        return different, False
    return different, True
