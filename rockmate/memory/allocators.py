"""What allocators hold beyond what tensors take, and the settings that keep it small."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from rkgb.devices.caching_allocator import AllocationEvent, CachingAllocator
from rkgb.devices.cpu import Cpu
from rkgb.devices.registry import KINDS, device_of
from rockmate.errors import BudgetError
from rockmate.units import format_bytes

# Part of the budget that an allocator may reserve beyond it, in gaps, before a warning says so.
ALLOWED_GAPS = 0.1


# ---- bytes of a step ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPeak:
    """What a step held at most, in bytes above what was allocated before it.

    `reserved_bytes` is what CUDA's allocator held from the device, gaps included: those between blocks that were there
    before, too. None on the CPU. `predicted_reserved_bytes` is the same by an emulation of the allocator; None where
    there is none.
    """

    allocated_bytes: int
    reserved_bytes: int | None = None
    before_bytes: int = 0  # allocated before it, where the allocator tells
    predicted_reserved_bytes: int | None = None

    def above(self, resident_bytes: int) -> StepPeak:
        """The same step, where so many of its bytes count as having been there before."""
        return replace(self._reserving(-resident_bytes), allocated_bytes=self.allocated_bytes - resident_bytes)

    def of_training(self, before_bytes: int) -> StepPeak:
        """The same step, before which so many bytes were allocated, and the rest was planning's own, such as a sample.

        All of what the allocator held counts, also where it was planning that needed it.
        """
        return self._reserving(max(0, self.before_bytes - before_bytes))

    def or_higher(self, other: StepPeak) -> StepPeak:
        """The most of each of two steps."""
        return StepPeak(
            max(self.allocated_bytes, other.allocated_bytes),
            _most(self.reserved_bytes, other.reserved_bytes),
            min(self.before_bytes, other.before_bytes),
            _most(self.predicted_reserved_bytes, other.predicted_reserved_bytes),
        )

    def _reserving(self, more_bytes: int) -> StepPeak:
        reserved = (self.reserved_bytes, self.predicted_reserved_bytes)
        measured, predicted = (None if held is None else max(0, held + more_bytes) for held in reserved)
        return replace(self, reserved_bytes=measured, predicted_reserved_bytes=predicted)


def _most(*sizes: int | None) -> int | None:
    return max((size_bytes for size_bytes in sizes if size_bytes is not None), default=None)


def start_peak(device: torch.device) -> int:
    """Bytes allocated on `device` now, above which `end_peak` tells a step's; 0 where the allocator keeps no count.

    What it holds unused goes back to the device, so that it counts for no step, and its own peaks start anew.
    """
    at = device_of(device)
    if at.levels() is None:
        return 0
    allocated_bytes = allocated_now_bytes(device)
    at.synchronize()
    at.empty_cache()
    at.restart_levels()
    return allocated_bytes


def allocated_now_bytes(device: torch.device) -> int:
    """As the allocator tells, which waits for no work; 0 where it keeps no count. Garbage is none of it.

    What is garbage now, or is still held of a backward that failed, would be freed within a step, and hide as much of
    its peak.
    """
    at = device_of(device)
    if at.levels() is None:
        return 0
    at.await_backwards()
    gc.collect()
    levels = at.levels()
    return 0 if levels is None else levels.allocated_bytes


def end_peak(device: torch.device, before_bytes: int, logged_bytes: int) -> StepPeak:
    """The peak since `start_peak`, which told `before_bytes`. `logged_bytes` is that of an `AllocationLog`.

    The higher counts of the log's, which is the same in every step, and the allocator's own, in which blocks are as
    large as they were handed out.
    """
    at = device_of(device)
    at.synchronize()
    levels = at.levels()
    if levels is None:
        return StepPeak(logged_bytes)
    allocated_bytes = levels.most_allocated_bytes - before_bytes
    reserved_bytes = max(0, levels.most_reserved_bytes - before_bytes)
    return StepPeak(max(logged_bytes, allocated_bytes), reserved_bytes, before_bytes)


def predicted_reserved_bytes(allocator: CachingAllocator | None, events: Iterable[AllocationEvent]) -> int | None:
    """What the emulated `allocator` holds for `events`, above what is allocated in it; None without one."""
    if allocator is None:
        return None
    before_bytes = allocator.allocated_bytes
    return allocator.run(events).most_reserved_bytes - before_bytes


def refuse_uncounted(device: torch.device) -> None:
    """Raise `BudgetError` where nothing tells what the allocator of `device` reserves."""
    if device_of(device).levels() is None:
        raise BudgetError(
            f'scope="reserved" is for devices whose allocator holds more than it hands out, and says how much: that of '
            f'{device} does not. Give scope="step", for what tensors take there.'
        )


# ---- fragmentation -----------------------------------------------------------------------------------------


def allowed_reserved_bytes(budget_bytes: int, device: torch.device) -> int:
    """What the allocator of `device` may reserve for a step under a budget before that is worth a warning."""
    return budget_bytes + max(int(ALLOWED_GAPS * budget_bytes), device_of(device).smallest_segments_bytes)


def fragmentation_text(peak: StepPeak, budget_bytes: int, device: torch.device) -> str | None:
    """What to tell of a step that reserves more than is allowed under its budget; None where it does not."""
    reserved_bytes = peak.reserved_bytes
    if reserved_bytes is None or reserved_bytes <= allowed_reserved_bytes(budget_bytes, device):
        return None
    return (
        f"a step of this plan allocates {format_bytes(peak.allocated_bytes)} of its budget of "
        f"{format_bytes(budget_bytes)}, but the allocator of {device} reserves {format_bytes(reserved_bytes)} for it, "
        f"{reserved_bytes / budget_bytes - 1:+.0%}: the rest are gaps, which no other tensor fits. "
        f'{device_of(device).gaps_advice()} With scope="reserved" a budget bounds what is reserved.'
    )


# ---- settings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What `reduce_fragmentation` has set. False where there is no such allocator, or it refused."""

    expandable_segments: bool  # of PyTorch's allocator for CUDA
    freed_memory_returned: bool  # by the C library's allocator, which PyTorch uses on the CPU


