"""Hooks of saved tensors, and dispatch modes, that `torch.compile` leaves alone.

Hooks run where compiled submodules run, and in the backward of a compiled training step: what autograd calls there is
compiled, too. `torch.compiler.disable` prevents that by code around each call, which takes longer than most hooks do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from rkgb.torch_private.modes import TorchDispatchMode
from rkgb.torch_private.tracers import disable_compiler, mark_uncompiled, skip_code

P = ParamSpec("P")
R = TypeVar("R")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which is not compiled when autograd calls it, nor what it calls. Decorates a Python function."""
    return function if skip_code(function) else disable_compiler(function)


def called_as_one(function: Callable[P, R], reason: str) -> Callable[P, R]:
    """`function`, never compiled; a compiled function ends its graph where it calls it. `reason` is why it may not."""
    mark_uncompiled(function, reason)
    return never_compiled(function)


class DispatchMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is not compiled, nor what it calls.

    PyTorch would see to that by code around each call, and would load its compiler for it at the first one: a second of
    the first plan.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in cls.__dict__:
            cls.__torch_dispatch__ = never_compiled(cls.__dict__["__torch_dispatch__"])  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: within other modes, PyTorch up to 2.11 leaves what is to be compiled as it is, and for good."""
        return True
