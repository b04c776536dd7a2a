"""A module in the data type in which FSDP will compute it, while it is planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rkgb.tree import is_tensor, map_leaves


@contextlib.contextmanager
def computed_as(model: nn.Module, policy: Any) -> Iterator[None]:
    """Parameters are those that FSDP gathers under `policy`, a `MixedPrecisionPolicy` or None; afterwards, as before.

    Buffers are left alone, as FSDP does.
    """
    dtype = None if policy is None else policy.param_dtype
    if dtype is None:
        yield
        return
    casts: dict[int, nn.Parameter] = {}
    places: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter | None]]] = []
    for module in model.modules():
        places.append((module._parameters, dict(module._parameters)))
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in casts:
                casts[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            module._parameters[name] = casts[id(parameter)]
    try:
        yield
    finally:
        for place, registered in places:
            place.clear()
            place.update(registered)


@contextlib.contextmanager
def casting(modules: Iterable[nn.Module], policy: Any) -> Iterator[None]:
    """Inputs and outputs of `modules` are cast as FSDP will cast them under `policy`."""
    with contextlib.ExitStack() as stack:
        for module in modules if policy is not None else ():
            if policy.cast_forward_inputs and policy.param_dtype is not None:
                hook = _input_cast(policy.param_dtype)
                stack.enter_context(removed(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)))
            if policy.output_dtype is not None:
                stack.enter_context(removed(module.register_forward_hook(_output_cast(policy.output_dtype))))
        yield


@contextlib.contextmanager
def removed(handle: Any) -> Iterator[None]:
    """A hook, within this context."""
    try:
        yield
    finally:
        handle.remove()


def _input_cast(dtype: torch.dtype) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return hook


def _output_cast(dtype: torch.dtype) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return _cast(output, dtype)

    return hook


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_leaves(cast, tree, is_tensor)
