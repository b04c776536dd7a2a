"""`torch.jit.trace`, `torch.export` and `torch.compile`: whether they are at work, and what they leave alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.jit._state
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


def graph_of_method(traced: Any, name: str = "forward") -> Any:
    """What was traced of a module's calls: a graph, in which calls of its submodules are one node each.

    `inlined_graph` has these calls in full, and PyTorch keeps the copies that it is made of for ever.
    """
    return traced._c._get_method(name).graph


def graph_of_function(call: Any) -> Any:
    """What a function of `torch.jit.script` does that this node of a graph calls; None where it is not to be found.

    What that calls is there in full, and what is decided by constants is decided, as in PyTorch's `inlined_graph`.
    """
    function: Any = torch.jit._state._python_cu.find_function(next(iter(call.inputs())).type().annotation_str)
    if function is None:
        return None
    graph = function.inlined_graph
    _C._jit_pass_peephole(graph)
    _C._jit_pass_constant_propagation_immutable_types(graph)
    _C._jit_pass_constant_pooling(graph)
    return graph


def let_go_of_graphs(traced: Any, module: torch.nn.Module) -> None:
    """Empty the graphs of what it made of `module` and its submodules: they stay as long as the process does.

    Otherwise so do the tensors that are constants there, and the functions that are called with all that these hold.
    Submodules that `torch.jit` had compiled before are the caller's, and left alone.
    """
    own = [
        path for path, one in module.named_modules(remove_duplicate=False) if isinstance(one, torch.jit.ScriptModule)
    ]
    for path, made in traced.named_modules():
        if any(f"{path}.".startswith(f"{theirs}.") for theirs in own):
            continue
        for name in made._c._method_names():
            graph = graph_of_method(made, name)
            for _ in list(graph.outputs()):
                graph.eraseOutput(0)
            for node in reversed(list(graph.nodes())):
                node.destroy()


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
