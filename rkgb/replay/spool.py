"""Tensors set aside in a temporary file: a training step in little more memory than inference.

Slow, and exact to the bit: a tensor comes back with its bytes, size and strides. For steps that
would not fit the device.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from rkgb.process.uncompiled import never_compiled
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.operations import negated_view


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
    is_conj: bool
    is_neg: bool


# Where files that outlive a restart are kept: on a disk, while the usual folder may be in memory.
_ON_DISK = Path("/var/tmp")


def _folder() -> str:
    """For a file that may be large: what the user's TMPDIR says, else a folder that is surely on a disk."""
    chosen = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return str(_ON_DISK) if not chosen and os.access(_ON_DISK, os.W_OK | os.X_OK) else tempfile.gettempdir()


class Spool:
    """A temporary file of tensors, gone when the context ends.

    It is in the folder that the environment's TMPDIR names. `put` raises `OSError`, with a note of what to do, where
    that is full.
    """

    def __init__(self) -> None:
        self._folder = _folder()
        self._file = tempfile.TemporaryFile(dir=self._folder)
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def put(self, tensor: torch.Tensor) -> Spooled:
        """Write what `tensor` spans of its storage. Raises `OSError` where the disk is full."""
        itemsize = tensor.element_size()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span_bytes = 0 if tensor.numel() == 0 else (steps + 1) * itemsize
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            start = tensor.storage_offset() * itemsize
            data = whole[start : start + span_bytes].cpu()
        try:
            self._file.seek(self._end)
            self._file.write(data.numpy().data)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                error.add_note(
                    f"{self._folder} has no room for {span_bytes} more bytes, after {self._end} bytes of what a step "
                    "saves for its backward. Let TMPDIR name a folder with more room."
                )
            raise
        place = Spooled(
            self._end,
            span_bytes,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        self._end += span_bytes
        return place

    def get(self, place: Spooled) -> torch.Tensor:
        """Read a tensor back: same bytes, size and strides, in a storage of its own. Raises `OSError`."""
        data = torch.empty(place.size_bytes, dtype=torch.uint8, device="cpu")
        self._file.seek(place.offset_bytes)
        if self._file.readinto(data.numpy().data) != place.size_bytes:
            raise OSError(errno.EIO, f"the temporary file of saved tensors in {self._folder} has been cut short")
        tensor = data.to(place.device).view(place.dtype).as_strided(place.shape, place.stride)
        # The bytes are those of the storage: a lazy conjugation or negation is still to come.
        tensor = tensor.conj() if place.is_conj else tensor
        return negated_view(tensor) if place.is_neg else tensor


@contextlib.contextmanager
def saved_on(spool: Spool, kept: set[int]) -> Iterator[None]:
    """Autograd's saved tensors go to `spool` meanwhile, but those whose storages are in `kept`."""

    @never_compiled  # it is no part of the compiled submodules that save
    def pack(tensor: torch.Tensor) -> torch.Tensor | Spooled:
        if storage_key(tensor) in kept or tensor.layout is not torch.strided:
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
