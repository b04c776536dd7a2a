"""What allocators hold beyond what tensors take, and the settings that keep it small."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rockmate.units import format_bytes

# Part of the budget that CUDA's allocator may reserve beyond it, in gaps, before a warning says so.
ALLOWED_GAPS = 0.1
# CUDA's allocator takes memory from the device in pieces of these sizes, for small and for large blocks, whatever its
# settings: reserved bytes beyond the budget that are no more than one of each tell nothing.
SMALLEST_SEGMENTS_BYTES = (2 << 20) + (20 << 20)

_EXPANDABLE = "expandable_segments:True"
# What PyTorch reads, most important first, before it can be asked what is in force.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt
_RETURNING = {_M_MMAP_THRESHOLD: 1 << 16, _M_TRIM_THRESHOLD: 1 << 17, _M_MMAP_MAX: 1 << 16}  # the last is glibc's own
_KEEPING = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}  # no block has pages of its own, and no end of the heap is cut off


# ---- bytes of a step ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPeak:
    """What a step held at most, in bytes above what was allocated before it.

    `reserved_bytes` is what CUDA's allocator held from the device, gaps included: those between blocks that were there
    before, too. None on the CPU.
    """

    allocated_bytes: int
    reserved_bytes: int | None = None

    def above(self, resident_bytes: int) -> StepPeak:
        """The same step, where so many of its bytes count as having been there before."""
        reserved = self.reserved_bytes
        return StepPeak(
            self.allocated_bytes - resident_bytes, None if reserved is None else max(0, reserved - resident_bytes)
        )

    def or_higher(self, other: StepPeak) -> StepPeak:
        """The most of each of two steps."""
        reserved = [peak.reserved_bytes for peak in (self, other) if peak.reserved_bytes is not None]
        return StepPeak(max(self.allocated_bytes, other.allocated_bytes), max(reserved, default=None))


def start_peak(device: torch.device) -> int:
    """Bytes allocated on `device` now, above which `end_peak` tells a step's; 0 on the CPU, where nothing is done.

    What CUDA's allocator holds unused goes back to the device, so that it counts for no step, and the allocator's own
    peaks start anew.
    """
    if device.type != "cuda":
        return 0
    gc.collect()  # what is garbage now would be freed within the step, and hide as much of its peak
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def end_peak(device: torch.device, before_bytes: int, logged_bytes: int) -> StepPeak:
    """The peak since `start_peak`, which told `before_bytes`. `logged_bytes` is that of an `AllocationLog`.

    On CUDA the higher counts of the log's, which is the same in every step, and the allocator's own, in which blocks
    are as large as they were handed out.
    """
    if device.type != "cuda":
        return StepPeak(logged_bytes)
    torch.cuda.synchronize(device)
    allocated_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    reserved_bytes = torch.cuda.max_memory_reserved(device) - before_bytes
    return StepPeak(max(logged_bytes, allocated_bytes), max(0, reserved_bytes))


def give_cache_back(device: torch.device) -> None:
    """Return to the device what CUDA's allocator holds unused. Nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- fragmentation -----------------------------------------------------------------------------------------


def allowed_reserved_bytes(budget_bytes: int) -> int:
    """What CUDA's allocator may reserve for a step under a budget before that is worth a warning."""
    return budget_bytes + max(int(ALLOWED_GAPS * budget_bytes), SMALLEST_SEGMENTS_BYTES)


def fragmentation_text(peak: StepPeak, budget_bytes: int, expandable: bool) -> str | None:
    """What to tell of a step that reserves more than is allowed under its budget; None where it does not.

    `expandable` tells whether the allocator makes expandable segments already.
    """
    reserved_bytes = peak.reserved_bytes
    if reserved_bytes is None or reserved_bytes <= allowed_reserved_bytes(budget_bytes):
        return None
    found = (
        f"a step of this plan allocates {format_bytes(peak.allocated_bytes)} of its budget of "
        f"{format_bytes(budget_bytes)}, but CUDA's allocator reserves {format_bytes(reserved_bytes)} for it, "
        f"{reserved_bytes / budget_bytes - 1:+.0%}: the rest are gaps, which no other tensor fits. "
    )
    if expandable:
        return found + (
            "Its segments are expandable already, so the gaps are between tensors made before they were, or before "
            "planning. Set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment before Python starts, so "
            "that it holds from the first tensor on, or give a lower budget."
        )
    return found + (
        f"Set PYTORCH_ALLOC_CONF={_EXPANDABLE} in the environment before Python starts (PYTORCH_CUDA_ALLOC_CONF is its "
        "older name, and counts where both are set), or call rockmate.reduce_fragmentation() before the model is made."
    )


def segments_are_expandable() -> bool:
    """Whether CUDA's allocator makes expandable segments now. PyTorch must have started CUDA."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


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
    return AllocatorSettings(_expand_segments(), _set_malloc(_RETURNING))


def keep_freed_memory() -> bool:
    """On the CPU, with glibc: have the process keep the memory of freed tensors, for those that come after them.

    glibc gives large blocks back to the system when they are freed, and the same bytes come anew in the next step, page
    by page: that is time, in eager's steps, in those of a plan and in planning, and it differs from run to run. With
    this setting the process stays as large as it once was. It is for machines with memory to spare, and the opposite
    of what `reduce_fragmentation` sets on the CPU: of the two, the later call counts. CUDA's allocator always does so.

    Call it before the model is made; blocks that are there stay as they are. Returns whether it could be set.
    """
    return _set_malloc(_KEEPING)


def _expand_segments() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        return False
    try:
        _set_allocator_settings(with_expandable_segments(_allocator_settings()))
    except (RuntimeError, ValueError) as error:
        error.add_note(
            f"PyTorch refused {_EXPANDABLE} in a running process: set PYTORCH_ALLOC_CONF={_EXPANDABLE} in the "
            "environment before Python starts."
        )
        raise
    if not torch.cuda.is_initialized():
        return True  # to be seen when there is a segment
    torch.cuda.empty_cache()  # or the blocks of old segments would be used again, and split as they were
    return segments_are_expandable()


def with_expandable_segments(settings: str) -> str:
    """The text of allocator settings, and that segments are to be expandable, whatever it said of that."""
    rest = [
        part for part in re.split(r",(?![^\[]*\])", settings) if part.split(":")[0].strip() != "expandable_segments"
    ]
    return ",".join([*(part for part in rest if part.strip()), _EXPANDABLE])


def _allocator_settings() -> str:
    """The settings in force. Those that are not given again fall back to PyTorch's own when others are set."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return str(ask())
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), "")


def _set_allocator_settings(settings: str) -> None:
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:  # of PyTorch before it had one function for all kinds of devices
        setter = torch.cuda.memory._set_allocator_settings
    setter(settings)


def _set_malloc(settings: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # no glibc
        return False
    taken = [mallopt(parameter, value) for parameter, value in settings.items()]
    return all(taken)
