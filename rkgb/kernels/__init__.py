"""Kernels of our own in the place of PyTorch's: equal to the bit, and quicker.

Each of these is proven against the operation that it stands for when it is first needed, on this machine and this
release of PyTorch; where it is not equal, or what it needs is not installed, PyTorch's own one runs. `products` and
`attention` are apart: operations that round otherwise, which stand in a graph by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import rkgb.kernels.attention
import rkgb.kernels.products  # noqa: F401  their operations are known to PyTorch from then on
from rkgb.kernels.bernoulli import bernoulli_, saved_ms

__all__ = ["KERNELS", "saved_ms"]

KERNELS: Mapping[Any, Callable[..., Any]] = {torch.ops.aten.bernoulli_.float: bernoulli_}
"""By overload, what is called in its place, with the same arguments."""
