"""The exact peak of what a piece of code allocates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

import torch

from rkgb.devices.allocation_log import AllocationLog, there_is_a_profiler
from rkgb.devices.caching_allocator import AllocatorLevels
from rkgb.devices.registry import device_of, kinds_text


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What was allocated between two points in time, relative to what was allocated at the first."""

    peak_bytes: int
    net_bytes: int
    reserved_bytes: int
    timeline: tuple[tuple[float, int], ...]


class PeakMemory:
    """Measures how far the memory of tensors rises above what was allocated at entry.

        with PeakMemory(device) as memory:
            loss = criterion(model(batch), target)
            loss.backward()
        memory.peak_bytes

    On the CPU the numbers are the running sum of the allocations and frees that PyTorch's profiler reports,
    exact to the byte. The free of a block that was allocated *before* entry is left out, so clear old
    gradients and outputs first: where one is freed inside, the true level is lower from then on, and the
    reported peak an upper bound. Not seen are buffers that libraries allocate past PyTorch's allocator, and
    what other threads of the program allocate.

    On CUDA peak and net come from the caching allocator's own statistics, whose peak is reset at entry; it
    rounds each block up to 512 bytes. `timeline` comes from the profiler on both.

    Operators run slower inside, as under any profiler: do not take times there.

    Args:
        device: where the tensors are, "cpu" or a CUDA device.

    Raises:
        ValueError: for another kind of device.
        RuntimeError: on entry, inside another `PeakMemory` or while another profiler runs or is
            prepared, as in the warm-up of its schedule; on exit, when
            another profiler was started inside; when a result is read before exit.
    """

    # The statistics of a device and the profiler of a thread exist once per process, so this does too.
    is_measuring: ClassVar[bool] = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._at = device_of(self.device)
        if not self._at.is_supported:
            raise ValueError(f"PeakMemory measures {kinds_text()} devices, not {str(self.device)!r}")
        self._log: AllocationLog | None = None
        self._at_entry: AllocatorLevels | None = None
        self._entered_ns = 0
        self._use: MemoryUse | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest level above that at entry; 0 where it was never above."""
        return self._result().peak_bytes

    @property
    def net_bytes(self) -> int:
        """Level at exit above that at entry: what was allocated inside and not freed."""
        return self._result().net_bytes

    @property
    def reserved_bytes(self) -> int:
        """Highest total that CUDA's caching allocator held from the device, gaps included; 0 on the CPU."""
        return self._result().reserved_bytes

    @property
    def timeline(self) -> tuple[tuple[float, int], ...]:
        """(time_ms since entry, bytes above the level at entry) after each allocation and free, in order."""
        return self._result().timeline

    def __enter__(self) -> Self:
        if PeakMemory.is_measuring:
            raise RuntimeError("PeakMemory does not nest: leave the outer `with PeakMemory(...)` first")
        if there_is_a_profiler():
            raise RuntimeError("PeakMemory needs PyTorch's profiler, which is running: stop the other profile first")
        self._at.synchronize()
        self._at.restart_levels()
        self._at_entry = self._at.levels()
        self._use = None
        self._log = AllocationLog(self.device)
        self._log.__enter__()
        self._entered_ns = time.time_ns()
        PeakMemory.is_measuring = True
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._log is not None
        log, self._log = self._log, None
        PeakMemory.is_measuring = False
        log.__exit__(exception_type, exception, traceback)
        timeline = tuple(levels(log, self._entered_ns))
        before, now = self._at_entry, self._at.levels()
        if before is not None and now is not None:
            now = now if log.levels_before is None else now.or_higher(log.levels_before)
            self._use = MemoryUse(
                peak_bytes=now.most_allocated_bytes - before.allocated_bytes,
                net_bytes=now.allocated_bytes - before.allocated_bytes,
                reserved_bytes=now.most_reserved_bytes,
                timeline=timeline,
            )
        else:
            self._use = MemoryUse(log.peak_bytes, timeline[-1][1] if timeline else 0, 0, timeline)

    def _result(self) -> MemoryUse:
        if self._use is None:
            raise RuntimeError("PeakMemory has no result yet: read it after the end of its `with` block")
        return self._use


def levels(log: AllocationLog, entered_ns: int) -> Iterator[tuple[float, int]]:
    """Running sum of the log's events, as (time_ms since entry, bytes)."""
    level_bytes = 0
    for event in log.events:
        level_bytes += event.size_bytes
        yield max(0.0, (event.time_ns - entered_ns) / 1e6), level_bytes
