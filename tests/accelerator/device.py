"""The test accelerator as a kind of device that plans may be for."""

from __future__ import annotations

from typing import Any

import torch

from rkgb.devices import registry
from rkgb.devices.accelerator import Accelerator, History
from rkgb.devices.base import AllocationRecorder
from rkgb.devices.caching_allocator import CachingAllocator, SegmentRules, held_segments
from tests.accelerator.build import NAME, accelerator


class TestAccelerator(Accelerator):
    """Computes as the CPU does, and allocates as a GPU."""

    __test__ = False
    kind = NAME
    fails_for_good = False
    is_orderly = True
    said_out_of_memory = ("Test accelerator out of memory",)
    smallest_segments_bytes = (2 << 20) + (20 << 20)
    attentions = ("flash of the CPU", "written out")
    processor = "as the CPU"  # plans of files are believed where it is the same

    def recorder(self) -> AllocationRecorder:
        """By the history of its allocator."""
        return _History(self)

    def emulated(self) -> CachingAllocator:
        """It takes segments as CUDA's does."""
        return CachingAllocator(SegmentRules(), held_segments(self.module.extension.segments(self.index)))

    @classmethod
    def seed(cls, seed: int) -> None:
        """Those of all devices."""
        torch.get_device_module(NAME).manual_seed_all(seed)


class _History(History):
    def __init__(self, device: Accelerator) -> None:
        super().__init__(device)
        self._index = device.index
        self._extension = device.module.extension

    def check(self) -> None:
        if self._extension.records_history(self._index):
            raise RuntimeError("memory cannot be measured while the history is recorded for somebody else")

    def switch(self, is_on: bool) -> None:
        self._extension.record_history(self._index, is_on)

    def trace(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._extension.history(self._index)
        return found


def device() -> torch.device:
    """The device, known to planning. Raises `NoCompiler`."""
    found = accelerator()
    registry.KINDS.setdefault(NAME, TestAccelerator)
    return found
