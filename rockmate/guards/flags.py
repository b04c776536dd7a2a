"""Flags of PyTorch's back ends: which of its implementations run, how exact they are, and what they take beside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rkgb.devices.flags import getters, precisions
from rkgb.devices.registry import KINDS, device_of

_EVERYWHERE = (
    *getters(("deterministic_algorithms", "deterministic_fill_uninitialized_memory")),
    *getters(("flash_sdp_enabled", "math_sdp_enabled", "mem_efficient_sdp_enabled")),
    *getters(("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled")),
    *precisions("mkldnn"),
)

Flags = tuple[Any, ...]
"""The values of those that matter on some devices, in their order."""


class BackEndFlags:
    """The flags that matter on `devices`, or on all that there are: those that matter everywhere, and each kind's."""

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        found = map(torch.device, KINDS) if devices is None else devices
        used = {type(at) for at in map(device_of, found) if at.is_there}
        own = [flag for kind in KINDS.values() if kind in used for flag in kind.flags]
        self._names, self._getters = zip(*_EVERYWHERE, *own, strict=True)

    def now(self) -> Flags:
        """Their values."""
        return tuple([getter() for getter in self._getters])

    def texts(self, flags: Flags | None = None) -> tuple[str, ...]:
        """Names and values, of now or of the `flags` given, such as "mkldnn_enabled=True"."""
        values = self.now() if flags is None else flags
        return tuple(f"{name}={value}" for name, value in zip(self._names, values, strict=True))


def flags_difference(now: Iterable[str], then: Iterable[str]) -> str:
    """Which values differ of flags that both tell, in words; empty where none do."""
    values = {name: value for name, _, value in (text.partition("=") for text in now)}
    before = {name: value for name, _, value in (text.partition("=") for text in then)}  # of a file: any text
    differ = [name for name in before if values.get(name, before[name]) != before[name]]
    return ", ".join(f"{name} is {values[name]}, but was {before[name]}" for name in differ)
