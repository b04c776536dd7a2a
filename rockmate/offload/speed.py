"""How fast the links to a second memory are, measured when it is first needed."""

from __future__ import annotations

import time

import torch

from rk_solvers.links import Link, SecondMemory
from rkgb.devices.registry import device_of
from rockmate.offload.tier import Tier

_LARGE_BYTES = 32 << 20
_SMALL_BYTES = 4 << 10
_AT_ONCE = 4  # as in a step: the next one waits for the link, and nobody for the one before
_ROUNDS = 3  # what else the machine does adds to times: the least of each counts


def measured_links(tier: Tier, device: torch.device) -> SecondMemory:
    """Both links of `tier` for storages on `device`, as they are now, with nothing computed beside.

    It takes a fraction of a second where a link moves 1 GB/s. Raises `OffloadError` where nothing can be moved.
    """
    for size_bytes in (_LARGE_BYTES, _SMALL_BYTES):  # a file grows, threads start, memory is pinned
        _moved_ms(tier, device, size_bytes)
    small = [_moved_ms(tier, device, _SMALL_BYTES) for _ in range(_ROUNDS)]
    large = [_moved_ms(tier, device, _LARGE_BYTES) for _ in range(_ROUNDS)]
    out, back = (_link(min(times[way] for times in small), min(times[way] for times in large)) for way in (0, 1))
    return SecondMemory(out, back, tier.limit_bytes, tier.staging_bytes)


def _link(small_ms: float, large_ms: float) -> Link:
    """A line through two sizes."""
    more_ms = max(large_ms - small_ms, 0.01 * large_ms)  # where the small one was held up
    bytes_per_ms = (_LARGE_BYTES - _SMALL_BYTES) / more_ms
    return Link(bytes_per_ms, max(0.0, small_ms - _SMALL_BYTES / bytes_per_ms))


def _moved_ms(tier: Tier, device: torch.device, size_bytes: int) -> tuple[float, float]:
    """One storage's time out and its time back, of some that are moved at once."""
    at = device_of(device)
    storages = [torch.ones(size_bytes, dtype=torch.uint8, device=device).untyped_storage() for _ in range(_AT_ONCE)]
    at.synchronize()
    started = time.perf_counter()
    parcels = [tier.send(storage) for storage in storages]
    for parcel in parcels:
        parcel.wait_sent()
    at.synchronize()
    there = time.perf_counter()
    storages.clear()
    for parcel in parcels:
        parcel.recall()
    for parcel in parcels:
        parcel.take()
    at.synchronize()
    back = time.perf_counter()
    for parcel in parcels:
        parcel.drop()
    return (there - started) * 1e3 / _AT_ONCE, (back - there) * 1e3 / _AT_ONCE
