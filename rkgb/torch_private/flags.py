"""Flags that decide which kernels run, as the functions of C++ that read and set them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_C: Any = torch._C

# ---- those that every step reads ------------------------------------------------------------------------------
# What is public has Python code around each.


def flag_getter(name: str) -> Callable[[], Any] | None:
    """What reads a flag such as "cudnn_enabled"; None where this PyTorch does not have it."""
    getter: Callable[[], Any] | None = getattr(_C, f"_get_{name}", None)
    return getter


def precision_getter(backend: str, operations: str) -> Callable[[], str] | None:
    """What reads how exact products of a back end are in float32; None where this PyTorch has no such flags."""
    getter = getattr(_C, "_get_fp32_precision_getter", None)
    return None if getter is None else partial(getter, backend, operations)


autocast_is_on: Callable[[], bool] = _C._is_any_autocast_enabled
"""Whether it is on here for any kind of device: publicly each kind is asked."""

extension_kind: Callable[[], str] = _C._get_privateuse1_backend_name
"""How devices of an extension are called, which says so when it is loaded. Publicly that name can only be given."""

# ---- those that are set for a while ---------------------------------------------------------------------------
# `torch.backends.cudnn` refuses where `torch.backends.disable_global_flags` was called, and
# `torch.use_deterministic_algorithms` imports the compiler to tell it, too.

cudnn_is_deterministic: Callable[[], bool] = _C._get_cudnn_deterministic
"""Whether cuDNN is to take no kernels that add in another order each time."""

cudnn_tries_out: Callable[[], bool] = _C._get_cudnn_benchmark
"""Whether cuDNN times several kernels at the first call, and takes the quickest."""

set_cudnn_deterministic: Callable[[bool], None] = _C._set_cudnn_deterministic
"""Set that flag."""

set_cudnn_tries_out: Callable[[bool], None] = _C._set_cudnn_benchmark
"""Set that flag."""


def set_deterministic(is_on: bool, *, warn_only: bool) -> None:
    """Whether all operations are to take kernels that add in a fixed order, and what happens where there are none."""
    _C._set_deterministic_algorithms(is_on, warn_only=warn_only)
