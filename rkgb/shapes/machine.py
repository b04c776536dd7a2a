"""Machines by name: how much memory they have, and how fast they are at best."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

_GIB = 1 << 30
_TERA = 1e12
_GIGA = 1e9
# Of the best that data sheets name, what kernels reach on tensors of usual sizes. Ratios of times hardly depend on it.
_COMPUTING_SHARE = 0.6
_MOVING_SHARE = 0.8
_START_MS = 0.004  # of a kernel, from the one before it
# A library's context, its kernels and scratch memory: what a process holds beside PyTorch's allocator.
CONTEXT_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """One device. Speeds are those of its data sheet; `compute_ms` and `move_ms` allow for what kernels reach."""

    name: str
    kind: str  # "cuda", or "cpu"
    memory_bytes: int | None  # as PyTorch tells it; None where it is not known
    flops: Mapping[str, float] = field(default_factory=dict)  # per second: "float32", and "half" for 16 bits
    bandwidth: float = 0.0  # bytes per second, of its memory
    link: float = 0.0  # bytes per second to the memory of the host, each way; of the CPU, to a file
    source: str = ""  # where the speeds are from

    @property
    def is_accelerator(self) -> bool:
        """Whether it has memory of its own, and a caching allocator."""
        return self.kind != "cpu"

    @property
    def has_speed(self) -> bool:
        """Whether times can be told."""
        return bool(self.flops) and self.bandwidth > 0

    @property
    def usable_bytes(self) -> int | None:
        """What is left of its memory for tensors."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes - CONTEXT_BYTES if self.is_accelerator else self.memory_bytes

    def compute_ms(self, operations: float, dtype: torch.dtype) -> float:
        """For so many floating point operations in products and convolutions."""
        speed = self.flops.get("half" if dtype.itemsize <= 2 else "float32", 0.0)
        return operations / (speed * _COMPUTING_SHARE) * 1e3 if speed else 0.0

    def move_ms(self, size_bytes: float) -> float:
        """To read or write so many bytes of its memory."""
        return size_bytes / (self.bandwidth * _MOVING_SHARE) * 1e3 if self.bandwidth else 0.0

    def link_ms(self, size_bytes: float) -> float:
        """To copy so many bytes to the memory of the host, or from it; of the CPU, to a file."""
        return size_bytes / (self.link * _MOVING_SHARE) * 1e3 if self.link else 0.0

    @property
    def start_ms(self) -> float:
        """What an operation takes at least."""
        return _START_MS


def _gpu(
    name: str, memory_gib: float, float32: float, half: float, bandwidth_gb: float, link_gb: float, source: str
) -> Machine:
    flops = {"float32": float32 * _TERA, "half": half * _TERA}
    return Machine(name, "cuda", int(memory_gib * _GIB), flops, bandwidth_gb * _GIGA, link_gb * _GIGA, source)


_NVIDIA = "the vendor's data sheet"
_MACHINES = (
    _gpu("V100-16GB", 15.8, 15.7, 125, 900, 12, _NVIDIA),
    _gpu("V100-32GB", 31.7, 15.7, 125, 900, 12, _NVIDIA),
    _gpu("T4", 14.6, 8.1, 65, 320, 12, _NVIDIA),
    _gpu("A10G", 22.1, 31.5, 70, 600, 25, _NVIDIA),
    _gpu("A10", 22.1, 31.2, 125, 600, 25, _NVIDIA),
    _gpu("A100-40GB", 39.4, 19.5, 312, 1555, 25, _NVIDIA),
    _gpu("A100-80GB", 79.2, 19.5, 312, 2039, 25, _NVIDIA),
    _gpu("L4", 22.0, 30.3, 121, 300, 25, _NVIDIA),
    _gpu("L40S", 44.4, 91.6, 362, 864, 25, _NVIDIA),
    _gpu("RTX 3090", 23.6, 35.6, 71, 936, 25, _NVIDIA),
    _gpu("RTX 4090", 23.5, 82.6, 165, 1008, 25, _NVIDIA),
    _gpu("RTX 5090", 31.4, 104.8, 209, 1792, 50, _NVIDIA),
    _gpu("H100", 79.1, 67, 989, 3350, 50, _NVIDIA),
    _gpu("H100 PCIe", 79.1, 51, 756, 2000, 50, _NVIDIA),
    _gpu("H200", 139.8, 67, 989, 4800, 50, _NVIDIA),
    _gpu("B200", 178.3, 75, 2250, 7700, 50, _NVIDIA),
    _gpu("MI300X", 191.7, 163.4, 1307, 5300, 50, _NVIDIA),
)
# For ratios of times: one core of a processor of servers with 256 bits wide instructions, and its share of memory.
_CPU = Machine(
    "cpu",
    "cpu",
    None,
    {"float32": 60 * _GIGA, "half": 30 * _GIGA},
    10 * _GIGA,
    1 * _GIGA,
    "the speed of one usual core",
)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_KEY = {_key(machine.name): machine for machine in _MACHINES} | {"a100": _MACHINES[6], "v100": _MACHINES[0]}

NAMES = tuple(machine.name for machine in _MACHINES)
"""Accelerators that are known by name."""


def named_machine(name: str) -> Machine | None:
    """The accelerator of that name, or the CPU; None for another. Case, spaces and dashes do not matter."""
    key = _key(name)
    return _CPU if key == "cpu" else _BY_KEY.get(key)


def known_name(told: str) -> str | None:
    """The name here of an accelerator that tells one such as "NVIDIA H100 80GB HBM3"; None where it is not known."""
    found = [name for name in NAMES if _key(name) in _key(told)]
    return max(found, key=len) if found else None


def accelerator_of(memory_bytes: int) -> Machine:
    """Some accelerator with so much memory, of which no speed is known."""
    return Machine("accelerator", "cuda", memory_bytes)


def with_speed(machine: Machine, flops: float | None, bandwidth: float | None, link: float | None = None) -> Machine:
    """The same with these speeds, per second, in the place of its own."""
    if flops is not None:
        machine = replace(machine, flops={"float32": flops, "half": flops}, source="the speeds that were given")
    if bandwidth is not None:
        machine = replace(machine, bandwidth=bandwidth, source="the speeds that were given")
    return machine if link is None else replace(machine, link=link)
