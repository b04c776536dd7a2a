"""Hooks of saved tensors that `torch.compile` leaves alone.

Hooks run where compiled submodules run, and in the backward of a compiled training step: what autograd calls there is
compiled, too. `torch.compiler.disable` prevents that by code around each call, which takes longer than most hooks do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def never_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which is not compiled when autograd calls it, nor what it calls. Decorates a Python function."""
    frames = torch._C._dynamo.eval_frame
    if not all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        return _disable_dynamo(function)
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
