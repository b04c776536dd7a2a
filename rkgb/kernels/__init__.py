"""Kernels of our own in the place of PyTorch's: equal to the bit, and quicker.

Each is proven against the operation that it stands for when it is first needed, on this machine and this release of
PyTorch; where it is not equal, or what it needs is not installed, PyTorch's own one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rkgb.kernels.bernoulli import bernoulli_, saved_ms

__all__ = ["KERNELS", "saved_ms"]

KERNELS: Mapping[Any, Callable[..., Any]] = {torch.ops.aten.bernoulli_.float: bernoulli_}
"""By overload, what is called in its place, with the same arguments."""
