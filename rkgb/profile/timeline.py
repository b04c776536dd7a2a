"""From an allocation log to bytes per operation and per backward stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rkgb.devices.allocation_log import AllocationLog, highest_level


@dataclass(slots=True)
class StageWindow:
    """A stretch of the backward, from mark `mark` to the next window's."""

    op: str
    mark: int
    needs: dict[str, None] = field(default_factory=dict)  # ordered set of saved storages read
    resident_bytes: int = 0
    peak_bytes: int = 0
    saved_bytes: int = 0  # of what the forward made and is alive at its start: where the log tells no addresses
    nodes: list[str] = field(default_factory=list)  # the operation of each autograd node in it


def forward_peaks(log: AllocationLog, op_marks: list[int]) -> list[int]:
    """For each operation, the most bytes above those alive when it started."""
    peaks = []
    for mark in op_marks:
        end = log.marks[mark + 1] if mark + 1 < len(log.marks) else len(log.events)
        peaks.append(highest_level(log.events[log.marks[mark] : end]))
    return peaks


def measure_windows(log: AllocationLog, windows: list[StageWindow], known: Sequence[tuple[int, int]]) -> None:
    """Fill in the windows' bytes.

    `known` lists the storages that the forward made and that may live on, each by its address and
    by a mark that follows its allocation. They are no gradients: their bytes are counted by
    whoever decides how long they live. Everything else that is alive during the backward is
    gradient or workspace.
    """
    if not windows:
        return
    if not log.has_addresses:
        _measure_by_sizes(log, windows)
        return
    saved = _allocations(log, known)
    starts = [log.marks[window.mark] for window in windows]
    alive = _alive_before(log, starts[0])
    # An address is used again once it is free: allocations are told apart by their place in the log.
    alive_saved = {address: size for address, (place, size) in alive.items() if place in saved}
    other = sum(size for _, size in alive.values()) - sum(alive_saved.values())
    for window, start, end in zip(windows, starts, [*starts[1:], len(log.events)], strict=True):
        window.resident_bytes = other
        # Saved storages released inside the window make room in it, under any schedule.
        window.peak_bytes = other + highest_level(log.events[start:end])
        for event in log.events[start:end]:
            if event.size_bytes < 0 and event.address in alive_saved:
                del alive_saved[event.address]
            else:
                other += event.size_bytes


def _measure_by_sizes(log: AllocationLog, windows: list[StageWindow]) -> None:
    """The same where those who ran the windows have seen which of the known storages were alive."""
    starts = [log.marks[window.mark] for window in windows]
    for window, start, end in zip(windows, starts, [*starts[1:], len(log.events)], strict=True):
        window.resident_bytes = sum(event.size_bytes for event in log.events[:start]) - window.saved_bytes
        window.peak_bytes = window.resident_bytes + highest_level(log.events[start:end])


def _allocations(log: AllocationLog, known: Sequence[tuple[int, int]]) -> set[int]:
    """Places in the log of the allocations that made the `known` storages."""
    latest: dict[int, int] = {}  # by address
    by_mark: dict[int, list[int]] = {}
    for address, mark in known:
        by_mark.setdefault(log.marks[mark], []).append(address)
    found: set[int] = set()
    for place in range(len(log.events) + 1):
        found.update(latest[address] for address in by_mark.get(place, ()) if address in latest)
        if place < len(log.events) and log.events[place].size_bytes > 0:
            latest[log.events[place].address] = place
    return found


def _alive_before(log: AllocationLog, end: int) -> dict[int, tuple[int, int]]:
    """What is alive before event `end`: by address, its allocation's place in the log and its size."""
    alive: dict[int, tuple[int, int]] = {}
    for place, event in enumerate(log.events[:end]):
        if event.size_bytes > 0:
            alive[event.address] = (place, event.size_bytes)
        else:
            alive.pop(event.address, None)
    return alive


def join_windows(windows: Sequence[StageWindow]) -> list[StageWindow]:
    """Join the windows that need not be told apart.

    A window joins the one before it when both belong to one operation, or when it reads no saved tensor and does
    not raise the other's peak.
    """
    joined: list[StageWindow] = []
    for window in windows:
        last = joined[-1] if joined else None
        same_op = last is not None and last.op == window.op
        if last is not None and (same_op or (not window.needs and window.peak_bytes <= last.peak_bytes)):
            joined[-1] = joined_windows([last, window])
        else:
            joined.append(window)
    return joined


def joined_windows(windows: Sequence[StageWindow]) -> StageWindow:
    """Consecutive windows as one.

    What is recomputed for one of them is so where it is first read: above the gradients that are there when the
    window that reads it starts.
    """
    reading = [window for window in windows if window.needs] or windows[:1]
    return replace(
        windows[0],
        nodes=[node for window in windows for node in window.nodes],
        needs={need: None for window in windows for need in window.needs},
        resident_bytes=max(window.resident_bytes for window in reading),
        peak_bytes=max(window.peak_bytes for window in windows),
    )
