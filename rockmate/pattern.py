"""What a plan takes for granted of a call: the structure of the arguments, and each tensor's traits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample
from rockmate.errors import InputMismatch


@dataclass(frozen=True, slots=True)
class CallPattern:
    """The sample without its data: it keeps no tensor alive."""

    skeleton: Any
    traits: tuple[_Traits, ...]
    autocast: tuple[tuple[str, torch.dtype], ...] = ()  # in force while planning: device types, and what it casts to

    @classmethod
    def of(cls, sample: Sample, autocast: tuple[tuple[str, torch.dtype], ...] = ()) -> CallPattern:
        """The pattern of every call that is like `sample`."""
        return cls(sample.skeleton(), tuple(_Traits.of(tensor) for tensor in sample.tensors), autocast)

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the tensors."""
        return {traits.device for traits in self.traits}

    def check(self, call: Sample) -> list[torch.Tensor]:
        """The tensors of `call`, in order. Raises `InputMismatch` where it is unlike the sample."""
        tensors = call.tensors
        skeleton = call.skeleton()
        if skeleton != self.skeleton:
            raise InputMismatch(
                f"the arguments {skeleton} differ from the sample's {self.skeleton} in structure or in a value "
                "that is no tensor. Plan the module again with such a sample."
            )
        for index, (tensor, expected) in enumerate(zip(tensors, self.traits, strict=True)):
            found = _Traits.of(tensor)
            if found != expected:
                raise InputMismatch(
                    f"tensor {index} of this call is {found}, but the sample's was {expected}: the plan holds for the "
                    "sample's shapes and strides. Make a batch like it (.contiguous() repairs strides), or plan the "
                    "module again with this one."
                )
        return tensors


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

    def __str__(self) -> str:
        grad = " requiring a gradient" if self.requires_grad else ""
        plain = _strides(torch.empty(self.shape, device="meta"))
        strides = f" with strides {list(self.strides)}" if self.strides != plain else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}{strides}{grad}"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
