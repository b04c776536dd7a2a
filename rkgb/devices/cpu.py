"""The CPU: tensors are in the memory of the process, and PyTorch's profilers tell what is allocated."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.profiler import profile

from rkgb.devices.base import AllocationRecorder, Device, Result
from rkgb.devices.caching_allocator import AllocationEvent
from rkgb.devices.host_memory import free_host_bytes
from rkgb.process.surroundings import profiler_is_taken, unprofiled
from rkgb.torch_private.profilers import (
    ALLOCATION,
    has_legacy_profiler,
    is_profiled,
    start_legacy_profiler,
    stop_legacy_profiler,
)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of glibc's mallopt
_RETURNING = {_M_MMAP_THRESHOLD: 1 << 16, _M_TRIM_THRESHOLD: 1 << 17, _M_MMAP_MAX: 1 << 16}  # the last is glibc's own
_KEEPING = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}  # no block has pages of its own, and no end of the heap is cut off


class Cpu(Device):
    """The processor and its memory."""

    kind = "cpu"
    is_host = True
    overcommits = True
    fails_for_good = False
    is_orderly = True
    attentions = ("flash of the CPU", "written out")
    packs = True
    times_cold = True
    said_out_of_memory = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
    )
    # oneDNN's, in full: the longer messages that begin alike are of operations that it does not have.
    meant_out_of_memory = (
        "could not create a primitive",
        "could not create a memory object",
        "could not execute a primitive",
    )

    @property
    def processor(self) -> str:
        """Its model, and the instructions that PyTorch uses."""
        return f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"

    def available_bytes(self) -> int:
        """What the system says is available, within the limits of the process and of its container."""
        return free_host_bytes()

    def recorder(self) -> AllocationRecorder:
        """By a profiler of its own kind; by that for one thread where a profiler of the user's is on elsewhere."""
        return _InThread() if profiler_is_taken() else _Profiled()

    def unwatched(self, run: Callable[[], Result]) -> Result:
        """In a thread of its own where a profiler watches this one, so that another may watch it there."""
        return unprofiled(run)

    @classmethod
    def reduce_gaps(cls) -> bool:
        """With glibc: large blocks get pages of their own, and freed memory goes back to the system."""
        return _set_malloc(_RETURNING)

    @classmethod
    def keep_freed_memory(cls) -> bool:
        """The opposite, with glibc: freed memory stays in the process."""
        return _set_malloc(_KEEPING)

    @property
    def adds_by_index(self) -> bool:
        """Several threads would wait for each other."""
        return torch.get_num_threads() == 1

    @property
    def generator(self) -> torch.Generator:
        """There is one."""
        return torch.default_generator

    @property
    def random_state_bytes(self) -> int:
        """It takes room where tensors are."""
        return torch.default_generator.get_state().nbytes

    @classmethod
    def seed(cls, seed: int) -> None:
        """Seed it. `torch.manual_seed` would leave word for devices that were never used, which nobody takes back."""
        torch.default_generator.manual_seed(seed)


@functools.cache
def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _set_malloc(settings: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # no glibc
        return False
    taken = [mallopt(parameter, value) for parameter, value in settings.items()]
    return all(taken)


# ---- recorders -----------------------------------------------------------------------------------------


class _Profiled(AllocationRecorder):
    """The autograd profiler's memory events."""

    def __init__(self) -> None:
        self._profile = profile(use_cpu=True, profile_memory=True)
        self._quiet = _quiet_profiler()

    def start(self) -> None:
        self._quiet.__enter__()
        try:
            self._profile.__enter__()
        except BaseException:  # such as out of memory: what is held back is still to come out
            self._quiet.__exit__(*sys.exc_info())
            raise

    def stop(self, error: BaseException | None) -> list[AllocationEvent]:
        recorded = is_profiled()
        try:
            if recorded:
                self._profile.__exit__(None, None, None)
        finally:
            self._quiet.__exit__(None, None, None)
        if recorded:
            return _cpu_events(self._profile)
        if error is None:
            raise RuntimeError("another profiler was started and stopped inside the measurement, and ended it.")
        return []


class _InThread(AllocationRecorder):
    """The legacy profiler, which has nothing that exists once in a process, and tells no addresses."""

    has_addresses = False

    def __init__(self) -> None:
        self._gc_was_on = False

    def start(self) -> None:
        if is_profiled() or not has_legacy_profiler():
            raise RuntimeError("memory cannot be measured while another profiler runs: stop that profiler first.")
        gc.collect()  # its releases could not be told from those of what is made inside
        start_legacy_profiler()
        self._gc_was_on = gc.isenabled()
        gc.disable()

    def stop(self, error: BaseException | None) -> list[AllocationEvent]:
        try:
            return _thread_events(stop_legacy_profiler())
        finally:
            if self._gc_was_on:
                gc.enable()


def _cpu_events(profiled: profile) -> list[AllocationEvent]:
    results: Any = profiled.kineto_results
    pending = list(results.experimental_event_tree())
    found: list[AllocationEvent] = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        tag, fields = event.typed
        if tag == ALLOCATION and fields.device.type == "cpu":
            found.append(AllocationEvent(fields.ptr, fields.alloc_size, event.start_time_ns))
    return sorted(found, key=lambda event: event.time_ns)


def _thread_events(records: Any) -> list[AllocationEvent]:
    """Without addresses, numbers tell blocks apart: a release is of the latest of its size."""
    alive: dict[int, list[int]] = {}
    found: list[AllocationEvent] = []
    number = 0
    told = [record.cpu_memory_usage() for thread in records for record in thread if record.kind() == "memory_alloc"]
    for size_bytes in told:
        if size_bytes > 0:
            number += 1
            alive.setdefault(size_bytes, []).append(number)
            found.append(AllocationEvent(number, size_bytes))
        elif alive.get(-size_bytes):
            found.append(AllocationEvent(alive[-size_bytes].pop(), size_bytes))
    return found


_NOISE = (
    b"USDT:",
    b"Memory block of unknown size was allocated before the profiling started",
    b"External init callback must run in same thread as registerClient",
)


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Leave out the lines that the profiler's libraries write to the standard error stream about themselves.

    Everything else that is written meanwhile comes out, in order, at the end of the block.
    """
    try:
        sys.stderr.flush()
        stream = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no usable stream: nothing to hold back
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(stream, 2)
            os.close(stream)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if not any(noise in line for noise in _NOISE):
                    os.write(2, line)
