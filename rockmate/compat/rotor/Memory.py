"""How much memory a process, or a device, has given to tensors, in one number."""

from __future__ import annotations

import sys
from types import ModuleType

import psutil
import torch

from rkgb.devices.registry import device_of, kinds_text

resource: ModuleType | None
try:
    import resource
except ImportError:  # there is none on Windows
    resource = None


class MeasureMemory:
    """Memory in use on a device, now and at most.

    On CUDA: bytes of tensors by the allocator's own count. On the CPU: bytes of the whole process as the system counts
    them, so that small steps do not show and freed memory may still be counted; `rockmate.PeakMemory` counts tensors to
    the byte, within a ``with`` block.

    Args:
        device: "cpu" or a CUDA device.

    Raises:
        ValueError: for another kind of device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._seen_bytes = 0
        self._at = device_of(self.device)
        if not self._at.is_supported:
            raise ValueError(f"MeasureMemory measures {kinds_text()} devices, not {str(self.device)!r}")

    def currentValue(self) -> int:  # noqa: N802  rotor's name
        """Bytes in use now."""
        if (levels := self._at.levels()) is not None:
            return levels.allocated_bytes
        current_bytes = int(psutil.Process().memory_info().rss)
        self._seen_bytes = max(self._seen_bytes, current_bytes)
        return current_bytes

    def maximumValue(self) -> int:  # noqa: N802  rotor's name
        """Most bytes in use at once, on CUDA since its statistics were reset, else since the start."""
        if (levels := self._at.levels()) is not None:
            return levels.most_allocated_bytes
        if resource is None:
            return int(psutil.Process().memory_info().peak_wset)
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
        self.currentValue()
        return max(most_bytes, self._seen_bytes)  # the system takes note of the maximum now and then
