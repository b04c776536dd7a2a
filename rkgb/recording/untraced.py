"""In the middle of a trace, run something as if nobody traced: compiled code looks for tracers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rkgb.recording.custom_functions import applied_by
from rkgb.torch_private.modes import function_modes, pop_function_mode, push_function_mode, without_dispatch_modes
from rkgb.torch_private.modules import hooks_after_calls, hooks_always_called, hooks_before_calls
from rkgb.torch_private.tracers import plain_is_tracing, unseen_by_jit

_ENTER = torch.autograd.graph.saved_tensors_hooks.__enter__
_OURS = "rkgb."


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Meanwhile no mode, hook or patch of a tracer is there. What packs saved tensors stays."""
    with (
        without_dispatch_modes(),
        _function_modes_away(),
        _module_hooks_away(),
        _patches_away(),
        unseen_by_jit(),
    ):
        yield


@contextlib.contextmanager
def _function_modes_away() -> Iterator[None]:
    stack = function_modes()
    _replace_function_modes([mode for mode in stack if not _is_ours(type(mode))])
    try:
        yield
    finally:
        _replace_function_modes(stack)


def _replace_function_modes(stack: list[Any]) -> None:
    for _ in function_modes():
        pop_function_mode()
    for mode in stack:
        push_function_mode(mode)


@contextlib.contextmanager
def _module_hooks_away() -> Iterator[None]:
    tables = [hooks_before_calls, hooks_after_calls, hooks_always_called]
    before = [dict(table) for table in tables]
    ours = {key for table in before[:2] for key, hook in table.items() if _is_ours(hook)}
    for table in tables:
        for key in ours & table.keys():
            del table[key]
    try:
        yield
    finally:
        for table, earlier in zip(tables, before, strict=True):
            table.clear()
            table.update(earlier)


@contextlib.contextmanager
def _patches_away() -> Iterator[None]:
    packing: Any = torch.autograd.graph.saved_tensors_hooks
    enter = packing.__enter__
    packing.__enter__ = _ENTER
    try:
        with plain_is_tracing(), applied_by(None):
            yield
    finally:
        packing.__enter__ = enter


def _is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(_OURS)
