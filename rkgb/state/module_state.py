"""Borrow a user's module and give it back as it was: buffers, random streams, modes, gradients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from rkgb.devices.registry import KINDS, device_of, host
from rkgb.process.surroundings import surroundings_aside
from rkgb.process.turns import TURNS
from rkgb.process.uncompiled import never_compiled
from rkgb.state.attributes import attributes_of, enclosed_in
from rkgb.state.generators import OwnGenerator, generators_for
from rkgb.state.other_random import other_random_states_kept
from rkgb.state.side_effects import attributes_kept
from rkgb.torch_private.autograd import set_versions
from rkgb.tree import is_tensor


def random_states(devices: set[torch.device]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The state of the host's generator and of those of the accelerators among `devices`."""
    generators = dict.fromkeys([host().generator, *(device_of(device).generator for device in devices)])
    return [(generator, generator.get_state()) for generator in generators]


def seed_default_streams(seed: int) -> None:
    """Seed the default generators that there are."""
    for kind in KINDS.values():
        kind.seed(seed)


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """Where a computation mainly is: the first of its devices that is an accelerator, if there is one."""
    accelerators = (device for device in devices if device_of(device).is_supported and not device_of(device).is_host)
    return next(accelerators, host().device)


def module_devices(module: torch.nn.Module, tensors: Iterable[torch.Tensor] = ()) -> set[torch.device]:
    """Devices on which the module has parameters or buffers, and those of other tensors, such as a sample's."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers(), *tensors)}


@never_compiled  # compiled submodules call it as they run: it is no part of them
def _dropped(_: object) -> None:
    """In the place of a saved tensor."""


def never_unpacked(_: object) -> torch.Tensor:
    """In the place of what gives a saved tensor back, in a graph that nobody walks."""
    raise AssertionError("no backward runs through what was run to be looked at")


def nothing_packed(
    unpack: Callable[[Any], torch.Tensor] = never_unpacked,
) -> torch.autograd.graph.saved_tensors_hooks:
    """Context in which autograd saves nothing; `unpack` is to raise where a backward runs all the same."""
    return torch.autograd.graph.saved_tensors_hooks(_dropped, unpack)


_FRAMES = 12  # of Python's stack that a traced call of a module takes beyond a plain one, at most


@contextlib.contextmanager
def module_state_kept(
    module: torch.nn.Module, devices: set[torch.device] | None = None, own: Iterable[OwnGenerator] = ()
) -> Iterator[None]:
    """Run code on `module` that leaves its buffers, gradients, attributes and the random streams as they were.

    Gradients are set aside, so that inside the block every parameter's ``.grad`` starts as None. Of the generators
    of the user's own, those of `own` are given back: a graph has them as `generators`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(TURNS.planning(module))  # the streams are the process's
        torch.clear_autocast_cache()  # of weights cast in runs that are not this one's
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
    with _gradients_aside(module.parameters()), _places_kept(module):
        yield


@contextlib.contextmanager
def gradients_elsewhere_kept(module: torch.nn.Module) -> Iterator[None]:
    """Give back the gradients of parameters that are none of the module's, but that its functions enclose."""
    enclosed = enclosed_in(module)
    tensors = [value for value in enclosed if is_tensor(value) and value.is_leaf]
    tensors += [one for value in enclosed if isinstance(value, torch.nn.Module) for one in value.parameters()]
    with _gradients_aside(tensors):
        yield


@contextlib.contextmanager
def _gradients_aside(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    gradients = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient


class BufferValues:
    """What buffers hold, to be given back: a graph that has saved one finds it as it was, at the same version."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._values = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._counted = tuple(buffer for buffer, _ in self._values if not buffer.is_inference())
        self._versions = tuple(buffer._version for buffer in self._counted)

    def give_back(self) -> None:
        """Let all of them hold what they held."""
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        set_versions(self._counted, self._versions)


@contextlib.contextmanager
def _places_kept(module: torch.nn.Module) -> Iterator[None]:
    """Give back which buffers and parameters there are, the buffers' values and gradients, and what requires them."""
    # A forward may put other tensors in the places of buffers: the places are restored, then the values.
    # Of scripted submodules, the places are fixed.
    plain = [submodule for submodule in module.modules() if not isinstance(submodule, torch.jit.ScriptModule)]
    places: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for part in plain for held in (part._parameters, part._buffers, part._modules)
    ]
    unsaved = [(part._non_persistent_buffers_set, set(part._non_persistent_buffers_set)) for part in plain]
    buffers = [(buffer, buffer.grad) for buffer in module.buffers()]
    values = BufferValues(buffer for buffer, _ in buffers)
    flags = [(t, t.requires_grad) for t in (*module.parameters(), *module.buffers()) if t.is_leaf]
    try:
        yield
    finally:
        for place, registered in places:
            if place.keys() != registered.keys() or any(place[name] is not registered[name] for name in place):
                place.clear()
                place.update(registered)
        for names, earlier in unsaved:
            names.clear()
            names.update(earlier)
        values.give_back()
        for tensor, flag in flags:
            if tensor.requires_grad is not flag and tensor.is_leaf:
                tensor.requires_grad_(flag)
        for buffer, gradient in buffers:
            if buffer.is_leaf and buffer.grad is not gradient:
                buffer.grad = gradient


