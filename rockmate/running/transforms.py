"""Function transforms and forward-mode differentiation: what planned steps do not run under."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from rockmate.errors import TransformError


def refuse_transforms(module: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Raise `TransformError` within a transform of `torch.func`, or where one of `tensors` carries a tangent.

    A plan keeps handles in place of saved tensors; within these, PyTorch saves tensors that handles cannot stand for.
    """
    functorch: Any = torch._C._functorch
    reason = None
    if functorch.peek_interpreter_stack() is not None:
        reason = "within a transform of torch.func (grad, vjp, jvp, vmap, jacrev, hessian, …)"
    elif forward_ad._current_level >= 0:  # the tensors of a level are only known while there is one
        held = (*tensors, *module.parameters(), *module.buffers())
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in held):
            reason = "on tensors with tangents, in forward-mode differentiation"
    if reason is not None:
        raise TransformError(
            f"{type(module).__name__} is planned, and was called {reason}: planned steps cannot be differentiated so. "
            "Call model.original there, or use torch.autograd.grad, with torch.func.functional_call if you like: both "
            "work on planned modules."
        )
