"""What a plan takes for granted of a call: the structure of the arguments, and each tensor's traits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rkgb import Sample
from rkgb.process.autocast import OFF, Autocast
from rockmate.errors import InputMismatch
from rockmate.guards.flags import Flags
from rockmate.guards.numbers import blanked, is_same_structure


@dataclass(frozen=True, slots=True)
class CallPattern:
    """The sample without its data: it keeps no tensor alive."""

    skeleton: Any
    traits: tuple[_Traits, ...]
    autocast: Autocast = OFF  # in force while planning
    flags: Flags | None = None  # of PyTorch's back ends, in force while planning; None where they do not matter

    # Paths of numbers that may be others: the code computes with them. A plan for the sample's is the same plan.
    free: frozenset[tuple[Any, ...]] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, sample: Sample, autocast: Autocast = OFF, flags: Flags | None = None) -> CallPattern:
        """The pattern of every call that is like `sample`."""
        return cls(sample.skeleton(), tuple(_Traits.of(tensor) for tensor in sample.tensors), autocast, flags)

    @property
    def batch(self) -> int | None:
        """The first dimension that all tensors share, as rows of a batch; None where they share none."""
        sizes = {traits.shape[0] for traits in self.traits if traits.shape}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def but_for_numbers(self) -> Any:
        """Equal for patterns that differ in numbers that are free."""
        return replace(self, skeleton=blanked(self.skeleton, self.free))

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the tensors."""
        return {traits.device for traits in self.traits}

    @property
    def key(self) -> Hashable:
        """Equal for patterns of calls whose tensors are alike; what else differs, `mismatch` tells."""
        return self.traits

    def mismatch(self, call: Sample) -> InputMismatch | None:
        """How `call` differs from what was planned for; None where it does not."""
        skeleton = call.skeleton()
        if not _is_same(skeleton, self.skeleton) and (
            not self.free or not _is_same(blanked(skeleton, self.free), blanked(self.skeleton, self.free))
        ):
            return InputMismatch(
                f"the arguments {skeleton} differ from the sample's {self.skeleton} in structure or in a value "
                "that is no tensor. Plan the module again with such a sample."
            )
        for index, (tensor, expected) in enumerate(zip(call.tensors, self.traits, strict=True)):
            found = _Traits.of(tensor)
            if found != expected:
                return InputMismatch(
                    f"tensor {index} of this call is {found}, but the sample's was {expected}: the plan holds for the "
                    "sample's shapes and strides. Make a batch like it (.contiguous() repairs strides), or plan the "
                    "module again with this one."
                )
        return None

    def size_ratios(self, other: CallPattern) -> list[float] | None:
        """For each dimension of each tensor, how much smaller `other` is; None where more than sizes differ."""
        if self.autocast != other.autocast or not _is_same(other.skeleton, self.skeleton):
            return None
        ratios: list[float] = []
        for found, expected in zip(other.traits, self.traits, strict=True):
            if found.but_for_sizes != expected.but_for_sizes:
                return None
            ratios += [big / max(size, 1) for size, big in zip(found.shape, expected.shape, strict=True)]
        return ratios

    def __str__(self) -> str:
        text = ", ".join(map(str, self.traits))
        if self.autocast.regions:
            text += f" under autocast {self.autocast.regions}"
        return text if self.autocast.caches and not self.autocast.off else f"{text}, autocast {self.autocast}"


@dataclass(frozen=True, slots=True)
class _Traits:
    """What a plan takes for granted of an input. Strides decide which operations copy and which make views."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    strides: tuple[int, ...]  # 0 where there is but one element to step over

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Traits:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, _strides(tensor))

    @property
    def but_for_sizes(self) -> tuple[int, torch.dtype, torch.device, bool]:
        """What is equal for tensors that differ in sizes alone."""
        return (len(self.shape), self.dtype, self.device, self.requires_grad)

    def __str__(self) -> str:
        grad = " requiring a gradient" if self.requires_grad else ""
        plain = _strides(torch.empty(self.shape, device="meta"))
        strides = f" with strides {list(self.strides)}" if self.strides != plain else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}{strides}{grad}"


def _is_same(skeleton: Any, other: Any) -> bool:
    """Whether two structures are. Arguments that cannot be compared are not, such as two arrays of a library."""
    try:
        return is_same_structure(skeleton, other)
    except Exception:  # noqa: BLE001  whatever comparing objects of the user's raises
        return False


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
