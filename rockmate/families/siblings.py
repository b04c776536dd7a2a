"""Smaller calls that nobody has made, cut out of one that was: measured in the place of some that are to come.

A family needs a few sizes, and what is measured of a small one takes little. Its first step is compared with the
module's own, so that nothing depends on what is cut: only shapes and times are measured of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rkgb import Sample
from rockmate.guards.inputs import CallPattern

_PARTS = (3, 6, 12)  # of the call's size
_LEAST_SIZE = 8


def siblings(call: Sample, measured: CallPattern, count: int) -> list[Sample]:
    """So many calls of other sizes, cut out of `call`, which is smaller than one that was `measured`.

    None at all where it is not, or where sizes of two kinds differ. Sizes have the factors that those of both have.
    """
    places = {
        (index, dimension): (known, size)
        for index, (tensor, traits) in enumerate(zip(call.tensors, measured.traits, strict=True))
        for dimension, (size, known) in enumerate(zip(tensor.shape, traits.shape, strict=True))
        if size != known
    }
    if len(set(places.values())) != 1 or not all(tensor.is_contiguous() for tensor in call.tensors):
        return []
    ((known, size),) = set(places.values())
    factor = math.gcd(known, size)
    sizes = list(dict.fromkeys(size // parts // factor * factor for parts in _PARTS))
    smaller = [one for one in sizes if _LEAST_SIZE <= one < size < known][:count]
    if len(smaller) < count:
        return []
    return [resized(call, dict.fromkeys(places, one)) for one in smaller]


def resized(call: Sample, sizes: Mapping[tuple[int, int], int]) -> Sample:
    """A call in which dimensions of tensors have other `sizes`, made of elements of `call` at even distances.

    So padding, at whichever end, stays as much of it as it was.
    """
    parts = []
    for index, tensor in enumerate(call.tensors):
        part = tensor.detach()
        for dimension in range(tensor.dim()):
            if (index, dimension) in sizes:
                taken = torch.linspace(0, part.shape[dimension] - 1, sizes[index, dimension]).round().long()
                part = part.index_select(dimension, taken.to(part.device))
        parts.append(part.clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad))
    return call.with_tensors(parts)
