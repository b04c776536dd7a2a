"""In the middle of a trace, run something as if nobody traced: compiled code looks for tracers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from rkgb.recording.custom_functions import applied_by

_IS_TRACING = torch._C._is_tracing
_ENTER = torch.autograd.graph.saved_tensors_hooks.__enter__
_OURS = "rkgb."


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Meanwhile no mode, hook or patch of a tracer is there. What packs saved tensors stays."""
    with (
        _disable_current_modes(),
        _function_modes_away(),
        _module_hooks_away(),
        _patches_away(),
        jit_away(),
    ):
        yield


@contextlib.contextmanager
def _function_modes_away() -> Iterator[None]:
    stack = list(_get_current_function_mode_stack())
    _replace_function_modes([mode for mode in stack if not _is_ours(type(mode))])
    try:
        yield
    finally:
        _replace_function_modes(stack)


def _replace_function_modes(stack: list[Any]) -> None:
    for _ in range(len(_get_current_function_mode_stack())):
        _pop_mode()
    for mode in stack:
        _push_mode(mode)


@contextlib.contextmanager
def _module_hooks_away() -> Iterator[None]:
    tables: list[dict[int, Any]] = [
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_forward_hooks_always_called,
    ]
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
    enter, is_tracing = packing.__enter__, torch._C._is_tracing
    packing.__enter__, torch._C._is_tracing = _ENTER, _IS_TRACING
    try:
        with applied_by(None):
            yield
    finally:
        packing.__enter__, torch._C._is_tracing = enter, is_tracing


@contextlib.contextmanager
def jit_away() -> Iterator[None]:
    """Meanwhile ``torch.jit.trace`` records nothing."""
    bindings: Any = torch._C
    state = bindings._get_tracing_state()
    bindings._set_tracing_state(None)
    try:
        yield
    finally:
        bindings._set_tracing_state(state)


def _is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(_OURS)
