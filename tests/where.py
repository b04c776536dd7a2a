"""Where tests train: on the CPU, or on the accelerator where tests/accelerator runs them there, too.

Tests that say `here()` and `placed(...)` are the same tests on both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from rockmate import Offload

CPU = torch.device("cpu")
Placed = TypeVar("Placed", Tensor, nn.Module)


class Place:
    """Where tests train now: tests/accelerator/conftest.py puts its device here while a file of tests runs."""

    now = CPU


def here() -> torch.device:
    """The device that modules and batches of the test are on."""
    return Place.now


def elsewhere(folder: str | os.PathLike[str], limit: int | str | None = None) -> Offload:
    """The second memory that the device can have: a file of the folder, or the memory of the host."""
    return Offload("disk", os.fspath(folder), limit) if here() == CPU else Offload("host", limit=limit)


def placed(made: Placed) -> Placed:
    """What was made on the CPU, from the CPU's random numbers, on that device: a tensor is a leaf there as before."""
    if Place.now == CPU:
        return made
    if isinstance(made, Tensor):
        return made.detach().to(Place.now).requires_grad_(made.requires_grad)
    return made.to(Place.now)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Context in which `here()` is the CPU: for what is made there and moved afterwards."""
    before, Place.now = Place.now, CPU
    try:
        yield
    finally:
        Place.now = before


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Context after which the random streams of the CPU and of that device are as they were: seeds reach both."""
    of_cpu = torch.get_rng_state()
    others = None if here() == CPU else torch.get_device_module(here())
    of_others = None if others is None else others.get_rng_state(here())
    try:
        yield
    finally:
        torch.set_rng_state(of_cpu)
        if others is not None:
            others.set_rng_state(of_others, here())


def random_stream() -> Tensor:
    """The states of the CPU's random stream and of that device's, one after the other."""
    streams = [torch.get_rng_state()]
    if Place.now != CPU:
        streams.append(torch.get_device_module(Place.now).get_rng_state(Place.now))
    return torch.cat(streams)
