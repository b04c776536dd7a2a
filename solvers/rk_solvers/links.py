"""The second memory and the links to it: what a data takes that leaves and comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Link:
    """One direction. Its transfers follow one another in the order in which they were begun.

    Raises `ValueError` for numbers of no link.
    """

    bytes_per_ms: float  # 1e6 is 1 GB/s
    latency_ms: float = 0.0  # of each transfer, in which the link does nothing else
    burden: float = 0.0  # of a transfer's time: by so much longer takes what is computed beside it

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_ms) and self.bytes_per_ms > 0):
            raise ValueError(f"a link moves {self.bytes_per_ms} bytes per ms; that must be positive and finite")
        if not (math.isfinite(self.latency_ms) and self.latency_ms >= 0):
            raise ValueError(f"a link has a latency of {self.latency_ms} ms; that must not be negative, and finite")
        if not 0 <= self.burden <= 1:
            raise ValueError(f"a link has a burden of {self.burden}; give the share of a transfer's time, from 0 to 1")

    def time_ms(self, size_bytes: int) -> float:
        """Of one transfer, in milliseconds."""
        return self.latency_ms + size_bytes / self.bytes_per_ms

    def taking(self, times: float) -> Link:
        """The same where each transfer takes so many times as long."""
        return replace(self, bytes_per_ms=self.bytes_per_ms / times, latency_ms=self.latency_ms * times)

    def slowing_ms(self, size_bytes: int) -> float:
        """What one transfer adds to the time of the computation beside it: counted where it begins."""
        return self.burden * self.time_ms(size_bytes)


@dataclass(frozen=True, slots=True)
class SecondMemory:
    """Where data may be that are not in the first memory.

    Raises `ValueError` for negative sizes.
    """

    out: Link
    back: Link
    limit_bytes: int | None = None  # of what is there at once
    staging_bytes: int = 0  # of the first memory, throughout a step that moves something
    unit_bytes: int = 1  # what is there takes whole multiples of it

    def __post_init__(self) -> None:
        if self.staging_bytes < 0 or (self.limit_bytes is not None and self.limit_bytes < 0):
            raise ValueError(
                f"a second memory has limit_bytes {self.limit_bytes} and staging_bytes {self.staging_bytes}; neither "
                "may be negative"
            )
        if self.unit_bytes < 1:
            raise ValueError(f"a second memory has unit_bytes {self.unit_bytes}; that is at least 1")

    def has_room_for(self, stored_bytes: int) -> bool:
        """Whether so much may be there at once."""
        return self.limit_bytes is None or stored_bytes <= self.limit_bytes

    def stored_bytes(self, size_bytes: int) -> int:
        """What a data takes there."""
        return -(-size_bytes // self.unit_bytes) * self.unit_bytes
