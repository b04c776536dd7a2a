"""The weights of a module in another memory format, in place: the parameters stay, their values lie in another order.

PyTorch's convolutions compute in channels_last where their weight or their input lies so, and what follows them takes
the layout of its inputs. So it is the weights that decide: the module itself, evaluation, and calls without a plan run
in the same layout as the plan does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: the format with channels last."""

Strides = tuple[int, ...]

_GIVEN = WeakTensorKeyDictionary()  # strides of parameters before they were changed here


def channels_last_strides(shape: Iterable[int]) -> Strides:
    """Strides of a tensor of 4 or 5 dimensions in channels_last, whose batch and channels come first."""
    _, channels, *places = shape
    found, step = [0] * len(places), channels
    for place in reversed(range(len(places))):
        found[place] = step
        step *= places[place]
    return (step, 1, *found)


def may_change(parameter: torch.Tensor) -> bool:
    """Whether nobody else sees how it lies: a plain parameter of 4 or 5 dimensions with a storage of its own."""
    return (
        type(parameter) is torch.nn.Parameter
        and parameter.dim() in FORMATS
        and parameter.numel() > 0
        and _is_alone(parameter.data)
    )


def lay_out(module: torch.nn.Module, paths: Iterable[str]) -> bool:
    """Have these parameters in channels_last, as far as they may change. Whether one of them was not."""
    changed = False
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for path in paths:
        parameter = parameters.get(path)
        if parameter is None or not may_change(parameter):
            continue
        strides = channels_last_strides(parameter.shape)
        if parameter.stride() != strides:
            _GIVEN.setdefault(parameter, parameter.stride())
            _put(parameter, strides)
            changed = True
    if changed:
        torch.clear_autocast_cache()  # of copies that lie as the weights did
        _follow_in_optimizers()
    return changed


def give_back(module: torch.nn.Module) -> bool:
    """Have all parameters of `module` as they were before `lay_out`. Whether one of them was not."""
    changed = False
    for parameter in module.parameters():
        strides = _GIVEN.get(parameter)
        if strides is not None and parameter.stride() != strides and may_change(parameter):
            _put(parameter, strides)
            changed = True
    if changed:
        torch.clear_autocast_cache()
    return changed


def laid_out(module: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the parameters that lie otherwise than they were given."""
    return tuple(
        path
        for path, parameter in module.named_parameters()
        if _GIVEN.get(parameter, parameter.stride()) != parameter.stride()
    )


def _put(parameter: torch.nn.Parameter, strides: Strides) -> None:
    """The same values under other strides; its gradient follows, as autograd makes gradients that lie like it."""
    gradient = parameter.grad
    parameter.data = _in_strides(parameter.data, strides)
    if gradient is not None and type(gradient) is torch.Tensor and _is_alone(gradient):
        parameter.grad = _in_strides(gradient, strides)


def _in_strides(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all that is in its storage, in plain memory of this process."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor._base is not None or tensor.is_shared():
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


# ---- optimizers --------------------------------------------------------------------------------------------

_FOLLOWING: list[Any] = []


def _follow_in_optimizers() -> None:
    """See to it that states lie like their parameters, before each step: fused steps of PyTorch take them by address.

    An optimizer may have been there before the layout changed, or may have loaded what was saved in another.
    """
    if not _FOLLOWING:
        _FOLLOWING.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, torch.nn.Parameter) and parameter.dim() in FORMATS and parameter in _GIVEN:
            _follow(parameter, state)


def _follow(parameter: torch.nn.Parameter, state: Any) -> None:
    if not isinstance(state, Mapping):
        return
    strides = parameter.stride()
    for name, held in state.items():
        if type(held) is torch.Tensor and held.shape == parameter.shape and held.stride() != strides:
            state[name] = _in_strides(held, strides)  # type: ignore[index]
