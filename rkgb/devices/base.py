"""What the rest asks of a device: one class for each kind of device, one object for each device.

A kind says what differs from these defaults, which are those of an accelerator that does at once what it is told and
rounds nothing. `rkgb.devices.registry` finds the class of a device.
"""

# ruff: noqa: B027  what is empty here is the default: nothing to do
from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from rkgb.devices.caching_allocator import AllocationEvent, AllocatorLevels, CachingAllocator
from rkgb.devices.flags import Getter

Result = TypeVar("Result")


class AllocationRecorder(abc.ABC):
    """Records what is allocated on one device from `start` to `stop`. It is used once."""

    has_addresses: ClassVar[bool] = True  # else a release is taken for that of the latest block of its size
    levels_before: AllocatorLevels | None = None  # the allocator's, of the stretch before the last pause

    def address_of(self, tensor: torch.Tensor) -> int:
        """What tells the tensor's storage apart in events."""
        return tensor.untyped_storage().data_ptr()

    def note(self, size_bytes: int, device: torch.device) -> None:
        """Have an event of so many bytes recorded, and the release of these, in their place in the order."""
        torch.empty(size_bytes, dtype=torch.uint8, device=device)

    @abc.abstractmethod
    def start(self) -> None:
        """Raises `RuntimeError` where the device cannot be recorded now; nothing is left on then."""

    @abc.abstractmethod
    def stop(self, error: BaseException | None) -> list[AllocationEvent]:
        """What happened, in order, in bytes as they were asked for. `error` is what ended the recording, if one did.

        Raises `RuntimeError` where events were lost.
        """


class Device(abc.ABC):
    """One device, and all that depends on its kind."""

    kind: ClassVar[str]  # as PyTorch names it: `torch.device.type`
    title: ClassVar[str] = ""  # how messages name the kind, where its name does not say all
    has_data: ClassVar[bool] = True  # else there are shapes alone: values cannot be compared, and times are estimates
    is_supported: ClassVar[bool] = True  # memory can be measured there, so that budgets can be kept
    is_host: ClassVar[bool] = False  # tensors are in the memory of the process, and reading one waits for nothing
    overcommits: ClassVar[bool] = False  # more may be promised than there is: who takes it at its word is ended
    fails_for_good: ClassVar[bool] = True  # after an index out of range, nothing runs there any more
    is_orderly: ClassVar[bool] = False  # what runs in parallel adds, writes and breaks ties in a fixed order
    packs: bool = False  # masks, indices and statistics stand for larger tensors: written for it, and pays
    times_cold: ClassVar[bool] = False  # what repetitions take depends on what the caches hold
    may_capture_graphs: ClassVar[bool] = False  # a compiler may put kernels into graphs with memory of their own
    attentions: ClassVar[tuple[str, ...]] = ()  # kernels of attention that it has, as `torch.ops.rkgb.attention` says
    # Flags of PyTorch's back ends that matter there beside those that matter everywhere: names, and what reads them.
    flags: ClassVar[tuple[Getter, ...]] = ()
    # In errors of no class of their own: parts of what allocators say, and all that they say.
    said_out_of_memory: ClassVar[tuple[str, ...]] = ()
    meant_out_of_memory: ClassVar[tuple[str, ...]] = ()
    smallest_segments_bytes: ClassVar[int] = 0  # the allocator reserves so much for whatever little is allocated

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # ---- who it is ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Devices of one name take the same time and bytes, more or less."""
        return self.kind

    @property
    def processor(self) -> str:
        """What decides, beside the name, on times and scratch memory."""
        return ""

    @property
    def is_there(self) -> bool:
        """Whether this process can make tensors on it."""
        return True

    def around_planning(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which planning runs operations there."""
        return contextlib.nullcontext()

    # ---- time ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for all that it has been told to do."""

    def await_backwards(self) -> None:
        """Return once nothing holds any more what backwards held that have ended, failed ones too.

        On the host they run in the thread of who calls them.
        """

    def stamp(self) -> Any:
        """This moment on the device's own line of time."""
        return time.perf_counter()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Time between two stamps."""
        return float(end - start) * 1e3

    def time_ms(self, run: Callable[[], object]) -> float:
        """What `run` takes, from an idle device to an idle one."""
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return (time.perf_counter() - started) * 1e3

    def copy_ms(self, size_bytes: int) -> float:
        """What it takes to read so many bytes and write them: of devices without data, which measure nothing."""
        raise NotImplementedError

    # ---- memory -------------------------------------------------------------------------------------

    def allocated_bytes(self, size_bytes: int) -> int:
        """What the allocator takes for a storage of that size."""
        return size_bytes

    @abc.abstractmethod
    def available_bytes(self) -> int:
        """Bytes that could still be allocated now."""

    @abc.abstractmethod
    def recorder(self) -> AllocationRecorder:
        """What records the allocations, for an `AllocationLog`."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Do `run` once, unobserved, where libraries take scratch memory at their first use and keep it."""

    def unwatched(self, run: Callable[[], Result]) -> Result:
        """What `run` gives, which records allocations: where no profiler or log of the user's is in the way."""
        return run()

    @property
    def is_watched(self) -> bool:
        """Whether somebody waits for the highest levels, which nobody else is to let start anew."""
        return False

    def restart_levels(self) -> None:
        """The highest levels of `levels` start anew."""

    def levels(self) -> AllocatorLevels | None:
        """The allocator's own statistics; None where it keeps none."""
        return None

    def emulated(self) -> CachingAllocator | None:
        """An emulation of the allocator that holds what it holds now; None where its rules are not known."""
        return None

    def empty_cache(self) -> None:
        """Return to the device what its allocator holds unused."""

    def gaps_advice(self) -> str:
        """What to do about gaps between tensors, in a sentence."""
        return "Give a lower budget."

    @classmethod
    def reduce_gaps(cls) -> bool:
        """Set what keeps the gaps between tensors small; whether it could be set. For all devices of the kind."""
        return False

    # ---- kernels ------------------------------------------------------------------------------------

    @property
    def adds_by_index(self) -> bool:
        """Whether inductor writes loops that add up where indices say, instead of calling PyTorch's operation."""
        return True

    # ---- random numbers -----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def generator(self) -> torch.Generator:
        """What operations draw from that are given no generator."""

    @property
    def random_state_bytes(self) -> int:
        """What a copy of the generator's state takes of the memory that tensors are in."""
        return 0

    @classmethod
    def seed(cls, seed: int) -> None:
        """Seed the default generators that there are. Not those of devices that were never used."""
