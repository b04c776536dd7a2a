"""Every allocation and release of a stretch of code, in order, to the byte.

Recorders of the devices tell them: the CPU's profiler, the history of CUDA's allocator. Both are exact; process-level
figures such as the resident set size are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import torch

from rkgb.devices.base import AllocationRecorder
from rkgb.devices.caching_allocator import AllocationEvent, AllocatorLevels
from rkgb.devices.registry import device_of
from rkgb.process.surroundings import profiler_is_prepared, profiler_is_taken
from rkgb.process.turns import ALLOCATIONS

# Marks are allocations of a size that no model uses, made and released at once: the allocator's own
# order then places them exactly, which time stamps would not.
_MARK_BYTES = (1 << 20) + 4 * 4093


class AllocationLog:
    """Context manager that records what is allocated on `device` inside it.

    After the block, `events` holds the allocations and releases in order, and ``marks[k]`` the
    number of events before the k-th call of `mark`. Releases of what was allocated before the
    block are left out. Logs cannot be nested, nor run under another profiler, in whichever thread that was started; a
    log waits for that of another thread to end.

    While planning has a log of its own on an accelerator, the user's is paused.

    Where a profiler of the user's is on elsewhere, the CPU's log is that of the profiler for one thread, which tells no
    addresses (`has_addresses`): a release is then taken for that of the latest block of its size. Within the user's
    own profiler, `Device.unwatched` is a place for it.

    On an accelerator, every stream of `device` counts, and no other device. Raises `RuntimeError` where the allocator
    keeps no history, where somebody else has it record one, and at the end of the block where events were lost.
    """

    def __init__(self, device: torch.device, foreign: bool = False) -> None:
        """With `foreign`, releases of what was allocated before the block are not left out."""
        self.device = device
        self._foreign = foreign
        self.events: list[AllocationEvent] = []
        self.marks: list[int] = []
        self.has_addresses = True
        self._recorder: AllocationRecorder | None = None
        # The allocator's own, up to where the log was last paused; None where it was not. After the block.
        self.levels_before: AllocatorLevels | None = None

    def mark(self) -> None:
        """Note this point in the order of events."""
        assert self._recorder is not None
        self._recorder.note(_MARK_BYTES, self.device)

    def address_of(self, tensor: torch.Tensor) -> int:
        """The address by which events tell of a tensor's storage, while that is there. Within the block."""
        assert self._recorder is not None
        return self._recorder.address_of(tensor)

    def __enter__(self) -> AllocationLog:
        ALLOCATIONS.acquire()
        try:
            recorder = device_of(self.device).recorder()
            recorder.start()
        except BaseException:
            ALLOCATIONS.release()
            raise
        self._recorder, self.has_addresses = recorder, recorder.has_addresses
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._recorder is not None
        try:
            self._split(self._recorder.stop(error))
            self.levels_before = self._recorder.levels_before
        finally:
            ALLOCATIONS.release()

    def _split(self, events: list[AllocationEvent]) -> None:
        rounded = device_of(self.device).allocated_bytes
        alive: dict[int, int] = {}
        for event in events:
            if event.size_bytes == _MARK_BYTES:
                self.marks.append(len(self.events))
                continue
            size_bytes = rounded(abs(event.size_bytes))
            if event.size_bytes > 0:
                alive[event.address] = size_bytes
            elif alive.get(event.address) == size_bytes:
                # Other releases are of what was there before, which some logs see and some do not.
                del alive[event.address]
                size_bytes = -size_bytes
            elif self._foreign:
                size_bytes = -size_bytes
            else:
                continue
            self.events.append(event if size_bytes == event.size_bytes else replace(event, size_bytes=size_bytes))

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, of those allocated inside the block."""
        return highest_level(self.events)


def there_is_a_profiler() -> bool:
    """Whether somebody's profiler runs, in whichever thread, or is prepared to: two at once end the process."""
    return profiler_is_taken() or profiler_is_prepared()


def highest_level(events: Sequence[AllocationEvent]) -> int:
    """Highest running sum of a stretch of events, from 0 at its start."""
    return highest_moment(events)[0]


def highest_moment(events: Sequence[AllocationEvent]) -> tuple[int, int]:
    """The highest running sum, from 0, and after how many events it was first reached."""
    alive = highest = moment = 0
    for number, event in enumerate(events, 1):
        alive += event.size_bytes
        if alive > highest:
            highest, moment = alive, number
    return highest, moment
