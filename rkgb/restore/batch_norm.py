"""Batch normalisation again, from the statistics that the forward saved for its backward.

In training, the forward of a batch normalisation first takes the mean and the variance of its input, which is most of
its time on the CPU. With both known what is left is ``x * scale + shift``, by the code that evaluation runs, and bit by
bit what training gave: whether it is, is seen where the operation is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from rkgb.devices.registry import device_of
from rkgb.ir.call import Ref
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.profiles import OpProfile
from rkgb.ir.restoration import CodeWriter, Restoration, Seen, Trial
from rkgb.ir.sgraph import SNode
from rkgb.torch_private.identity import storage_key

_DTYPES = (torch.float32, torch.float64)

Statistics = tuple[tuple[int, str], tuple[int, str]]
"""The mean and the inverse deviation among what a batch normalisation saves: the place of each, and its phantom."""


@dataclass(frozen=True, slots=True)
class BatchNormStatistics(Restoration):
    """A batch normalisation had again from what its forward saved."""

    op: str  # the name of the operation
    statistics: Statistics

    rests_on_kernels: ClassVar[bool] = True

    @classmethod
    def find(cls, graph: DGraph, node: SNode, profiles: Mapping[str, OpProfile]) -> Sequence[Restoration]:
        saved = {op.name: _statistics(profiles[op.name]) for op in node.ops if _is_normalisation(graph, op)}
        return [cls(name, found) for name, found in saved.items() if found is not None]

    def ops(self, node: SNode) -> list[DNode]:
        return [op for op in node.ops if op.name == self.op]

    @property
    def saved(self) -> Statistics:
        return self.statistics

    def kept_bytes(self, graph: DGraph, node: SNode, sizes_bytes: Mapping[str, int]) -> int:
        return sum(sizes_bytes[phantom] for _, phantom in self.statistics)

    def tried(self, seen: Seen) -> Trial | None:
        given = [seen.values[arg.name] if isinstance(arg, Ref) else None for arg in seen.op.call.args[:5]]
        found = _statistics_among(seen.saved, [tensor for tensor in given if tensor is not None])
        if len(found) != 2:
            return None
        x, weight, bias = given[:3]
        assert x is not None
        again = partial(normalised, x, weight, bias, *found)
        output = seen.values[seen.op.output_names[0]]
        with torch.no_grad():
            result = again()
            is_same = result.stride() == output.stride() and torch.equal(result, output)
            del result
            if not is_same or not _gives_all_again(x, weight, bias):
                return None
        return Trial(again)

    def reads(self, op: DNode) -> tuple[Any, ...]:
        return op.call.args[:3]

    def key(self, node: SNode) -> str:
        return f"{self.op} statistics"

    def lines(self, op: DNode, key: str, last: bool, code: CodeWriter) -> list[str]:
        arguments = ", ".join(map(code.argument, op.call.args))
        return [f"{op.output_names[0]}, *saved = step.unpack({key!r}, {arguments}, last={last})"]

    def unpack(self, *kept_and_read: Any) -> Any:
        mean, inverse_deviation, x, weight, bias = kept_and_read
        return normalised(x, weight, bias, mean, inverse_deviation), mean, inverse_deviation


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


def _is_normalisation(graph: DGraph, op: DNode) -> bool:
    """Whether `op` is a batch normalisation in training that can be repeated from its statistics: on the CPU, where
    all is of one type."""
    if op.call.function is not torch.ops.aten.batch_norm.default or op.call.kwargs:
        return False
    x, *parameters, is_training = op.call.args[:6]
    names = [given.name for given in (x, *parameters[:2]) if isinstance(given, Ref)]
    values = [graph.values[name] for name in (*names, *op.output_names)]
    dtypes, packs = {value.dtype for value in values}, {device_of(value.device).packs for value in values}
    return bool(is_training) and len(dtypes) == 1 and dtypes <= set(_DTYPES) and packs == {True}


def _statistics(profile: OpProfile) -> Statistics | None:
    """The statistics among what a batch normalisation saves; None where it saves other tensors of its own too."""
    names = [phantom.name for phantom in profile.phantoms]
    places = [(index, saved.source) for index, saved in enumerate(profile.saved) if saved.source in names]
    if len(places) != 2 or any(profile.saved[index].offset for index, _ in places):
        return None
    return places[0], places[1]


def _statistics_among(saved: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of what was saved, that which is none of what the operation was given."""
    known = {storage_key(tensor) for tensor in given}
    return [tensor for tensor in saved if storage_key(tensor) not in known]


def _gives_all_again(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether statistics give the output again for other parameters too.

    A model starts with weights of one and biases of zero, with which any order of the products and sums gives the same.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    weight, bias = (
        None if given is None else torch.randn(given.shape, dtype=given.dtype, generator=generator, device="cpu")
        for given in (weight, bias)
    )
    output, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
    return torch.equal(normalised(x, weight, bias, mean, inverse), output)
