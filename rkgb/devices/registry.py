"""The kinds of devices that there are: a new one is a file beside this one, and a name in `KINDS`."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterator, Mapping

import torch

from rkgb.devices.base import AllocationRecorder, Device
from rkgb.devices.cpu import Cpu
from rkgb.devices.cuda import Cuda
from rkgb.devices.xpu import Xpu

UNPROVEN: dict[str, type[Device]] = {kind.kind: kind for kind in (Xpu,)}
"""Kinds that are written and were run by nobody: ROCKMATE_UNPROVEN lists those that are to be tried all the same."""

_TRIED = {name.strip() for name in os.environ.get("ROCKMATE_UNPROVEN", "").split(",")}
_PROVEN: tuple[type[Device], ...] = (Cpu, Cuda)
KINDS: dict[str, type[Device]] = {kind.kind: kind for kind in _PROVEN} | {
    name: kind for name, kind in UNPROVEN.items() if name in _TRIED
}
"""By the name that PyTorch has for them."""

_REASONS = {
    "mps": "MPS's allocator tells neither what it allocates nor how much it was at most",
    **{
        name: f"{name!r} was never run: set ROCKMATE_UNPROVEN={name} before Python starts to try it"
        for name in UNPROVEN
    },
}


class Other(Device):
    """A device of a kind that is not known, and "meta", where there is no data: planning refuses both by name.

    Whatever looks at their tensors before that, or at those that a forward makes by the way, finds nothing to count.
    """

    is_supported = False
    is_orderly = True  # nothing is planned that runs there, so nothing is repeated

    @property
    def name(self) -> str:
        """That of its kind."""
        return self.device.type

    @property
    def is_there(self) -> bool:
        """Nothing is put there."""
        return False

    def available_bytes(self) -> int:
        """No limit is known."""
        return sys.maxsize

    def recorder(self) -> AllocationRecorder:
        """Raises `RuntimeError`."""
        raise RuntimeError(f"memory cannot be measured on {self.device}. {supported_text()}.")

    @property
    def generator(self) -> torch.Generator:
        """The host's: there is none of it."""
        return torch.default_generator


def kinds_text() -> str:
    """The kinds that can be measured, for messages."""
    return " and ".join(f'"{name}"' for name in KINDS)


def supported_text() -> str:
    """What devices of these kinds are for, without a full stop."""
    kinds = " and ".join(kind.title or f'"{name}"' for name, kind in KINDS.items())
    return f"Memory is measured, and random numbers are given back, on devices of the kinds {kinds} only"


def refusal_text(device: torch.device) -> str:
    """Why nothing is planned on that device, without a full stop."""
    reason = _REASONS.get(device.type)
    return supported_text() if reason is None else f"{supported_text()} ({reason})"


MakeDevice = Callable[[torch.device], Device]

_STAND_INS: contextvars.ContextVar[Mapping[str, MakeDevice]] = contextvars.ContextVar("stand_ins", default={})  # noqa: B039


@contextlib.contextmanager
def standing_in(kind: str, make: MakeDevice) -> Iterator[None]:
    """Within this context and thread, devices of `kind`, one that cannot be measured, are what `make` makes of them."""
    token = _STAND_INS.set({**_STAND_INS.get(), kind: make})
    try:
        yield
    finally:
        _STAND_INS.reset(token)


def usual_device() -> torch.device:
    """Where training mostly is on this machine: on its accelerator, where there is one that can be measured."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    if found is None or not device_of(found).is_supported:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def device_of(device: torch.device) -> Device:
    """All that depends on the kind of `device`."""
    kind = KINDS.get(device.type)
    return kind(device) if kind is not None else _STAND_INS.get().get(device.type, Other)(device)


def host() -> Device:
    """That of the process's own memory."""
    return device_of(torch.device("cpu"))


def stored_bytes(tensor: torch.Tensor) -> int:
    """What the allocator took for the storage of `tensor`."""
    return device_of(tensor.device).allocated_bytes(tensor.untyped_storage().nbytes())
