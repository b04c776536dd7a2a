"""`torch.jit.trace`, `torch.export` and `torch.compile`: whether they are at work, and what they leave alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
import torch.jit._trace
from torch._compile import _disable_dynamo

_C: Any = torch._C

# ---- torch.jit.trace -------------------------------------------------------------------------------------------

TracerWarning = torch.jit._trace.TracerWarning
"""The class of its warnings, which `torch.jit` has, too, without offering it."""

IS_TRACING: tuple[Any, str] = (_C, "_is_tracing")
"""Holder and name of the function that tells whether it is at work. `torch.jit.is_tracing` asks it, too."""

_PLAIN_IS_TRACING = _C._is_tracing


def is_tracing() -> bool:
    """Whether it is at work, by the function that stands there now. `torch.jit.is_tracing` asks for scripting first."""
    return bool(_C._is_tracing())


@contextlib.contextmanager
def plain_is_tracing() -> Iterator[None]:
    """Context in which PyTorch's own function tells, whatever was in its place."""
    before = _C._is_tracing
    _C._is_tracing = _PLAIN_IS_TRACING
    try:
        yield
    finally:
        _C._is_tracing = before


@contextlib.contextmanager
def unseen_by_jit() -> Iterator[None]:
    """Context in which it records nothing."""
    state = _C._get_tracing_state()
    _C._set_tracing_state(None)
    try:
        yield
    finally:
        _C._set_tracing_state(state)


_NAMES_BY_FRAME = torch.jit._trace._create_interpreter_name_lookup_fn


@contextlib.contextmanager
def unnamed_by_jit() -> Iterator[None]:
    """Context in which it does not look through the variables of each frame for what it might call a value.

    That takes a twentieth of a trace, and nobody reads these names. One thread may end what another goes on with, which
    then has names as before.
    """
    torch.jit._trace._create_interpreter_name_lookup_fn = lambda frames_up=1: lambda value: ""
    try:
        yield
    finally:
        torch.jit._trace._create_interpreter_name_lookup_fn = _NAMES_BY_FRAME


def modules_told_by_jit() -> MutableMapping[Any, str]:
    """Within it: the modules whose calls it notes, with their paths. What is taken out is not noted."""
    told: MutableMapping[Any, str] | None = torch.jit._trace._trace_module_map
    return {} if told is None else told


# ---- torch.export ----------------------------------------------------------------------------------------------


def is_exporting() -> bool:
    """Whether it is at work.

    The compiler of PyTorch up to 2.11 takes `torch.compiler.is_exporting()` for true, whoever asks: this is its flag.
    """
    return torch.compiler._is_exporting_flag


def as_constant(function: Callable[..., Any]) -> None:
    """Have what `function` does be no part of what is recorded: it is called once, by the tracer.

    `torch.compiler.assume_constant_result` does so, and imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- torch.compile ---------------------------------------------------------------------------------------------

disable_compiler: Callable[..., Any] = _disable_dynamo
"""A function that calls the one given, uncompiled: at the first call it imports the compiler, not before, as
`torch.compiler.disable` does."""


def skip_code(function: Callable[..., Any]) -> bool:
    """Have the compiler never look at the code of `function`, nor at what that calls; returns whether this PyTorch can.

    Those from 2.9 on can. What is public puts code around it instead, which takes longer than most of what is skipped.
    """
    frames = _C._dynamo.eval_frame
    if not all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        return False
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return True


def mark_uncompiled(function: Callable[..., Any], reason: str) -> None:
    """Have compiled functions end their graph where they call `function`, for this `reason`.

    As `torch.compiler.disable` does, which imports the compiler.
    """
    marks = {"": True, "_msg": reason, "_recursive": True}
    for end, value in marks.items():
        setattr(function, f"_torchdynamo_disable{end}", value)


def compiler_is_imported() -> bool:
    """Whether anybody has: where nobody has, nothing is compiled."""
    return "torch._dynamo" in sys.modules


def compiled_wrappers() -> tuple[type, ...]:
    """The class of what `torch.compile` makes of a module; none while the compiler is not imported.

    Looked up, and not imported, which takes seconds.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return () if dynamo is None else (dynamo.OptimizedModule,)