def reduce_fragmentation() -> AllocatorSettings:
    """Set what keeps the gaps between tensors small, as far as it can be set in a running process.

    On CUDA: segments that PyTorch's allocator makes from now on are expandable, and what it holds unused goes back to
    the device. Other settings of it stay as they are. Call this before the model is made: tensors that are there stay
    in the segments in which they are. Tensors in expandable segments can be shared with other processes on some
    systems only.

    On the CPU, with glibc: blocks of 64 KiB or more get pages of their own, and freed memory goes back to the system.
    Allocating large tensors takes a little longer.

    Call it once or often, it comes to the same. Returns what could be set. Raises what PyTorch raises where it refuses
    the setting.
    """
    done = {kind: kind.reduce_gaps() for kind in KINDS.values()}
    return AllocatorSettings(
        expandable_segments=any(is_set for kind, is_set in done.items() if not kind.is_host),
        freed_memory_returned=any(is_set for kind, is_set in done.items() if kind.is_host),
    )


def keep_freed_memory() -> bool:
    """On the CPU, with glibc: have the process keep the memory of freed tensors, for those that come after them.

    glibc gives large blocks back to the system when they are freed, and the same bytes come anew in the next step, page
    by page: that is time, in eager's steps, in those of a plan and in planning, and it differs from run to run. With
    this setting the process stays as large as it once was. It is for machines with memory to spare, and the opposite
    of what `reduce_fragmentation` sets on the CPU: of the two, the later call counts. CUDA's allocator always does so.

    Call it before the model is made; blocks that are there stay as they are. Returns whether it could be set.
    """
    return Cpu.keep_freed_memory()