@contextlib.contextmanager
def state_kept(module: torch.nn.Module, devices: set[torch.device] | None = None) -> Iterator[None]:
    """Give back what calls change of `module`: attributes, hooks, random streams, and all but the values of parameters.

    As `module_state_kept`, but gradients stay where they are: whether they are there is part of what a plan is for.
    """
    torch.clear_autocast_cache()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(other_random_states_kept())
        stack.enter_context(attributes_kept(module))
        stack.enter_context(TURNS.planning(module))
        stack.enter_context(_streams_kept(module, devices, ()))
        stack.enter_context(_places_kept(module))
        yield


ROOT_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Where a module keeps hooks on calls of itself."""


@contextlib.contextmanager
def root_hooks_aside(module: torch.nn.Module) -> Iterator[None]:
    """Let calls of `module` fire none of the hooks on itself: those belong around whatever is planned."""
    held = {name: getattr(module, name) for name in ROOT_HOOKS}
    vars(module).update({name: type(hooks)() for name, hooks in held.items()})
    try:
        yield
    finally:
        vars(module).update(held)


@contextlib.contextmanager
def shadow_parameters(module: torch.nn.Module, copied: bool = False) -> Iterator[None]:
    """Let `module` hold other parameters of the same storages, or `copied` ones, while it runs for nobody's training.

    No hook fires then that someone has put on a parameter: DDP's, that of an optimizer which steps in the backward,
    the user's own. Lists of parameters in attributes, such as those of `torch.nn.LSTM`, hold the others, too.
    """
    shadows: dict[int, torch.Tensor] = {}
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    places: list[tuple[dict[str, Any], str, Any]] = []
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                shadows.setdefault(id(parameter), _shadow(parameter, copied))
                places.append((submodule._parameters, name, parameter))
        places += [(vars(submodule), name, held) for name, held in attributes_of(submodule).items()]
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for place, name, held in places:
            shadowed = _with_shadows(held, shadows)
            if shadowed is not held:
                replaced.append((place, name, held))
                place[name] = shadowed
        yield
    finally:
        for place, name, held in replaced:
            if name in place:
                place[name] = held
        for parameter, gradient in gradients:
            parameter.grad = gradient  # of one that forward finds by another way


def _shadow(parameter: torch.Tensor, copied: bool) -> torch.Tensor:
    value = parameter.detach()
    shadow = torch.nn.Parameter(value.clone() if copied else value, parameter.requires_grad)
    shadow.grad = parameter.grad
    shadow.__dict__.update(parameter.__dict__)
    return shadow


def _with_shadows(held: Any, shadows: dict[int, torch.Tensor]) -> Any:
    """A parameter's shadow, and a list or tuple of parameters with their shadows; anything else as it is."""
    if isinstance(held, torch.Tensor):
        return shadows.get(id(held), held)
    if type(held) in (list, tuple) and any(id(item) in shadows for item in held):
        return type(held)(shadows.get(id(item), item) for item in held)
    return held


@contextlib.contextmanager
def for_planning(module: torch.nn.Module) -> Iterator[None]:
    """`module` in training mode, its runs unseen by hooks on its parameters and on itself, and by what is around."""
    with (
        TURNS.planning(module),
        room_for_calls(module),
        surroundings_aside(),
        _around_planning(module),
        torch.inference_mode(mode=False),  # a plan may be made ahead in the middle of an evaluation
        training_mode(module),
        shadow_parameters(module),
        root_hooks_aside(module),
        torch.enable_grad(),
    ):
        yield


@contextlib.contextmanager
def _around_planning(module: torch.nn.Module) -> Iterator[None]:
    """What the devices of `module` need around all that planning runs."""
    with contextlib.ExitStack() as stack:
        for device in module_devices(module):
            stack.enter_context(device_of(device).around_planning())
        yield


@contextlib.contextmanager
def room_for_calls(module: torch.nn.Module) -> Iterator[None]:
    """More of Python's stack where modules are nested deeply: a traced call takes more frames of it than others."""
    before = sys.getrecursionlimit()
    depth = max((path.count(".") for path, _ in module.named_modules()), default=0)
    sys.setrecursionlimit(before + _FRAMES * depth)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextlib.contextmanager
def training_mode(module: torch.nn.Module) -> Iterator[None]:
    """Put `module` in training mode if its root is not, and every submodule back afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        if not module.training:
            module.train()
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode
