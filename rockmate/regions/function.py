"""A region as a function of tensors: as it stands in the graph, and as it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rkgb import DGraph, DNode
from rkgb.ir.call import bind
from rkgb.passes.b_to_d import statistics_written
from rockmate.regions.find import Region
from rockmate.regions.sizes import with_arguments

Tensors = list[torch.Tensor]

_aten = torch.ops.aten


def normalisations(region: Region) -> list[DNode]:
    """Its batch normalisations, whose running statistics are written apart."""
    return [op for op in region.ops if statistics_written(op.call) is not None]


def function_of(graph: DGraph, region: Region, arguments: Sequence[Any] = ()) -> Callable[..., Tensors]:
    """The operations of `region`, one by one, on its inputs: its outputs, then what statistics are written from.

    For each batch normalisation these are the batch's means and its variances, those by one less than there are values.
    Where `arguments` are given, they stand in the places of the whole numbers in those of its operations, as
    `rockmate.regions.sizes` has them.
    """
    calls = [op.call for op in region.ops]
    calls = with_arguments(calls, arguments) if arguments else calls

    def run(*inputs: torch.Tensor) -> Tensors:
        values: dict[str, Any] = dict(zip(region.inputs, inputs, strict=True))
        statistics: Tensors = []
        for op, call in zip(region.ops, calls, strict=True):
            if statistics_written(call) is None:
                bind(op.outputs, call.evaluate(values), values)
            else:
                made, found = _normalised(graph, op, values)
                bind(op.outputs, made, values)
                statistics += found
        return [*(values[name] for name in region.outputs), *statistics]

    return run


def _normalised(graph: DGraph, op: DNode, values: dict[str, Any]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """A batch normalisation that writes nothing, and what it would write statistics from."""
    x, weight, bias, running, _, _, momentum, eps, *_ = op.call.args
    kept = graph.values[running.name].dtype  # of the statistics: a batch of fewer bits is summed up in these
    given, weight, bias = (values[one.name] for one in (x, weight, bias))
    made, _, _ = _aten.native_batch_norm.default(given, weight, bias, None, None, True, momentum, eps)
    places = [place for place in range(given.dim()) if place != 1]
    count = given.numel() // given.shape[1]
    with torch.no_grad():  # as the normalisation itself is decomposed, so that both are computed once
        variance, mean = torch.var_mean(given.to(kept), dim=places, correction=0, keepdim=True)
    # The mean is handed on, too: what is written from has a storage of its own.
    return made, (mean.reshape(-1).clone(), variance.reshape(-1) * (count / max(count - 1, 1)))
