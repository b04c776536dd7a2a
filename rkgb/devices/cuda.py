"""CUDA, and ROCm by the same name: a caching allocator that keeps statistics and a history, and streams of work.

The history tells the sizes that were asked for. They are rounded up here as the allocator does by default. It may hand
out larger blocks all the same, where it does not split one or was told to round more; then its own statistics, which
are of blocks, are above the sum of the log. With expandable segments it always splits.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from rkgb.devices.accelerator import Accelerator, History, trace_of
from rkgb.devices.base import AllocationRecorder
from rkgb.devices.caching_allocator import AllocatorLevels, CachingAllocator, SegmentRules, held_segments
from rkgb.devices.flags import getters, precisions
from rkgb.torch_private import allocators

_MOST_EVENTS = 1 << 24  # the allocator keeps so many of each device; then new ones take the places of old ones
_EXPANDABLE = "expandable_segments:True"
_OTHER_RULES = ("max_split_size_mb", "roundup_power2_divisions", "large_segment_size_mb")  # which are not emulated
_NO_POOL = (0, 0)  # of segments that are for all, and of no graph of kernels
# What PyTorch reads, most important first, before it can be asked what is in force.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Cuda(Accelerator):
    """One GPU. Every stream of it counts."""

    kind = "cuda"
    title = '"cuda" (with ROCm, too)'
    may_capture_graphs = True
    attentions = ("flash", "memory-efficient", "cuDNN", "written out")
    said_out_of_memory = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    # It takes memory in pieces of these sizes, for small and for large blocks, whatever its settings.
    smallest_segments_bytes = (2 << 20) + (20 << 20)
    flags = (
        *getters(("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_sdp_enabled")),
        *getters(("cublas_allow_fp16_reduced_precision_reduction",)),
        *getters(("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation")),
        *precisions("cuda"),
    )

    @property
    def name(self) -> str:
        """With that of the product."""
        return f"cuda {torch.cuda.get_device_name(self.device)}"

    @property
    def processor(self) -> str:
        """What it can do, how much memory it has, and the libraries."""
        about = torch.cuda.get_device_properties(self.device)
        return (
            f"compute capability {about.major}.{about.minor}, {about.total_memory} bytes, CUDA {torch.version.cuda}, "
            f"cuDNN {torch.backends.cudnn.version()}"
        )

    def available_bytes(self) -> int:
        """What the device has free and what the caching allocator holds unused, within the share of the process."""
        free, _ = torch.cuda.mem_get_info(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        share_bytes = int(torch.cuda.get_per_process_memory_fraction(self.device) * total)
        held = torch.cuda.memory_reserved(self.device)  # by the allocator, in use or not
        return max(0, min(free + held, share_bytes) - torch.cuda.memory_allocated(self.device))

    def recorder(self) -> AllocationRecorder:
        """By the history of its allocator."""
        return _History(self)

    def restart_levels(self) -> None:
        """From what is in use now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def levels(self) -> AllocatorLevels:
        """Of blocks as large as they were handed out."""
        return AllocatorLevels(
            torch.cuda.memory_allocated(self.device),
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )

    def emulated(self) -> CachingAllocator | None:
        """By its default rules, with expandable segments where they are on."""
        settings = _allocator_settings()
        if torch.cuda.get_allocator_backend() != "native" or any(rule in settings for rule in _OTHER_RULES):
            return None
        held = [
            segment
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self.index and segment.get("segment_pool_id", _NO_POOL) == _NO_POOL
        ]
        return CachingAllocator(SegmentRules(is_expandable=segments_are_expandable()), held_segments(held))

    def empty_cache(self) -> None:
        """Of all devices at once."""
        torch.cuda.empty_cache()

    def gaps_advice(self) -> str:
        """Expandable segments, as early as they can be had."""
        if segments_are_expandable():
            return (
                "Its segments are expandable already, so the gaps are between tensors made before they were, or before "
                f"planning. Set PYTORCH_ALLOC_CONF={_EXPANDABLE} in the environment before Python starts, so "
                "that it holds from the first tensor on, or give a lower budget."
            )
        return (
            f"Set PYTORCH_ALLOC_CONF={_EXPANDABLE} in the environment before Python starts (PYTORCH_CUDA_ALLOC_CONF is "
            "its older name, and counts where both are set), or call rockmate.reduce_fragmentation() before the model "
            "is made."
        )

    @classmethod
    def reduce_gaps(cls) -> bool:
        """Make segments from now on expandable, and give back what is held unused. Raises what PyTorch raises."""
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

    @classmethod
    def seed(cls, seed: int) -> None:
        """Those of all GPUs, if there are any yet."""
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


def segments_are_expandable() -> bool:
    """Whether the allocator makes expandable segments now. PyTorch must have started CUDA."""
    return bool(allocators.snapshot(torch.cuda.memory)["allocator_settings"]["expandable_segments"])


def with_expandable_segments(settings: str) -> str:
    """The text of allocator settings, and that segments are to be expandable, whatever it said of that."""
    rest = [
        part for part in re.split(r",(?![^\[]*\])", settings) if part.split(":")[0].strip() != "expandable_segments"
    ]
    return ",".join([*(part for part in rest if part.strip()), _EXPANDABLE])


def _allocator_settings() -> str:
    """The settings in force. Those that are not given again fall back to PyTorch's own when others are set."""
    known = allocators.settings_in_force()
    if known is not None:
        return known
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), "")


def _set_allocator_settings(settings: str) -> None:
    allocators.set_settings(torch.cuda.memory, settings)


class _History(History):
    """What the caching allocator says that it did."""

    def check(self) -> None:
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise RuntimeError(
                f"memory cannot be measured on {self.device.device}: PyTorch runs with the allocator {backend!r} "
                "there, which keeps no history. Use the native one: leave `backend:` out of PYTORCH_ALLOC_CONF."
            )
        if allocators.cuda_history_is_recorded():
            raise RuntimeError(
                "memory cannot be measured while the history of CUDA's allocator is recorded for somebody else, or by "
                "another log: end that first, with torch.cuda.memory._record_memory_history(None)."
            )

    def switch(self, is_on: bool) -> None:
        if is_on:
            allocators.start_history(torch.cuda.memory, _MOST_EVENTS)
        else:
            allocators.stop_history(torch.cuda.memory)

    def trace(self) -> list[dict[str, Any]]:
        return trace_of(allocators.snapshot(torch.cuda.memory, self.device.index), self.device, _MOST_EVENTS)
