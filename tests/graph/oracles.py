"""What graphs must agree with, computed another way: in one run of everything, without blocks, names or plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rkgb import AllGraphs
from rkgb.ir.call import bind
from rkgb.ir.dgraph import leaf_tensors, run_nodes
from rkgb.ir.profiles import BlockProfile
from rkgb.ir.sample import Sample
from rkgb.replay.step_record import bitwise_equal
from rkgb.state.module_state import module_state_kept

Saved = tuple[str, tuple[int, ...], tuple[int, ...], int]  # storage's name, size, stride, offset


def saved_in_one_graph(graphs: AllGraphs, module: nn.Module, sample: Sample) -> dict[str, list[Saved]]:
    """By operation, what autograd saves when all operations run into one graph, as in eager PyTorch."""
    graph = graphs.D_graph
    values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, sample.copy().tensors))
    owners: dict[int, str] = {}  # everything stays alive, so that addresses tell storages apart
    for name, tensor in values.items():
        owners.setdefault(tensor.untyped_storage()._cdata, name)
    packed: list[Tensor] = []
    found: dict[str, list[Saved]] = {}
    everything: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor), lambda nothing: nothing)
    with module_state_kept(module), torch.enable_grad(), hooks:
        for op in graph:
            packed.clear()
            with torch.set_grad_enabled(op.grad_enabled):
                bind(op.outputs, op.call.evaluate(values), values)
            for name in op.output_names:
                taker = graph.owner(name) if name in graph.handed else name
                owners.setdefault(values[name].untyped_storage()._cdata, taker)
            hidden = 0
            for tensor in packed:
                cdata = tensor.untyped_storage()._cdata
                if cdata not in owners:
                    owners[cdata], hidden = f"{op.name}.saved{hidden}", hidden + 1
            found[op.name] = [(owners[t.untyped_storage()._cdata], *layout(t)) for t in packed]
            everything.append([tensor.detach() for tensor in packed])
    return found


def layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def saved_of(graphs: AllGraphs) -> dict[str, list[Saved]]:
    """By operation, what the K graph says that autograd saves; operations that no block runs save nothing."""
    profiles = graphs.K_graph.op_profiles
    return {
        op.name: [(s.source, s.size, s.stride, s.offset) for s in profiles[op.name].saved]
        if op.name in profiles
        else []
        for op in graphs.D_graph
    }


def not_filled_again(graphs: AllGraphs, module: nn.Module, sample: Sample) -> list[str]:
    """Values of recomputable nodes that are not the same when their node is repeated after the forward.

    Each node starts from the values as the whole forward left them, with the random stream as it was. Gradients are
    on, as they are where the runtime repeats an operation of several outputs: an LSTM leaves some of them out
    otherwise. What no operation reads is left out: parts of such a workspace hold what was there before.
    """
    graph = graphs.S_graph
    different: list[str] = []
    read = {name for op in graph.dgraph for name in op.call.inputs} | set(graph.dgraph.output_names)
    values = dict(leaf_tensors(graph.dgraph.leaves, module, sample.copy().tensors))
    streams = [torch.get_rng_state()]
    with module_state_kept(module), torch.enable_grad():
        results = [value for op in graph.dgraph for value in op.output_names]
        run_nodes(graph.dgraph.nodes, values, results, lambda *_: streams.append(torch.get_rng_state()))
        stream_before = dict(zip(graph.dgraph, streams, strict=False))
        for node in [node for node in graph if node.recomputable]:
            again = dict(values)
            for op in node.ops:
                torch.set_rng_state(stream_before[op])
                with torch.set_grad_enabled(op.grad_enabled):
                    bind(op.outputs, op.call.evaluate(again), again)
            names = [value for op in node.ops for value in op.output_names if value in read]
            different += [value for value in names if not bitwise_equal(again[value], values[value])]
    return different


def untimed(profile: BlockProfile) -> tuple[Any, ...]:
    """Everything in a profile but the times."""
    ops = {name: (op.peak_bytes, op.saved, op.phantoms) for name, op in profile.ops.items()}
    stages = [(stage.op, stage.needs, stage.resident_bytes, stage.peak_bytes) for stage in profile.stages]
    return ops, stages, dict(profile.parameter_gradient_bytes)
