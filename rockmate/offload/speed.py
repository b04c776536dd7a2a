"""How fast the links to a second memory are, and what they cost the computation, measured when it is first needed.

A step moves data while it computes, so both are measured while something is computed beside: each slows the other down
where they share a core, or the bandwidth of the memory.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from rk_solvers.links import Link, SecondMemory
from rkgb.devices.registry import device_of
from rockmate.errors import OffloadError
from rockmate.offload.tier import Tier
from rockmate.units import format_bytes

_LARGE_BYTES = 32 << 20  # of the largest storages that are moved, and of all where nobody knows how large those will be
_LEAST_BYTES = 256 << 10  # of the same: what is smaller takes the latency
_SMALL_BYTES = 4 << 10
_AT_ONCE = 4  # as in a step: the next one waits for the link, and nobody for the one before
_MOST_AT_ONCE = 32  # of smaller ones, which take little time
_ROUNDS = 3  # what else the machine does adds to times: the middle of each counts
_SIDE = 256  # of the matrices that are multiplied beside: in the caches, as most of a step's time is
_ADDED = 1 << 20  # numbers that are added beside: beyond the caches, as what is between products
_ALONE_S = 0.1  # of computation with nothing moved beside
_OF_ROOM = 0.9  # of what is free in the second memory: others may want some


def measured_links(tier: Tier, device: torch.device, typical_bytes: int = _LARGE_BYTES) -> SecondMemory:
    """Both links of `tier` for storages on `device`, as they are now, beside a computation.

    Most of what is moved is to have about `typical_bytes`: a file is read into memory of 2 MiB at half the speed at
    which it is read into 32 MiB, whose pages are large. It takes about a second where a link moves 1 GB/s. Raises
    `OffloadError` where nothing can be moved.
    """
    large_bytes = min(max(typical_bytes, _LEAST_BYTES), _LARGE_BYTES)
    if tier.limit_bytes is not None:
        large_bytes = min(large_bytes, tier.limit_bytes // _AT_ONCE)
    if large_bytes < 2 * _SMALL_BYTES:
        raise OffloadError(
            f"a limit of {format_bytes(tier.limit_bytes or 0)} in {tier.name} leaves nothing to move: raise it, or "
            "leave offload out."
        )
    count = min(_MOST_AT_ONCE, _AT_ONCE * _LARGE_BYTES // large_bytes)
    if tier.limit_bytes is not None:
        count = min(count, tier.limit_bytes // large_bytes)
    for size_bytes in (large_bytes, _SMALL_BYTES):  # a file grows, threads start, memory is pinned
        _moved_ms(tier, device, size_bytes, count)
    with _Beside(device) as beside:
        alone_ms = beside.rounds_ms(_ALONE_S)
        small = [_moved_ms(tier, device, _SMALL_BYTES, _AT_ONCE) for _ in range(_ROUNDS)]
        large = [_moved_ms(tier, device, large_bytes, count, beside) for _ in range(_ROUNDS)]
    out, back = (
        _link(
            _middle([getattr(one, way).moved_ms for one in small]),
            _middle([getattr(one, way).moved_ms for one in large]),
            large_bytes,
            _burden(alone_ms, [getattr(one, way) for one in large]),
        )
        for way in ("out", "back")
    )
    room_bytes = int(_OF_ROOM * tier.room_bytes())
    limit_bytes = room_bytes if tier.limit_bytes is None else min(room_bytes, tier.limit_bytes)
    return SecondMemory(out, back, limit_bytes, tier.staging_bytes, tier.unit_bytes)


@dataclass(frozen=True, slots=True)
class _Way:
    """Transfers in one direction, all at once."""

    moved_ms: float  # of each
    round_ms: float | None  # of the computation beside them; None where nobody looked


@dataclass(frozen=True, slots=True)
class _Ways:
    out: _Way
    back: _Way


def _middle(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def _burden(alone_ms: float, ways: list[_Way]) -> float:
    """The share of a transfer's time by which computation beside it takes longer."""
    shares = [max(0.0, 1 - alone_ms / way.round_ms) for way in ways if way.round_ms]
    return min(_middle(shares), 0.9) if shares else 0.0


def _link(small_ms: float, large_ms: float, large_bytes: int, burden: float) -> Link:
    """A line through two sizes."""
    more_ms = max(large_ms - small_ms, 0.01 * large_ms)  # where the small one was held up
    bytes_per_ms = (large_bytes - _SMALL_BYTES) / more_ms
    return Link(bytes_per_ms, max(0.0, small_ms - _SMALL_BYTES / bytes_per_ms), burden)


def _moved_ms(tier: Tier, device: torch.device, size_bytes: int, count: int, beside: _Beside | None = None) -> _Ways:
    """Time out and back of each of `count` storages that are moved at once."""
    at = device_of(device)
    storages = [torch.ones(size_bytes, dtype=torch.uint8, device=device).untyped_storage() for _ in range(count)]
    at.synchronize()
    begun = _Mark.now(beside)
    parcels = [tier.send(storage) for storage in storages]
    for parcel in parcels:
        parcel.wait_sent()
    at.synchronize()
    there = _Mark.now(beside)
    storages.clear()
    for parcel in parcels:
        parcel.recall()
    for parcel in parcels:
        parcel.take()
    at.synchronize()
    back = _Mark.now(beside)
    for parcel in parcels:
        parcel.drop()
    return _Ways(begun.way_to(there, count), there.way_to(back, count))


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment, and how much was computed beside until then."""

    at_s: float
    rounds: float

    @classmethod
    def now(cls, beside: _Beside | None) -> _Mark:
        return cls(time.perf_counter(), 0.0 if beside is None else beside.rounds)

    def way_to(self, other: _Mark, count: int) -> _Way:
        passed_ms, rounds = 1e3 * (other.at_s - self.at_s), other.rounds - self.rounds
        return _Way(passed_ms / count, passed_ms / rounds if rounds else None)


class _Beside:
    """A thread that computes on a device, as a step would, for as long as this context lasts."""

    def __init__(self, device: torch.device) -> None:
        # Nothing is drawn: a first call may be planned after the user has seeded.
        self._matrix = torch.full((_SIDE, _SIDE), 1 / _SIDE, device=device)
        self._product = torch.empty_like(self._matrix)
        self._numbers = torch.zeros(_ADDED, device=device)
        self._at = device_of(device)
        self._device = device
        self._thread = threading.Thread(target=self._compute, name="rockmate-beside", daemon=True)
        self._is_over = False
        self.rounds = 0  # that were computed so far

    def __enter__(self) -> _Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def rounds_ms(self, seconds: float) -> float:
        """What a round takes, with nothing beside."""
        time.sleep(seconds / 4)  # it starts
        begun = _Mark.now(self)
        time.sleep(seconds)
        now = _Mark.now(self)
        return 1e3 * (now.at_s - begun.at_s) / max(1, now.rounds - begun.rounds)

    def _compute(self) -> None:
        while not self._is_over:
            torch.mm(self._matrix, self._matrix, out=self._product)
            self._numbers.add_(1.0)
            if not self._at.is_host:
                done = torch.Event(self._device)
                done.record()
                done.synchronize()
            self.rounds += 1
