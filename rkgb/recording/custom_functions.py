"""Where PyTorch calls custom autograd functions, and other code in its place for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionMeta

from rkgb.torch_private.autograd import FunctionBase, SingleLevelFunction

_PLAIN: Any = FunctionBase.__dict__["apply"]
# `Function.apply` was written in Python and called that of its base, where an `apply` that a module bound at import is
# met too. From torch 2.14 on it is the base's own, and what was bound at import goes past every patch of it.
_IS_PLAIN = torch.autograd.Function.__dict__["apply"] is _PLAIN
_HOLDER: Any = torch.autograd.Function if _IS_PLAIN else SingleLevelFunction
_ORIGINAL: Any = _HOLDER.__dict__.get("apply")
_META: Any = FunctionMeta
_LOOKS = "__getattribute__"


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


# ---- what goes past every patch ----------------------------------------------------------------------------

# Of a custom function, how it is called: its class, what computes it, its arguments, and whether gradients are on.
RunForward = Callable[[Any, Callable[..., Any], tuple[Any, ...], bool], Any]
Inside = Callable[[], contextlib.AbstractContextManager[Any]]


class _Forward(threading.local):
    """What PyTorch is about to call, in each thread."""

    applied: Any = None  # the class whose `apply` has begun
    grad_enabled = False  # where that was called: within, gradients are off
    computed: Any = None  # the class whose forward has run, and whose context may be set up next


@contextlib.contextmanager
def bound_run_by(run: RunForward, inside: Inside) -> Iterator[None]:
    """Meanwhile ``run`` is called for the forward of each custom function, however its `apply` was come by.

    What sets up its context runs within ``inside()``. Without effect where `applied_by` meets all.
    """
    if not _IS_PLAIN:
        yield
        return
    state = _Forward()

    def looked_up(cls: Any, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        # `apply` looks these up one after the other; who looks up a forward alone, calls it as any function.
        if name == "_backward_cls" and issubclass(cls, torch.autograd.Function):
            state.applied, state.grad_enabled, state.computed = cls, torch.is_grad_enabled(), None
        elif name == "forward" and state.applied is cls:
            state.applied = None
            return lambda *args: computed(cls, found, args, state.grad_enabled)
        elif name == "setup_context":  # also the first of all
            is_next, state.applied, state.computed = state.computed is cls, None, None
            return (lambda *args, **kwargs: _within(inside, found, args, kwargs)) if is_next else found
        return found

    def computed(cls: Any, forward: Any, args: tuple[Any, ...], grad_enabled: bool) -> Any:
        result = run(cls, forward, args, grad_enabled)
        # Of others it is not looked up after the forward, but before the next one.
        state.computed = cls if _sets_up_apart(cls) else None
        return result

    before = _META.__dict__.get(_LOOKS)
    _META.__getattribute__ = looked_up
    try:
        yield
    finally:
        if before is None:
            del _META.__getattribute__
        else:
            _META.__getattribute__ = before


def _sets_up_apart(cls: Any) -> bool:
    """Whether its context is set up by a function of its own, after the forward."""
    own, base = (type.__getattribute__(one, "setup_context") for one in (cls, torch.autograd.Function))
    return own is not base


def _within(inside: Inside, function: Any, args: Any, kwargs: Any) -> Any:
    with inside():
        return function(*args, **kwargs)


def given_to(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a custom function among those of its forward, which may be given a context before them."""
    return args[1:] if args and isinstance(args[0], BackwardCFunction) else args


def outputs_apart(result: Any, args: tuple[Any, ...], versions: list[int]) -> Any:
    """The `result` of a forward, in which arguments that are returned as they came are views of them.

    PyTorch makes such views itself, where all are seen that are made. `versions` are those of the arguments before.
    """
    unwritten = {id(arg) for arg, version in zip(args, versions, strict=True) if version == version_of(arg) >= 0}

    def apart(output: Any) -> Any:
        return output.view_as(output) if id(output) in unwritten else output

    return tuple(map(apart, result)) if isinstance(result, tuple) else apart(result)


def version_of(arg: Any) -> int:
    """How often a tensor was written; -1 of what is none, or does not tell."""
    return arg._version if isinstance(arg, torch.Tensor) and not arg.is_inference() else -1
