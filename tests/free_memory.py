"""A CPU that says how much of its memory is free: stands for `device_of` in the one module that is to believe it."""

from collections.abc import Callable

import torch

from rkgb.devices.cpu import Cpu


class CpuWith(Cpu):
    """A CPU with `free_bytes` to give."""

    free_bytes = 0

    def available_bytes(self) -> int:
        return self.free_bytes


def free_is(free_bytes: int | Callable[[], int]) -> Callable[[torch.device], CpuWith]:
    """What finds such a CPU for every device."""

    def device_of(device: torch.device) -> CpuWith:
        found = CpuWith(device)
        found.free_bytes = free_bytes() if callable(free_bytes) else free_bytes
        return found

    return device_of
