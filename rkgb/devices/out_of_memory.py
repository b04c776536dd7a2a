"""Whether an error says that memory ran out, whoever raised it, and what is told of it then."""

from __future__ import annotations

import contextlib
import errno
import gc
from collections.abc import Callable, Iterator

import torch

from rkgb.devices.base import Result
from rkgb.devices.registry import KINDS, device_of

# What is said for all kinds of devices: C++'s own.
_SAID = ("std::bad_alloc",)
_TOLD = "No memory was left"


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
            said = [*_SAID, *(part for kind in KINDS.values() for part in kind.said_out_of_memory)]
            if any(part in text for part in said) or any(text in kind.meant_out_of_memory for kind in KINDS.values()):
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
    collect_failed()
    return None


def collect_failed() -> None:
    """Free what a step held that found no memory, once its error, which holds what it met, is gone.

    What is tried next has all the memory that there was before.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type in KINDS:
        for index in range(torch.accelerator.device_count()):
            device = device_of(torch.device(kind.type, index))
            levels = device.levels()
            if levels is not None and levels.allocated_bytes:  # else nothing is started there
                device.await_backwards()
    gc.collect()


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
            if not any(note.startswith(_TOLD) for note in getattr(cause, "__notes__", ())):  # once, by who knows most
                cause.add_note(f"{_TOLD} {doing}. {advice}")
            if cause is error:
                raise
            error.__cause__ = error.__context__ = None  # no cycle: it would hold every tensor of the frames
            raise cause from None
        finally:
            del cause
