"""What the user's loss takes in a real step, seen by the allocator's own statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rkgb.devices.base import Device
from rkgb.devices.registry import device_of


class LossWindow:
    """The stretch between a forward and its backward: the highest level in it, above that at the end of the forward.

    Autograd runs what was recorded last first: when it comes to the operation that made an output, it has done with
    what was computed of the outputs. Nothing of the user's is run again, and no profiler watches.
    """

    def __init__(self, device: Device, start_bytes: int) -> None:
        self.peak_bytes: int | None = None  # None until the backward begins
        self._device = device
        self._start_bytes = start_bytes
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @staticmethod
    def after(outputs: Sequence[torch.Tensor], device: torch.device) -> LossWindow | None:
        """The window that begins now; None where the device keeps no statistics, or the user waits for theirs.

        Their highest levels start anew.
        """
        at = device_of(device)
        levels = None if at.is_watched else at.levels()
        nodes = {id(tensor.grad_fn): tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        if levels is None or not nodes:
            return None
        window = LossWindow(at, levels.allocated_bytes)
        at.restart_levels()
        window._hooks = [node.register_prehook(window._ends) for node in nodes.values()]
        return window

    def close(self) -> None:
        """Look no further."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _ends(self, *_: object) -> None:
        if self.peak_bytes is None and (levels := self._device.levels()) is not None:
            self.peak_bytes = max(0, levels.most_allocated_bytes - self._start_bytes)
        self.close()
