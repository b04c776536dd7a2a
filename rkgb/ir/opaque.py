"""Opaque operations: submodules whose call is one operation, because they are compiled or by the user's word."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from rkgb.errors import GuardError, TraceError
from rkgb.process.autocast import Autocast
from rkgb.state.module_state import nothing_packed
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.tracers import compiled_wrappers, compiler_is_imported
from rkgb.tree import attributes_of, is_tensor, leaves, map_leaves

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Traits:
    """What calls of an opaque submodule showed when it was traced."""

    fingerprint: str  # equal for calls that compute, save and take the same but for names
    written: tuple[int, ...] = ()  # places of tensors, among those in arguments and held, that a call writes in place
    keep_reason: str = ""  # why it must not run twice; empty when it may
    reads_data: bool = False  # what it runs depends on its data, so that other data may save other tensors


@dataclass(frozen=True, eq=False, slots=True)
class OpaqueCall:
    """Calls a submodule as one operation, and returns the tensors in its output.

    It takes the submodule's positional and keyword arguments, and the parameters and buffers that the submodule
    holds: the call runs on these, which may stand for those that are registered. There is one for each call of a trace.
    """

    path: str
    submodule: torch.nn.Module  # of the module that was traced
    place: str  # of the call in the user's code
    is_compiled: bool
    gradients: tuple[bool, ...]  # requires_grad of the tensors in its arguments
    grad_enabled: bool
    autocast: Autocast  # in force when it was called
    expected: Any  # the outline of its output
    is_plain: bool  # its output is a tensor, or a tuple or list of tensors
    traits: Traits

    @property
    def name(self) -> str:
        """Of the submodule among the values of a run; with a space in it, so that no value of a graph has it."""
        return f"submodule {self.path}"

    @property
    def __name__(self) -> str:
        name = re.sub(r"\W", "_", self.path)
        return name if name.isidentifier() else f"submodule_{name}"

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def in_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The submodule that stands for this one in `module`, the one that was traced or a copy of it."""
        return module.get_submodule(self.path)

    def on(self, submodule: torch.nn.Module) -> OpaqueCall:
        """The same call of another submodule."""
        return self if submodule is self.submodule else replace(self, submodule=submodule)

    def __call__(self, args: Any, kwargs: Any, held: dict[str, torch.Tensor]) -> Any:
        """One call. Raises `GuardError` where the output is built in another way than when it was traced."""
        with _in_place(self.submodule, held):
            # Without gradients, compiled code is other code, to be compiled for itself, and its bits may be others.
            as_traced = torch.is_grad_enabled() is self.grad_enabled or not self.grad_enabled
            if as_traced or any(place < len(self.gradients) for place in self.traits.written):
                return self._parts(args, kwargs)
            flags = iter(self.gradients)
            args, kwargs = map_leaves(lambda t: t.detach().requires_grad_(next(flags)), (args, kwargs))
            with torch.enable_grad(), nothing_packed():
                return map_leaves(lambda tensor: tensor.detach(), self._parts(args, kwargs))

    def _parts(self, args: Any, kwargs: Any) -> Any:
        with self.autocast.entered():
            return self.parts(self.apart((args, kwargs), self.submodule(*args, **kwargs)))

    def apart(self, arguments: Any, output: Any) -> Any:
        """The output of what may go another way in each call, with a copy of each tensor in the storage of an argument.

        A layer that is left out at random returns its input in some calls: what reads the one is not to read the other
        where it does not, and neither has the other's memory. What it has written into and returns stays.
        """
        if not self.traits.keep_reason:
            return output
        given = enumerate(leaves(arguments))
        storages = {storage_key(tensor) for place, tensor in given if place not in self.traits.written}
        return map_leaves(lambda tensor: tensor.clone() if storage_key(tensor) in storages else tensor, output)

    def parts(self, output: Any) -> Any:
        """What the operation gives of an output of the submodule: its one tensor, or a list of its tensors."""
        found = outline(output)
        if found != self.expected:
            raise GuardError(
                f"at {self.place} submodule {self.path!r}, which is one operation of the graph, returns "
                f"{_short(found)}, but returned {_short(self.expected)} when it was traced. Trace with a sample for "
                "which it returns this, or return tensors alone."
            )
        return output if is_tensor(output) else leaves(output)


def outline(tree: Any) -> Any:
    """The structure of `tree` with its numbers and texts: equal for trees that differ in their tensors alone."""
    if is_tensor(tree):
        return "tensor"
    if isinstance(tree, float) and math.isnan(tree):
        return "nan"
    if isinstance(tree, _SCALARS):
        return tree
    kind = type(tree).__name__
    if isinstance(tree, tuple | list):
        return (kind, *(outline(item) for item in tree))
    if isinstance(tree, dict):
        return (kind, *((key, outline(item)) for key, item in tree.items()))
    if leaves(tree):
        return (kind, *((name, outline(item)) for name, item in attributes_of(tree).items()))
    return kind


def is_plain(output: Any) -> bool:
    """Whether `output` is a tensor, or a tuple or list of tensors."""
    return is_tensor(output) or (type(output) in (tuple, list) and all(is_tensor(item) for item in output))


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 80 else text[:79] + "…"


# ---- what a submodule holds ------------------------------------------------------------------------------


