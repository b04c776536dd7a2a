"""Tensors set aside in a temporary file: a training step in little more memory than inference.

Slow, and exact to the bit: a tensor comes back with its bytes, size and strides. For steps that
would not fit the device.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch


@dataclass(frozen=True, slots=True)
class Spooled:
    """One tensor in the file of a `Spool`."""

    offset_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Spool:
    """A temporary file of tensors, gone when the context ends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def put(self, tensor: torch.Tensor) -> Spooled:
        """Write what `tensor` spans of its storage."""
        itemsize = tensor.element_size()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span_bytes = 0 if tensor.numel() == 0 else (steps + 1) * itemsize
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            start = tensor.storage_offset() * itemsize
            data = whole[start : start + span_bytes].cpu()
        self._file.seek(self._end)
        self._file.write(data.numpy().data)
        place = Spooled(
            self._end,
            span_bytes,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )
        self._end += span_bytes
        return place

    def get(self, place: Spooled) -> torch.Tensor:
        """Read a tensor back: same bytes, size and strides, in a storage of its own."""
        data = torch.empty(place.size_bytes, dtype=torch.uint8)
        self._file.seek(place.offset_bytes)
        self._file.readinto(data.numpy().data)
        return data.to(place.device).view(place.dtype).as_strided(place.shape, place.stride)


@contextlib.contextmanager
def saved_on(spool: Spool, kept: set[int]) -> Iterator[None]:
    """Autograd's saved tensors go to `spool` meanwhile, but those whose storages are in `kept`."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | Spooled:
        if tensor.untyped_storage()._cdata in kept or tensor.layout is not torch.strided:
            return tensor.detach()
        return spool.put(tensor.detach())

    def unpack(packed: torch.Tensor | Spooled) -> torch.Tensor:
        return spool.get(packed) if isinstance(packed, Spooled) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextlib.contextmanager
def gradients_taken(module: torch.nn.Module, take: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Hand every parameter's gradient to `take` as soon as a backward has made it, and free it."""

    def hook(parameter: torch.Tensor, name: str) -> None:
        if parameter.grad is not None:
            take(name, parameter.grad)
            parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: hook(p, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
