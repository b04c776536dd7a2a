"""Where PyTorch calls custom autograd functions, and other code in its place for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rkgb.torch_private.autograd import FunctionBase, SingleLevelFunction

_PLAIN: Any = FunctionBase.__dict__["apply"]
# `Function.apply` was written in Python and called that of its base, where an `apply` that a module bound at import is
# met too. From torch 2.14 on it is the base's own: what was bound at import goes past every patch, runs operation by
# operation when it is traced, and is refused by the replay check where its backward is another one.
_HOLDER: Any = torch.autograd.Function if torch.autograd.Function.__dict__["apply"] is _PLAIN else SingleLevelFunction
_ORIGINAL: Any = _HOLDER.__dict__.get("apply")


def plain_apply(cls: Any) -> Callable[..., Any]:
    """What applies the custom function `cls`, whatever stands in its place."""
    found: Callable[..., Any] = _PLAIN.__get__(None, cls)
    return found


@contextlib.contextmanager
def applied_by(apply: Callable[..., Any] | None) -> Iterator[None]:
    """Meanwhile ``apply(cls, *args, **kwargs)`` is called for each custom function; for None, PyTorch's own code."""
    before = _HOLDER.__dict__.get("apply")
    _put(_ORIGINAL if apply is None else classmethod(apply))
    try:
        yield
    finally:
        _put(before)


def _put(entry: Any) -> None:
    if entry is not None:
        _HOLDER.apply = entry
    elif "apply" in _HOLDER.__dict__:
        del _HOLDER.apply
