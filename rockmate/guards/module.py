"""What a plan takes for granted of a module: its parts, their modes, and the kinds of its parameters and buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rkgb.state.side_effects import is_torchs_own
from rockmate.errors import PlanMismatch

_ADVICE = "Put it back, or plan the module again."


class _Part(NamedTuple):
    """One submodule."""

    path: str
    kind: type
    training: bool
    hooks: tuple[Any, ...]  # what those on its forward compute is part of the plan; those on its backward are refused
    compiled: bool  # by `Module.compile`
    children: tuple[tuple[str, str], ...]  # by name, where each is first found: a submodule may be in several places


class _Kept(NamedTuple):
    """One parameter or buffer."""

    owner: str  # the path of its submodule
    name: str
    requires_grad: bool
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]
    first: int  # which of the parameters, or buffers, is the first that is this very tensor: tied ones are one

    @property
    def path(self) -> str:
        """Its name in the whole module."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


class ModuleTraits(NamedTuple):
    """Equal for modules that one plan holds for, such as a module and its copy."""

    # Read at every call: plain tuples, which take half the time of named ones.
    parts: tuple[tuple[Any, ...], ...]  # each a `_Part`
    parameters: tuple[tuple[Any, ...], ...]  # each a `_Kept`
    buffers: tuple[tuple[Any, ...], ...]  # as above

    def mismatch(self, planned: ModuleTraits) -> PlanMismatch | None:
        """How a module with these traits differs from the one that was `planned`; None where it does not."""
        if self == planned:
            return None
        return PlanMismatch(self._first_difference(planned))

    def _first_difference(self, planned: ModuleTraits) -> str:
        for part, before in zip(self.parts, planned.parts, strict=False):
            if part != before:
                return _part_difference(_Part(*part), _Part(*before))
        for kept, before_kept in zip(self.parameters, planned.parameters, strict=False):
            if kept != before_kept:
                return _kept_difference(_Kept(*kept), _Kept(*before_kept))
        for kept, before_kept in zip(self.buffers, planned.buffers, strict=False):
            if kept != before_kept:
                return _kept_difference(_Kept(*kept), _Kept(*before_kept))
        return f"the module has {_counts(self)}, but had {_counts(planned)} when it was planned. {_ADVICE}"


def _counts(traits: ModuleTraits) -> str:
    return f"{len(traits.parts)} submodules, {len(traits.parameters)} parameters and {len(traits.buffers)} buffers"


def _part_difference(part: _Part, before: _Part) -> str:
    name = repr(part.path or "(root)")
    if part.path != before.path or part.kind is not before.kind:
        return (
            f"there is submodule {name}, a {part.kind.__name__}, where {before.path or '(root)'!r}, a "
            f"{before.kind.__name__}, was when the module was planned. {_ADVICE}"
        )
    if part.hooks != before.hooks:
        return (
            f"submodule {name} has {_hook_names(part)}, but {_hook_names(before)} when the module was planned: a plan "
            f"holds what hooks compute, and does not call them. {_ADVICE}"
        )
    if part.children != before.children:
        return (
            f"submodule {name} holds other submodules, or in other places, than when the module was planned. {_ADVICE}"
        )
    if part.compiled is not before.compiled:
        word = "is" if part.compiled else "is not"
        return f"submodule {name} {word} compiled now, unlike when the module was planned. {_ADVICE}"
    return (
        f"submodule {name} is in {'training' if part.training else 'eval'} mode, "
        f"but was not when the module was planned. {_ADVICE}"
    )


def _kept_difference(kept: _Kept, before: _Kept) -> str:
    if kept.path != before.path:
        return f"there is {kept.path!r} where {before.path!r} was when the module was planned. {_ADVICE}"
    if kept.requires_grad is not before.requires_grad:
        return (
            f"requires_grad of {kept.path!r} is {kept.requires_grad}, but was {before.requires_grad} when the module "
            f"was planned. {_ADVICE}"
        )
    if kept.first != before.first:
        return f"{kept.path!r} is tied to other parameters or buffers than when the module was planned. {_ADVICE}"
    return f"{kept.path!r} is {_described(kept)}, but was {_described(before)} when the module was planned. {_ADVICE}"


def _described(kept: _Kept) -> str:
    return f"{kept.dtype}{list(kept.shape)} on {kept.device} with strides {kept.strides}"


class TraitsReader:
    """Reads a module's traits at every call: its tree is walked again only where a submodule was put in or out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.walks = 0  # so far: another number tells that parts were replaced
        self._walk()  # sets `_parts`: path, submodule, what it holds, and where those are found first

    def _walk(self) -> None:
        self.walks += 1
        found = list(self._module.named_modules())
        paths = {part: path for path, part in found}
        parts = []
        for path, part in found:
            children = tuple(part._modules.items())
            places = tuple((name, paths[child]) for name, child in children if child is not None)
            parts.append((path, part, children, places))
        self._parts = parts

    def _changed(self) -> bool:
        return any(
            len(part._modules) != len(children) or (children and tuple(part._modules.items()) != children)
            for _, part, children, _ in self._parts
        )

    def read(self) -> ModuleTraits:
        """The traits now."""
        if self._changed():
            self._walk()
        parts: list[tuple[Any, ...]] = []
        parameters: list[tuple[Any, ...]] = []
        buffers: list[tuple[Any, ...]] = []
        first: dict[int, int] = {}
        for path, part, _, places in self._parts:
            hooked = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
            hooks = _hooks(part) if path and hooked else ()
            parts.append((path, type(part), part.training, hooks, part._compiled_call_impl is not None, places))
            if part._parameters:
                _read(path, part._parameters, parameters, first)
            if part._buffers:
                _read(path, part._buffers, buffers, first)
        return ModuleTraits(tuple(parts), tuple(parameters), tuple(buffers))


def _hooks(part: torch.nn.Module) -> tuple[Any, ...]:
    """Those of a submodule; those on the root are called around the plan."""
    held = (part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks)
    return tuple(hook for hooks in held for hook in hooks.values() if not is_torchs_own(hook))


def _hook_names(part: _Part) -> str:
    names = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in part.hooks]
    return f"the hooks {', '.join(names)}" if names else "no hooks"


def _read(path: str, held: dict[str, torch.Tensor | None], found: list[tuple[Any, ...]], first: dict[int, int]) -> None:
    for name, tensor in held.items():
        if tensor is not None:
            strides = tensor.stride() if tensor.layout is torch.strided else ()
            tied = first.setdefault(id(tensor), len(found))
            found.append((path, name, tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape, strides, tied))
