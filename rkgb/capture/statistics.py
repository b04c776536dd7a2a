"""Recorded batch normalisations whose statistics nothing reads but their own backward.

Below autograd a batch normalisation returns its mean and inverse deviation beside its output. The operation above it
returns the output alone: what autograd saves is then no value of the graph that a repetition would have to give back,
and the output can be had again from it (`rkgb.restore.batch_norm`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rkgb.ir.bgraph import BGraph, BNode
from rkgb.ir.call import Call

_NATIVE = torch.ops.aten.native_batch_norm.default
_WHOLE = torch.ops.aten.batch_norm.default


def with_statistics_hidden(graph: BGraph) -> BGraph:
    """`graph` with the operation that returns its output alone in place of each such batch normalisation."""
    read = {name for node in graph.nodes for name in node.call.inputs} | set(graph.output_names)
    return replace(graph, nodes=[_without_statistics(node, read) for node in graph.nodes])


def _without_statistics(node: BNode, read: set[str]) -> BNode:
    if node.call.function is not _NATIVE or not read.isdisjoint(node.output_names[1:]):
        return node
    # Without cuDNN, and without MIOpen, which it stands for too: on all devices this calls what was recorded.
    return replace(node, call=Call(_WHOLE, (*node.call.args, False), sizes=node.call.sizes), outputs=node.outputs[0])
