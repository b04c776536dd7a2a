"""What a second memory offers: tensors are sent there, and come back, each beside what is computed meanwhile.

A *parcel* is one storage on its way. Its bytes are held at the source until `Parcel.wait_sent`, and at the target from
`Parcel.recall` on: nobody needs to know how fast a transfer is to know what is held when. The transfer itself is over
some time before; who waits for it gives up no more than the rest of it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from rockmate.errors import OffloadError
from rockmate.units import format_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """Of which bytes of its storage a tensor is."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """That of `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor of this shape in `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Parcel(abc.ABC):
    """One storage in the second memory, or on its way there or back.

    Nobody may write into the storage between `Tier.send` and `wait_sent`.
    """

    @abc.abstractmethod
    def wait_sent(self) -> None:
        """Until it has arrived; the storage is let go of. Raises `OffloadError` where it could not be stored.

        The second call, and each after it, does nothing.
        """

    @abc.abstractmethod
    def recall(self) -> None:
        """Take memory for it, and begin to bring it back; nothing where that has begun. After `wait_sent`."""

    @abc.abstractmethod
    def take(self) -> torch.UntypedStorage:
        """The storage, once it is back: until then it is waited for, and first recalled where nobody has.

        It is the caller's then; the second memory still has what it was, for another `recall`. Raises `OffloadError`
        where it cannot be read.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """Let go of it in both memories, wherever it is. What is on its way is waited for by nobody."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one direction has moved so far."""

    transfers: int = 0
    size_bytes: int = 0
    busy_ms: float = 0.0

    def and_one(self, size_bytes: int, busy_ms: float) -> Traffic:
        """With one transfer more."""
        return Traffic(self.transfers + 1, self.size_bytes + size_bytes, self.busy_ms + busy_ms)

    def since(self, earlier: Traffic) -> Traffic:
        """What was moved between the two."""
        return Traffic(
            self.transfers - earlier.transfers, self.size_bytes - earlier.size_bytes, self.busy_ms - earlier.busy_ms
        )


class Tier(abc.ABC):
    """A second memory, with a budget of its own."""

    name: str  # as messages have it
    staging_bytes: int = 0  # of the first memory, which transfers use throughout
    unit_bytes: int = 1  # what is there takes whole multiples of it

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.most_held_bytes = 0

    @abc.abstractmethod
    def send(self, storage: torch.UntypedStorage) -> Parcel:
        """Begin to copy `storage` there. Raises `OffloadError` where that would exceed the budget."""

    @abc.abstractmethod
    def room_bytes(self) -> int:
        """What is free there now, beside what it has taken."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give all back that it has taken; parcels that are there cannot be had any more. More than once is no harm."""

    @abc.abstractmethod
    def traffic(self) -> tuple[Traffic, Traffic]:
        """What it has moved so far, out and back; transfers that were begun may be waited for."""

    def watch_most(self) -> None:
        """Let `most_held_bytes` be of what comes from now on."""
        self.most_held_bytes = self.held_bytes

    def _hold(self, size_bytes: int) -> None:
        if self.limit_bytes is not None and self.held_bytes + size_bytes > self.limit_bytes:
            raise OffloadError(
                f"{format_bytes(self.held_bytes)} are in {self.name}, and {format_bytes(size_bytes)} more are beyond "
                f"its limit of {format_bytes(self.limit_bytes)}. Raise the limit, or plan with less of it."
            )
        self.held_bytes += size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def _let_go(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
