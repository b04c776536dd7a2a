"""What is known of a value without holding it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Facts of one tensor, as seen when the sample ran.

    `owner` names the first value that held the same storage (itself, for a fresh one): storage
    equality is the truth for aliasing, schemas are not. `storage_bytes` is the whole storage's.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    owner: str
    storage_bytes: int

    def describe(self) -> str:
        """``float32[4, 128]`` with the marks that matter."""
        return f"{self.describe_array()} grad" if self.requires_grad else self.describe_array()

    def describe_array(self) -> str:
        """``float32[4, 128]``: its data type and its shape alone."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def info_of(tensor: torch.Tensor, owner: str) -> ValueInfo:
    """The facts of `tensor`, whose storage is owned by the value called `owner`."""
    return ValueInfo(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=tensor.requires_grad,
        owner=owner,
        storage_bytes=tensor.untyped_storage().nbytes(),
    )
