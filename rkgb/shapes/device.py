"""The device without data as one to be planned for: what it allocates is noted, and times are those of a roofline."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from rkgb.devices.base import AllocationRecorder, Device
from rkgb.devices.caching_allocator import AllocationEvent, CachingAllocator, SegmentRules
from rkgb.devices.registry import host, standing_in
from rkgb.shapes.machine import Machine
from rkgb.shapes.values import KnownValues
from rkgb.shapes.watch import Clock, StorageWatch
from rkgb.torch_private.operations import whole_without_data

_RULES = SegmentRules()


class Shapes(Device):
    """Stands for a machine of which no more is known than its `Machine`."""

    kind = "meta"
    is_orderly = True
    has_data: ClassVar[bool] = False

    def __init__(self, device: torch.device, machine: Machine, clock: Clock, values: KnownValues) -> None:
        super().__init__(device)
        self.machine = machine
        self.clock = clock
        self._values = values
        self.packs = not machine.is_accelerator  # as the CPU does, and CUDA does not

    @property
    def name(self) -> str:
        """That of the machine."""
        return self.machine.name

    def around_planning(self) -> contextlib.AbstractContextManager[Any]:
        """What is known of values goes on being known."""
        return self._values.on()

    def stamp(self) -> Any:
        """In ms: what was noted until now."""
        return self.clock.now_ms

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Time between two stamps."""
        return float(end - start)

    def time_ms(self, run: Callable[[], object]) -> float:
        """By the roofline."""
        started = self.clock.now_ms
        with StorageWatch(self.machine, self.clock):
            run()
        return self.clock.now_ms - started

    def copy_ms(self, size_bytes: int) -> float:
        """Read and written once."""
        return self.machine.start_ms + self.machine.move_ms(2 * size_bytes)

    def allocated_bytes(self, size_bytes: int) -> int:
        """Whole blocks, where the machine has a caching allocator."""
        return _RULES.rounded(size_bytes) if self.machine.is_accelerator and size_bytes else size_bytes

    def available_bytes(self) -> int:
        """Nothing is allocated."""
        return sys.maxsize

    def recorder(self) -> AllocationRecorder:
        """By the storages of tensors."""
        return _Noted(self)

    def emulated(self) -> CachingAllocator | None:
        """An empty one."""
        return CachingAllocator(_RULES) if self.machine.is_accelerator else None

    @property
    def generator(self) -> torch.Generator:
        """The host's: nothing is drawn."""
        return torch.default_generator

    @property
    def random_state_bytes(self) -> int:
        """That of the host's, where the machine is one."""
        return 0 if self.machine.is_accelerator else host().random_state_bytes


class _Noted(AllocationRecorder):
    def __init__(self, device: Shapes) -> None:
        self._watch = StorageWatch(device.machine, device.clock)

    def address_of(self, tensor: torch.Tensor) -> int:
        return self._watch.number_of(tensor) or 0  # which is that of none

    def note(self, size_bytes: int, device: torch.device) -> None:
        self._watch.note_scratch(size_bytes)  # nothing is made for it: there are thousands

    def start(self) -> None:
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, error: BaseException | None) -> list[AllocationEvent]:
        self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self._watch.stop()


@contextlib.contextmanager
def standing_for(machine: Machine, values: KnownValues) -> Iterator[Shapes]:
    """Within this context and thread, the device "meta" stands for `machine`, and can be planned for."""
    clock = Clock()
    with whole_without_data(), standing_in("meta", lambda device: Shapes(device, machine, clock, values)):
        yield Shapes(torch.device("meta"), machine, clock, values)
