"""Every allocation and release of a stretch of code, in order, to the byte.

CPU: the autograd profiler's memory events. CUDA: the caching allocator's history. Both are exact;
process-level figures such as the resident set size are not.

CUDA's history tells the sizes that were asked for. They are rounded up here as the allocator does by default. It may
hand out larger blocks all the same, where it does not split one or was told to round more; then its own statistics,
which are of blocks, are above the sum of the log. With expandable segments it always splits.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _EventType, _ExperimentalConfig
from torch.autograd.profiler import profile

from rkgb.process.surroundings import profiler_is_prepared, profiler_is_taken
from rkgb.process.turns import ALLOCATIONS

Result = TypeVar("Result")

_enable_legacy: Any = getattr(torch._C._autograd, "_enable_profiler_legacy", None)
_disable_legacy: Any = getattr(torch._C._autograd, "_disable_profiler_legacy", None)

# Marks are allocations of a size that no model uses, made and released at once: the allocator's own
# order then places them exactly, which time stamps would not.
_MARK_BYTES = (1 << 20) + 4 * 4093
CUDA_BLOCK_BYTES = 512  # the caching allocator rounds every request up to this
_MOST_CUDA_EVENTS = 1 << 24  # the allocator keeps so many of each device; then new ones take the places of old ones


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """`size_bytes` taken at `address`, or given back when negative."""

    address: int
    size_bytes: int
    time_ns: int = 0  # on the recorder's own line of time


class AllocationLog:
    """Context manager that records what is allocated on `device` inside it.

    After the block, `events` holds the allocations and releases in order, and ``marks[k]`` the
    number of events before the k-th call of `mark`. Releases of what was allocated before the
    block are left out. Logs cannot be nested, nor run under another profiler, in whichever thread that was started; a
    log waits for that of another thread to end.

    Where a profiler of the user's is on elsewhere, the CPU's log is that of the profiler for one thread, which tells no
    addresses (`has_addresses`): a release is then taken for that of the latest block of its size. Within the user's
    own profiler, `rkgb.process.surroundings.unprofiled` is a place for it.

    On CUDA, every stream of `device` counts, and no other device. Raises `RuntimeError` where the allocator keeps no
    history, where somebody else has it record one, and at the end of the block where events were lost.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[AllocationEvent] = []
        self.marks: list[int] = []
        self.has_addresses = True
        self._profile: profile | None = None
        self._gc_was_on = False
        self._quiet = quiet_profiler()
        self._before = 0

    def mark(self) -> None:
        """Note this point in the order of events."""
        torch.empty(_MARK_BYTES, dtype=torch.uint8, device=self.device)

    def __enter__(self) -> AllocationLog:
        ALLOCATIONS.acquire()
        try:
            return self._started()
        except BaseException:
            ALLOCATIONS.release()
            raise

    def _started(self) -> AllocationLog:
        if self.device.type == "cuda":
            self._start_history()
            return self
        if profiler_is_taken():
            self._start_in_thread()
            return self
        self._profile = profile(use_cpu=True, profile_memory=True)
        self._quiet.__enter__()
        try:
            self._profile.__enter__()
        except BaseException:  # such as out of memory: what is held back is still to come out
            self._quiet.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end(kind, error, traceback)
        finally:
            ALLOCATIONS.release()

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
                trace = self._history()[self._before :]
            finally:
                torch.cuda.memory._record_memory_history(None)
            self._split(_cuda_events(trace))
            return
        if not self.has_addresses:
            self._end_in_thread()
            return
        assert self._profile is not None
        recorded = _profiler_enabled()
        try:
            if recorded:
                self._profile.__exit__(kind, error, traceback)
        finally:
            self._quiet.__exit__(None, None, None)
        if recorded:
            self._split(_cpu_events(self._profile))
        elif error is None:
            raise RuntimeError("another profiler was started and stopped inside the measurement, and ended it.")

    def _start_in_thread(self) -> None:
        """The legacy profiler has nothing that exists once in a process."""
        if _profiler_enabled() or _enable_legacy is None:
            raise RuntimeError("memory cannot be measured while another profiler runs: stop that profiler first.")
        self.has_addresses = False
        gc.collect()  # its releases could not be told from those of what is made inside
        _enable_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
        self._gc_was_on = gc.isenabled()
        gc.disable()

    def _end_in_thread(self) -> None:
        try:
            records = _disable_legacy()
        finally:
            if self._gc_was_on:
                gc.enable()
        self._split(_thread_events(records))

    def _start_history(self) -> None:
        torch.cuda.synchronize(self.device)
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise RuntimeError(
                f"memory cannot be measured on {self.device}: PyTorch runs with the allocator {backend!r} there, which "
                "keeps no history. Use the native one: leave `backend:` out of PYTORCH_ALLOC_CONF."
            )
        if torch._C._cuda_isHistoryEnabled():
            raise RuntimeError(
                "memory cannot be measured while the history of CUDA's allocator is recorded for somebody else, or by "
                "another log: end that first, with torch.cuda.memory._record_memory_history(None)."
            )
        # "python": nothing of C++'s stack is to be looked up, not even once.
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=_MOST_CUDA_EVENTS)
        try:
            self._before = len(self._history())  # of an earlier recording, if the allocator still has it
        except BaseException:
            torch.cuda.memory._record_memory_history(None)
            raise

    def _history(self) -> list[dict[str, Any]]:
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        return _trace_of(torch.cuda.memory._snapshot(index), index, _MOST_CUDA_EVENTS)

    def _split(self, events: list[AllocationEvent]) -> None:
        alive: dict[int, int] = {}
        for event in events:
            if event.size_bytes == _MARK_BYTES:
                self.marks.append(len(self.events))
            elif event.size_bytes > 0:
                alive[event.address] = event.size_bytes
                self.events.append(event)
            elif alive.get(event.address) == -event.size_bytes:
                # Other releases are of what was there before, which some logs see and some do not.
                del alive[event.address]
                self.events.append(event)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, of those allocated inside the block."""
        return highest_level(self.events)


def there_is_a_profiler() -> bool:
    """Whether somebody's profiler runs, in whichever thread, or is prepared to: two at once end the process."""
    return profiler_is_taken() or profiler_is_prepared()


