"""Borrow a user's module and give it back as it was: buffers, random streams, modes, gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from rkgb.tracing.generators import OwnGenerator, generators_for
from rkgb.tracing.side_effects import attributes_kept, other_random_states_kept


def random_states(devices: set[torch.device]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The state of the CPU's generator and of those of the CUDA devices among `devices`."""
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[device.index or 0] for device in devices if device.type == "cuda"]
    return [(generator, generator.get_state()) for generator in generators]


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """Where a computation mainly is: the first of its devices that is no CPU, if there is one."""
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def module_devices(module: torch.nn.Module, tensors: Iterable[torch.Tensor] = ()) -> set[torch.device]:
    """Devices on which the module has parameters or buffers, and those of other tensors, such as a sample's."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers(), *tensors)}


def autocast_in_force(devices: set[torch.device]) -> tuple[tuple[str, torch.dtype], ...]:
    """Device types, of those among `devices`, for which autocast is on now, and what it casts to."""
    kinds = sorted({device.type for device in devices})
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Run operations below autocast, whose casts were recorded as operations of their own."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def borrowed(
    module: torch.nn.Module, devices: set[torch.device] | None = None, own: Iterable[OwnGenerator] = ()
) -> Iterator[None]:
    """Run code on `module` that leaves its buffers, gradients, attributes and the random streams as they were.

    Gradients are set aside, so that inside the block every parameter's ``.grad`` starts as None. Of the generators
    of the user's own, those of `own` are given back: a graph has them as `generators`.
    """
    torch.clear_autocast_cache()  # of weights cast in runs that are not this one's
    with contextlib.ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(other_random_states_kept())
        stack.enter_context(attributes_kept(module))
        stack.enter_context(_streams_kept(module, devices, own))
        stack.enter_context(_tensors_kept(module))
        yield


@contextlib.contextmanager
def _streams_kept(
    module: torch.nn.Module, devices: set[torch.device] | None, own: Iterable[OwnGenerator]
) -> Iterator[None]:
    states = random_states(devices if devices is not None else module_devices(module))
    states += [(generator, generator.get_state()) for generator in generators_for(module, own)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextlib.contextmanager
def _tensors_kept(module: torch.nn.Module) -> Iterator[None]:
    # A forward may put other tensors in the places of buffers: the places are restored, then the values.
    places = [(submodule._buffers, dict(submodule._buffers)) for submodule in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for place, registered in places:
            place.clear()
            place.update(registered)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def training_mode(module: torch.nn.Module) -> Iterator[None]:
    """Put `module` in training mode if its root is not, and every submodule back afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode
