"""The calls of modules that were seen, without their data: to be estimated afterwards."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample

_MOST_READ_BYTES = 1 << 20  # whole numbers and masks, which a forward may read, are kept up to that


@dataclass(frozen=True, slots=True)
class _Seen:
    sample: Sample  # its tensors have no data
    size_bytes: int
    read: dict[int, Any]  # the numbers of those that may be read, outside of PyTorch's memory, by place


class LargestCalls:
    """The largest training call of each module that is called by none."""

    def __init__(self) -> None:
        self.keeps_last = False  # whether the module that was called last lives on with this
        self._last: torch.nn.Module | None = None
        self._seen: weakref.WeakKeyDictionary[torch.nn.Module, _Seen] = weakref.WeakKeyDictionary()

    def note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call. Nothing of it is held."""
        if self.keeps_last:
            self._last = module
        if not torch.is_grad_enabled() or not module.training:
            return
        sample = Sample(args, kwargs)
        tensors = sample.tensors
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        known = self._seen.get(module)
        if known is not None and known.size_bytes >= size_bytes:
            return
        read = {place: _numbers(tensor) for place, tensor in enumerate(tensors) if _may_be_read(tensor)}
        # Meta tensors take no memory of the device that is watched.
        shapes = [
            torch.empty_strided(
                one.shape, one.stride(), dtype=one.dtype, device="meta", requires_grad=one.requires_grad
            )
            for one in tensors
        ]
        self._seen[module] = _Seen(sample.with_tensors(shapes), size_bytes, read)

    def largest(self) -> tuple[torch.nn.Module, Sample] | None:
        """The module with most parameters, and such a call of it; None where no module is there that was called."""
        modules = list(self._seen)
        if not modules:
            return None
        module = max(modules, key=lambda one: sum(parameter.nbytes for parameter in one.parameters()))
        seen = self._seen[module]
        tensors = [
            torch.from_numpy(seen.read[place]) if place in seen.read else one
            for place, one in enumerate(seen.sample.tensors)
        ]
        return module, seen.sample.with_tensors(tensors)


def _may_be_read(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.nbytes <= _MOST_READ_BYTES


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy().copy()
