"""Code of `torch.nn` and `torch.utils.checkpoint`, and what it keeps at the level of modules of Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.nn.modules.batchnorm
import torch.nn.modules.module as calls
import torch.utils.checkpoint
from torch.nn.utils import parametrize

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
"""The class that all batch normalisations are made from."""

CHECKPOINT_GENERATOR: str = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch.utils.checkpoint, name)
)
"""The function of `torch.utils.checkpoint` that all checkpoints go through which are not reentrant.

It is the first of the two from PyTorch 2.14 on, where the second calls it.
"""

# ---- hooks on calls of all modules, by number -----------------------------------------------------------------
# `register_module_forward_hook` and its like put some there. Nothing public tells which are there.

hooks_before_calls: dict[int, Any] = calls._global_forward_pre_hooks
"""Called before the forward of any module."""

hooks_after_calls: dict[int, Any] = calls._global_forward_hooks
"""Called after the forward of any module."""

hooks_always_called: dict[int, Any] = calls._global_forward_hooks_always_called
"""The numbers of those that are called after a forward that has raised an error, too."""


def arguments_of_hook(frame: FrameType | None) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """With what the module is called whose hook for all modules was called from `frame`: those are told no keywords.

    None where that cannot be seen.
    """
    if frame is None or frame.f_code.co_filename != calls.__file__:
        return None
    seen = frame.f_locals
    args, kwargs = seen.get("args"), seen.get("kwargs")
    return (args, kwargs) if isinstance(args, tuple) and isinstance(kwargs, dict) else None


# ---- parametrizations ----------------------------------------------------------------------------------------
# Nothing public tells whether it is within `parametrize.cached()`, or leaves that for a while.


def parametrizations_are_cached() -> bool:
    """Whether it is within `torch.nn.utils.parametrize.cached()`."""
    return bool(parametrize._cache_enabled)


@contextlib.contextmanager
def parametrizations_uncached() -> Iterator[None]:
    """Context in which it is not: every read computes the tensor, and none finds that of a read outside."""
    enabled, held = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = enabled, held
