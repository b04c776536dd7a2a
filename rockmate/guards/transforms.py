"""What planned steps do not run under: transforms, forward-mode differentiation, modes that see Python's functions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from rkgb.torch_private.modes import (
    DefaultDevice,
    SavedTensorsMayChange,
    dispatch_mode_count,
    dispatch_modes,
    function_modes,
    function_modes_are_on,
    innermost_transform,
    is_in_forward_mode,
)
from rkgb.torch_private.modules import parametrizations_are_cached
from rockmate.errors import TransformError


def refuse_transforms(module: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Raise `TransformError` within a transform of `torch.func`, or where one of `tensors` carries a tangent.

    A plan keeps handles in place of saved tensors; within these, PyTorch saves tensors that handles cannot stand for.
    """
    reason = None
    if innermost_transform() is not None:
        reason = "within a transform of torch.func (grad, vjp, jvp, vmap, jacrev, hessian, …)"
    elif is_in_forward_mode():  # the tensors of a level are only known while there is one
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
    if function_modes_are_on():
        found = next((type(mode).__name__ for mode in function_modes() if not isinstance(mode, DefaultDevice)), None)
        if found is not None:
            return (
                f"{found}, a TorchFunctionMode, is around the call, which may change what the functions that the "
                "model calls give, and a plan calls others"
            )
    if dispatch_mode_count() and any(isinstance(mode, SavedTensorsMayChange) for mode in dispatch_modes()):
        return (
            "allow_mutation_on_saved_tensors() is around the call, and what a plan recomputes from must not change "
            "before the backward"
        )
    if parametrizations_are_cached() and any(parametrize.is_parametrized(part) for part in module.modules()):
        return (
            "parametrize.cached() is around the call, within which the model computes its parametrized tensors once, "
            "and a plan in every call"
        )
    return None
