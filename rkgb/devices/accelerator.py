"""What `torch.accelerator` offers for each of its kinds: streams of work, events, and an allocator with statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from rkgb.devices.base import AllocationRecorder, Device, Result
from rkgb.devices.caching_allocator import AllocationEvent, AllocatorLevels
from rkgb.process.backward_threads import await_backwards
from rkgb.process.turns import current_thread


class Accelerator(Device):
    """One device of a kind for which PyTorch has a module of that name, and a caching allocator."""

    block_bytes = 512  # the caching allocator rounds every request up to this

    @property
    def module(self) -> Any:
        """PyTorch's module for the kind, such as `torch.xpu`."""
        return torch.get_device_module(self.device)

    @property
    def index(self) -> int:
        """The device's, or that of the current one where none was named."""
        return int(self.module.current_device()) if self.device.index is None else self.device.index

    @property
    def is_there(self) -> bool:
        """Whether this process sees such a device."""
        return bool(self.module.is_available()) and (self.device.index or 0) < self.module.device_count()

    def synchronize(self) -> None:
        """Wait for all of its streams."""
        self.module.synchronize(self.device)

    def await_backwards(self) -> None:
        """They run in one thread of the device, which lets go of an error a moment after it is told."""
        if self.module.is_initialized():  # else nothing ran there
            await_backwards(self.device)

    def stamp(self) -> torch.Event:
        """An event between what the current stream was told before and what it is told next."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: torch.Event, end: torch.Event) -> float:
        """Waits for the later event."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def allocated_bytes(self, size_bytes: int) -> int:
        """Whole blocks."""
        return -(-size_bytes // self.block_bytes) * self.block_bytes

    def memory_bytes(self) -> tuple[int, int]:
        """What the device has free, and in all."""
        # PyTorch 2.9 asks the module of each kind.
        of_any = getattr(torch.accelerator.memory, "get_memory_info", None)
        free_bytes, total_bytes = (of_any or self.module.mem_get_info)(self.index)
        return int(free_bytes), int(total_bytes)

    def available_bytes(self) -> int:
        """What the device has free, and what its allocator holds unused."""
        stats = torch.accelerator.memory.memory_stats(self.index)
        return int(self.memory_bytes()[0] + stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"])

    def warm_up(self, run: Callable[[], object]) -> None:
        """Libraries take scratch buffers of PyTorch's allocator when they are first used, and keep them: cuBLAS one for
        each thread and stream. cuDNN, where it is to benchmark, tries algorithms out at the first run, with buffers of
        any size. No later run takes them, so that they belong to what was there before."""
        run()
        self.synchronize()

    def unwatched(self, run: Callable[[], Result]) -> Result:
        """Between two stretches of the log that this thread has begun, if there is one: `run` is in neither."""
        log = History.of(self)
        if log is None or log.thread != current_thread():
            return run()
        log.pause()
        try:
            return run()
        finally:
            log.resume()

    @property
    def is_watched(self) -> bool:
        """Whether a log is recorded, in whichever thread."""
        return History.of(self) is not None

    def restart_levels(self) -> None:
        """From what is in use now."""
        torch.accelerator.memory.reset_peak_memory_stats(self.index)

    def levels(self) -> AllocatorLevels:
        """Of blocks as large as they were handed out."""
        memory = torch.accelerator.memory
        return AllocatorLevels(
            memory.memory_allocated(self.index),
            memory.max_memory_allocated(self.index),
            memory.max_memory_reserved(self.index),
        )

    def empty_cache(self) -> None:
        """Of all devices at once."""
        torch.accelerator.memory.empty_cache()

    @property
    def generator(self) -> torch.Generator:
        """Starts the device's library where nothing has yet."""
        self.module.init()
        generator: torch.Generator = self.module.default_generators[self.device.index or 0]
        return generator


class History(AllocationRecorder):
    """What a caching allocator says that it did, in the form that PyTorch has for it."""

    _running: ClassVar[dict[torch.device, History]] = {}  # one for each device: an allocator has one history

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.thread = current_thread()
        self._place = torch.device(device.kind, device.index)
        self._before = 0
        self._kept: list[AllocationEvent] = []  # of the stretches before the last pause

    @classmethod
    def of(cls, device: Accelerator) -> History | None:
        """The one that is recorded now and not paused, if any."""
        return cls._running.get(torch.device(device.kind, device.index)) if cls._running else None

    def start(self) -> None:
        self.device.synchronize()
        self.check()
        self._begin()

    def stop(self, error: BaseException | None) -> list[AllocationEvent]:
        self._end()
        return self._kept

    def pause(self) -> None:
        """Until `resume`, nothing is recorded, and another history may be. Raises as `stop`."""
        self._end()
        levels = self.device.levels()
        self.levels_before = levels if self.levels_before is None else levels.or_higher(self.levels_before)

    def resume(self) -> None:
        """Go on, with levels that start anew."""
        self.device.synchronize()
        self._begin()
        self.device.restart_levels()

    def _begin(self) -> None:
        self.switch(True)
        try:
            self._before = len(self.trace())  # of an earlier recording, if the allocator still has it
        except BaseException:
            self.switch(False)
            raise
        self._running[self._place] = self

    def _end(self) -> None:
        try:
            self.device.synchronize()
            self._kept += events_of(self.trace()[self._before :])
        finally:
            self._running.pop(self._place, None)
            self.switch(False)

    def check(self) -> None:
        """Raises `RuntimeError` where the allocator cannot be asked now."""

    def switch(self, is_on: bool) -> None:
        """Begin or end the allocator's history."""
        raise NotImplementedError

    def trace(self) -> list[dict[str, Any]]:
        """The history so far. Raises `RuntimeError` where a part of it is lost."""
        raise NotImplementedError


def trace_of(snapshot: dict[str, Any], device: Accelerator, most_events: int) -> list[dict[str, Any]]:
    """What the allocator of `device` did. Raises `RuntimeError` where it cannot have kept all of it."""
    traces: list[list[dict[str, Any]]] = snapshot["device_traces"]  # of all devices, whichever was asked for
    kind, index = device.kind, device.index
    if index >= len(traces):
        raise RuntimeError(
            f"{kind.upper()}'s allocator has a history of {len(traces)} devices, and none of {kind}:{index}: its "
            "memory cannot be measured. Is there such a device?"
        )
    if len(traces[index]) >= most_events:
        raise RuntimeError(
            f"{kind.upper()}'s allocator keeps the last {most_events} events, and more happened on {kind}:{index}: "
            "memory cannot be measured over so many. Measure fewer steps at once."
        )
    return traces[index]


def events_of(trace: list[dict[str, Any]]) -> list[AllocationEvent]:
    """Allocations and releases. A block is free for others, and so counted as free, once its release is requested.

    Segments and blocks told apart: what the allocator takes from the device is not what it hands out.
    """
    signs = {"alloc": 1, "free_requested": -1}
    return [
        AllocationEvent(
            entry["addr"],
            signs[entry["action"]] * entry["size"],
            entry.get("time_us", 0) * 1000,
            entry.get("stream", 0),
        )
        for entry in trace
        if entry["action"] in signs
    ]