def highest_level(events: list[AllocationEvent]) -> int:
    """Highest running sum of a stretch of events, from 0 at its start."""
    alive = highest = 0
    for event in events:
        alive += event.size_bytes
        highest = max(highest, alive)
    return highest


def _cpu_events(profiled: profile) -> list[AllocationEvent]:
    results: Any = profiled.kineto_results
    pending = list(results.experimental_event_tree())
    found: list[AllocationEvent] = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        tag, fields = event.typed
        if tag == _EventType.Allocation and fields.device.type == "cpu":
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


def _trace_of(snapshot: dict[str, Any], index: int, most_events: int) -> list[dict[str, Any]]:
    """What the allocator of device `index` did. Raises where it cannot have kept all of it."""
    traces: list[list[dict[str, Any]]] = snapshot["device_traces"]  # of all devices, whichever was asked for
    if index >= len(traces):
        raise RuntimeError(
            f"CUDA's allocator has a history of {len(traces)} devices, and none of cuda:{index}: its memory cannot be "
            "measured. Is there such a device?"
        )
    if len(traces[index]) >= most_events:
        raise RuntimeError(
            f"CUDA's allocator keeps the last {most_events} events, and more happened on cuda:{index}: memory cannot "
            "be measured over so many. Measure fewer steps at once."
        )
    return traces[index]


def _cuda_events(trace: list[dict[str, Any]]) -> list[AllocationEvent]:
    """Allocations and releases. A block is free for others, and so counted as free, once its release is requested.

    Segments and blocks told apart: what the allocator takes from the device is not what it hands out.
    """
    signs = {"alloc": 1, "free_requested": -1}
    events = []
    for entry in trace:
        if entry["action"] in signs:
            size_bytes = entry["size"]  # as asked for: marks are told by it, before it is rounded like any other
            block_bytes = size_bytes if size_bytes == _MARK_BYTES else _round_up(size_bytes)
            time_ns = entry.get("time_us", 0) * 1000
            events.append(AllocationEvent(entry["addr"], signs[entry["action"]] * block_bytes, time_ns))
    return events


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """What the allocator of `device` takes for a storage of that size."""
    return _round_up(size_bytes) if device.type == "cuda" else size_bytes


def warm_up(device: torch.device, run: Callable[[], object]) -> None:
    """On CUDA: do `run` once, unobserved, before it is measured. Elsewhere nothing.

    Libraries take scratch buffers of PyTorch's allocator when they are first used, and keep them: cuBLAS one for each
    thread and stream. cuDNN, where it is to benchmark, tries algorithms out at the first run, with buffers of any size.
    No later run takes them, so that they belong to what was there before.
    """
    if device.type == "cuda":
        run()
        torch.cuda.synchronize(device)


# What allocators say in errors of no class of their own: PyTorch's for the CPU, CUDA and its libraries, and C++.
_SAID_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
# oneDNN's, in full: the longer messages that begin alike are of operations that it does not have.
_MEANT_OUT_OF_MEMORY = (
    "could not create a primitive",
    "could not create a memory object",
    "could not execute a primitive",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device, the machine or the process has no memory left, or was raised from one."""
    return _out_of_memory_in(error) is not None


def _out_of_memory_in(error: BaseException) -> BaseException | None:
    """The error, among `error` and those it was raised from, that an allocation failed with."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (torch.OutOfMemoryError, MemoryError)):
            return found
        if isinstance(found, OSError) and found.errno == errno.ENOMEM:
            return found
        if isinstance(found, RuntimeError):
            text = str(found)
            if text in _MEANT_OUT_OF_MEMORY or any(said in text for said in _SAID_OUT_OF_MEMORY):
                return found
        found = found.__cause__
    return None


def if_it_fits(run: Callable[[], Result]) -> Result | None:
    """What `run` gives; None where the memory does not suffice for it, of which nothing is left then."""
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # once the error, which holds what it met, is gone
    return None


@contextlib.contextmanager
def out_of_memory_told(doing: str, advice: str) -> Iterator[None]:
    """Add to an out-of-memory error what was being done and what to do instead.

    It is raised as what it was, for those who catch it: without the errors that took it for something else.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  it is raised again, or what it came from
        cause = _out_of_memory_in(error)
        try:
            if cause is None:
                raise
            if not getattr(cause, "__notes__", None):  # told once, by who knows most
                cause.add_note(f"No memory was left {doing}. {advice}")
            if cause is error:
                raise
            error.__cause__ = error.__context__ = None  # no cycle: it would hold every tensor of the frames
            raise cause from None
        finally:
            del cause


_NOISE = (
    b"USDT:",
    b"Memory block of unknown size was allocated before the profiling started",
    b"External init callback must run in same thread as registerClient",
)


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
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
