"""The weights of a module in another memory format, in place: the parameters stay, their values lie in another order.

PyTorch's convolutions compute in channels_last where their weight or their input lies so, and what follows them takes
the layout of its inputs. So it is the weights that decide: the module itself, evaluation, and calls without a plan run
in the same layout as the plan does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from rkgb.devices.registry import device_of

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: the format with channels last."""

Strides = tuple[int, ...]
_Change = tuple[torch.nn.Parameter, Strides]

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


def lay_out(module: torch.nn.Module, paths: Iterable[str]) -> None:
    """Have these parameters in channels_last, as far as they may change."""
    _put_all(_to_lay_out(module, paths))


def give_back(module: torch.nn.Module) -> None:
    """Have all parameters of `module` as they were before `lay_out`."""
    _put_all(_to_give_back(module))


@contextlib.contextmanager
def layout_kept(module: torch.nn.Module) -> Iterator[None]:
    """Context after which the parameters of `module` lie as they did before it."""
    before = laid_out(module)
    try:
        yield
    finally:
        give_back(module)
        lay_out(module, before)


def lies_so(module: torch.nn.Module, paths: Iterable[str]) -> bool:
    """Whether these parameters are in channels_last, or all as they were given if there are no paths."""
    paths = tuple(paths)
    return not (_to_lay_out(module, paths) if paths else _to_give_back(module))


def _to_lay_out(module: torch.nn.Module, paths: Iterable[str]) -> list[_Change]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    there = {id(parameters[path]): parameters[path] for path in paths if path in parameters}
    wanted = ((one, channels_last_strides(one.shape)) for one in there.values() if may_change(one))
    return [(parameter, strides) for parameter, strides in wanted if parameter.stride() != strides]


def _to_give_back(module: torch.nn.Module) -> list[_Change]:
    wanted = ((parameter, _GIVEN.get(parameter, parameter.stride())) for parameter in module.parameters())
    return [(one, strides) for one, strides in wanted if one.stride() != strides and may_change(one)]


def _put_all(changes: list[_Change]) -> None:
    for parameter, strides in changes:
        _GIVEN.setdefault(parameter, parameter.stride())
        _put(parameter, strides)
    if changes:
        torch.clear_autocast_cache()  # of copies that lie as the weights did
        _follow_in_optimizers()


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
    if tensor.layout is not torch.strided or tensor.is_meta or tensor._base is not None:
        return False
    if device_of(tensor.device).is_host and tensor.is_shared():  # PyTorch says so of all tensors of other devices
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
