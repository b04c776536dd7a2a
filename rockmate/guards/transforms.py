"""What planned steps do not run under: transforms, forward-mode differentiation, modes that see Python's functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

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


def reason_to_run_unplanned(module: torch.nn.Module) -> str | None:
    """Why what is around this call has it run by the module itself, in words; None where a plan may run it.

    Within these contexts a planned step would run, but not do what the module's own does.
    """
    if torch._C._is_torch_function_mode_enabled():
        modes = (torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack()))
        found = next((type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)), None)
        if found is not None:
            return (
                f"{found}, a TorchFunctionMode, is around the call, which may change what the functions that the "
                "model calls give, and a plan calls others"
            )
    if torch._C._len_torch_dispatch_stack():
        dispatch = (torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack()))
        if any(isinstance(mode, _CloneArgBeforeMutateMode) for mode in dispatch):
            return (
                "allow_mutation_on_saved_tensors() is around the call, and what a plan recomputes from must not change "
                "before the backward"
            )
    if parametrize._cache_enabled and any(parametrize.is_parametrized(part) for part in module.modules()):
        return (
            "parametrize.cached() is around the call, within which the model computes its parametrized tensors once, "
            "and a plan in every call"
        )
    return None