def held_by(submodule: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of `submodule` by their paths within it; tied ones under each."""
    held: dict[str, torch.Tensor] = dict(submodule.named_parameters(remove_duplicate=False))
    return held | dict(submodule.named_buffers(remove_duplicate=False))


@contextlib.contextmanager
def _in_place(submodule: torch.nn.Module, held: dict[str, torch.Tensor]) -> Iterator[None]:
    """Put `held` in the places of the parameters and buffers that `submodule` holds, where they are not there."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, tensor in held.items():
            *owners, name = path.split(".")
            holder: Any = submodule
            for owner in owners:
                holder = holder._modules[owner]  # scripted modules have no get_submodule
            registered: dict[str, Any] = holder._parameters if name in holder._parameters else holder._buffers
            if registered[name] is not tensor:
                before.append((registered, name, registered[name]))
                registered[name] = tensor
        yield
    finally:
        for registered, name, tensor in reversed(before):
            registered[name] = tensor


# ---- which submodules are opaque ---------------------------------------------------------------------------


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` has been applied to `module`, or its method ``compile`` been called."""
    return module._compiled_call_impl is not None or is_compiled_wrapper(module)


def is_compiled_wrapper(module: torch.nn.Module) -> bool:
    """Whether `module` is what `torch.compile` puts around a module: it has nothing of its own."""
    return isinstance(module, compiled_wrappers())


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Run what is compiled as it is written."""
    if not compiler_is_imported():
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        yield


class OpaqueModules:
    """The submodules of a module whose calls are one operation each: compiled ones, and those declared."""

    def __init__(self, module: torch.nn.Module, declared: Iterable[torch.nn.Module] = ()) -> None:
        """Raises `TraceError` for the whole module, and for what it does not hold."""
        if is_compiled(module):
            raise TraceError(
                f"{type(module).__name__} is compiled as a whole: there is nothing in one compiled call that could be "
                "kept or recomputed by itself. Compile its parts before it is planned (`for layer in model.layers: "
                "layer.compile()`), which stay compiled, or compile the planned module: torch.compile(Rockmate(model))."
            )
        wanted = {id(part) for one in declared for part in _parts_of(module, one)}
        self.declared = {path: part for path, part in module.named_modules() if id(part) in wanted}
        self.by_path = {
            path: part for path, part in module.named_modules() if path and (id(part) in wanted or is_compiled(part))
        }
        own = {id(part) for part in self.by_path.values()}
        self.outside = list(_outside("", module, own, set()))  # path and submodule of those that are not within any

    def __bool__(self) -> bool:
        return bool(self.by_path)


def opaque_paths(module: torch.nn.Module, declared: torch.nn.Module | Iterable[torch.nn.Module]) -> tuple[str, ...]:
    """Where in `module` the submodules are that are to be opaque: one, or several. Raises as `OpaqueModules` does."""
    # Containers of modules can be iterated over as well.
    several = [declared] if isinstance(declared, torch.nn.Module) else list(declared)
    return tuple(OpaqueModules(module, several).declared)


def _outside(
    path: str, module: torch.nn.Module, opaque: set[int], seen: set[int]
) -> Iterator[tuple[str, torch.nn.Module]]:
    if id(module) in opaque or id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        yield from _outside(f"{path}.{name}" if path else name, child, opaque, seen)


def _parts_of(module: torch.nn.Module, declared: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that are called where `declared` is meant: of a mere container, what it contains."""
    if not isinstance(declared, torch.nn.Module) or all(part is not declared for part in module.modules()):
        raise TraceError(
            f"{type(declared).__name__} was given as opaque, but is no submodule of this {type(module).__name__}: give "
            "the very objects that the model holds, such as opaque=[model.layers[0]]."
        )
    if declared is module:
        raise TraceError(
            f"the whole {type(module).__name__} was given as opaque: nothing would be left to plan. Give submodules."
        )
    if inspect.getattr_static(type(declared), "forward") is torch.nn.Module.forward:
        return [part for child in declared.children() for part in _parts_of(module, child)]
    return [declared]


# ---- meeting their calls -----------------------------------------------------------------------------------

Handler = Callable[[str, torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of a call of an opaque submodule: its path, itself, positional and keyword arguments."""


class Interception:
    """Hands calls of opaque submodules to a handler while it is `on`."""

    def __init__(self, opaque: OpaqueModules, handler: Handler) -> None:
        self._opaque = opaque
        self._handler = handler
        self.called: set[str] = set()  # paths of those that were

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Meet calls inside."""
        wrappers = compiled_wrappers()
        own = {id(part): path for path, part in self._opaque.by_path.items()}
        installed = [part for part in self._opaque.by_path.values() if not isinstance(part, wrappers)]
        before = [vars(part).get("_compiled_call_impl") for part in installed]
        plain = [kind.__call__ for kind in wrappers]

        def called(part: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # What it calls itself belongs to it, and compiled code must see its modules as they are.
            take_off()
            try:
                self.called.add(own[id(part)])
                return self._handler(own[id(part)], part, args, kwargs)
            finally:
                put_on()

        def wrapper_called(part: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return called(part, *args, **kwargs) if id(part) in own else plain[0](part, *args, **kwargs)

        def put_on() -> None:
            for part in installed:
                vars(part)["_compiled_call_impl"] = lambda *args, _part=part, **kwargs: called(_part, *args, **kwargs)
            for kind in wrappers:
                kind.__call__ = wrapper_called  # type: ignore[method-assign]

        def take_off() -> None:
            for part, call in zip(installed, before, strict=True):
                if call is None:
                    vars(part).pop("_compiled_call_impl", None)
                else:
                    vars(part)["_compiled_call_impl"] = call
            for kind, call in zip(wrappers, plain, strict=True):
                kind.__call__ = call  # type: ignore[method-assign]

        put_on()
        try:
            yield
        finally:
            take_off()
