"""Batch normalisation again, from the statistics that the forward saved for its backward.

In training, the forward of a batch normalisation first takes the mean and the variance of its input, which is most of
its time on the CPU. With both known what is left is ``x * scale + shift``, by the code that evaluation runs, and bit by
bit what training gave: whether it is, is seen where the operation is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rkgb.devices.registry import device_of
from rkgb.ir.call import Ref
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.profiles import OpProfile
from rkgb.ir.restoration import Statistics

_DTYPES = (torch.float32, torch.float64)


def normalised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> torch.Tensor:
    """The output of a batch normalisation of `x` in training, given what it saved: ``mean[channels]`` and the inverse
    of the standard deviation, ``inverse_deviation[channels]``."""
    # A variance of one and no epsilon: evaluation then multiplies by the scale as it is given.
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    variance = torch.ones_like(inverse_deviation)
    return torch.native_batch_norm(x, scale, bias, mean, variance, False, 0.0, 0.0)[0]


def takes_statistics(graph: DGraph, op: DNode) -> bool:
    """Whether `op` is a batch normalisation in training that can be repeated from its statistics: on the CPU, where
    all is of one type."""
    if op.call.function is not torch.ops.aten.batch_norm.default or op.call.kwargs:
        return False
    x, *parameters, is_training = op.call.args[:6]
    names = [given.name for given in (x, *parameters[:2]) if isinstance(given, Ref)]
    values = [graph.values[name] for name in (*names, *op.output_names)]
    dtypes, packs = {value.dtype for value in values}, {device_of(value.device).packs for value in values}
    return bool(is_training) and len(dtypes) == 1 and dtypes <= set(_DTYPES) and packs == {True}


def statistics_of_profile(profile: OpProfile) -> Statistics | None:
    """The statistics among what a batch normalisation saves; None where it saves other tensors of its own too."""
    names = [phantom.name for phantom in profile.phantoms]
    places = [(index, saved.source) for index, saved in enumerate(profile.saved) if saved.source in names]
    if len(places) != 2 or any(profile.saved[index].offset for index, _ in places):
        return None
    return places[0], places[1]


def statistics_among(saved: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of what was saved, that which is none of what the operation was given."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    return [tensor for tensor in saved if tensor.untyped_storage()._cdata not in known]
