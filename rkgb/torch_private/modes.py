"""Modes around a call, transforms and levels of differentiation: which there are, and how to take them away.

Publicly modes are entered and left by `with`, one within the other, and nobody can ask which there are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.graph
from torch.autograd import forward_ad
from torch.utils import _device, _python_dispatch

_C: Any = torch._C

# ---- modes that see Python's functions ---------------------------------------------------------------------

function_modes_are_on: Callable[[], bool] = _C._is_torch_function_mode_enabled
"""Whether there is a `TorchFunctionMode` here that sees anything."""

push_function_mode: Callable[[Any], None] = _C._push_on_torch_function_stack
"""Make a mode the innermost one, without its `__enter__`."""

pop_function_mode: Callable[[], Any] = _C._pop_torch_function_stack
"""Take the innermost mode away, without its `__exit__`, and return it."""

DefaultDevice = _device.DeviceContext
"""The mode of `with torch.device(…)` and of `torch.set_default_device`."""


def function_modes() -> list[Any]:
    """All of this thread, the innermost last."""
    return [_C._get_function_stack_at(place) for place in range(_C._len_torch_function_stack())]


# ---- modes that see operations -----------------------------------------------------------------------------

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""What modes that see operations are made from. It is documented, and has no public name."""

dispatch_mode_count: Callable[[], int] = _C._len_torch_dispatch_stack
"""How many modes see the operations of this thread."""

without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
"""Context in which none of them is there."""

is_wrapper_subclass: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
"""Whether it is a tensor made of other tensors, which its class tells, such as a `DTensor`."""

SavedTensorsMayChange = torch.autograd.graph._CloneArgBeforeMutateMode
"""The mode of `torch.autograd.graph.allow_mutation_on_saved_tensors`."""


def dispatch_modes() -> list[Any]:
    """All of this thread, the innermost last."""
    return [_C._get_dispatch_stack_at(place) for place in range(_C._len_torch_dispatch_stack())]


# ---- transforms --------------------------------------------------------------------------------------------

innermost_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
"""The transform of `torch.func` that is at work here, such as that of `torch.func.grad`; None where there is none."""


def is_in_forward_mode() -> bool:
    """Whether it is within `torch.autograd.forward_ad.dual_level`, outside of which no tensor has a tangent."""
    return forward_ad._current_level >= 0
