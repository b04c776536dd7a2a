"""Where tests train: on the CPU, or on the accelerator where tests/accelerator runs them there, too.

Tests that say `here()` and `placed(...)` are the same tests on both.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
Placed = TypeVar("Placed", Tensor, nn.Module)

_here = CPU  # tests/accelerator/conftest.py puts its device here, for as long as a test runs


def here() -> torch.device:
    """The device that modules and batches of the test are on."""
    return _here


def placed(made: Placed) -> Placed:
    """What was made on the CPU, from the CPU's random numbers, on that device: a tensor is a leaf there as before."""
    if _here == CPU:
        return made
    if isinstance(made, Tensor):
        return made.detach().to(_here).requires_grad_(made.requires_grad)
    return made.to(_here)


def random_stream() -> Tensor:
    """The states of the CPU's random stream and of that device's, one after the other."""
    streams = [torch.get_rng_state()]
    if _here != CPU:
        streams.append(torch.get_device_module(_here).get_rng_state(_here))
    return torch.cat(streams)
