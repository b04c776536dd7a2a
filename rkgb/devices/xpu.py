"""XPU, the GPUs of Intel: PyTorch's caching allocator keeps a history there as it does for CUDA.

Nobody has run this yet. It is refused by name unless ROCKMATE_UNPROVEN names it.
"""

from __future__ import annotations

from typing import Any

import torch

from rkgb.devices.accelerator import Accelerator, History, trace_of
from rkgb.devices.base import AllocationRecorder
from rkgb.torch_private import allocators

_MOST_EVENTS = 1 << 24  # the allocator keeps so many of each device; then new ones take the places of old ones


class Xpu(Accelerator):
    """One GPU. Every stream of it counts."""

    kind = "xpu"
    said_out_of_memory = ("XPU out of memory",)
    smallest_segments_bytes = (2 << 20) + (20 << 20)

    @property
    def name(self) -> str:
        """With that of the product."""
        return f"xpu {self.module.get_device_name(self.device)}"

    def recorder(self) -> AllocationRecorder:
        """By the history of its allocator."""
        return _History(self)

    @classmethod
    def seed(cls, seed: int) -> None:
        """Those of all GPUs, if there are any yet."""
        if torch.xpu.is_initialized():
            torch.xpu.manual_seed_all(seed)


class _History(History):
    def check(self) -> None:
        if not allocators.keeps_history(torch.xpu.memory):
            raise RuntimeError(
                f"memory cannot be measured on {self.device.device}: XPU's allocator keeps no history in PyTorch "
                f"{torch.__version__}. Use a later version."
            )

    def switch(self, is_on: bool) -> None:
        if is_on:
            allocators.start_history(torch.xpu.memory, _MOST_EVENTS)
        else:
            allocators.stop_history(torch.xpu.memory)

    def trace(self) -> list[dict[str, Any]]:
        return trace_of(allocators.snapshot(torch.xpu.memory, self.device.index), self.device, _MOST_EVENTS)
