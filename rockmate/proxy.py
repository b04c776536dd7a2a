"""A module that stands in another one's place, and looks like it from every side.

Trainers ask a model for its class, the signature of its forward, its parameters by name, and whatever attributes its
library gives it; some set attributes, too. All of that is answered by the module behind.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Self

import torch

from rkgb.state.module_state import ROOT_HOOKS

# Dictionaries that both modules hold: names, what is put under them later, and hooks. A hook on either fires once in
# a call of either, as the forward here calls that of the module behind, and not the module.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    *ROOT_HOOKS,
)

# What acts on a module as a whole, and which classes override.
_DELEGATED = (
    "train",
    "eval",
    "to",
    "to_empty",
    "cpu",
    "cuda",
    "xpu",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "requires_grad_",
    "zero_grad",
    "share_memory",
    "apply",
    "_apply",
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)


class _SeenAs:
    """Answers ``isinstance`` for the class of the module behind, too, as proxies do."""

    @property
    def __class__(self) -> type:
        original = self.__dict__.get("original")
        return type(self) if original is None else original.__class__

    @__class__.setter
    def __class__(self, mixed: type) -> None:
        """Take on what is mixed in: libraries put a class made of theirs and the one they see here.

        The module stays what it is, with the mixed-in classes before that.
        """
        seen = self.__class__
        bases = tuple(type(self) if base is seen else base for base in mixed.__bases__)
        own = {name: value for name, value in vars(mixed).items() if name not in ("__dict__", "__weakref__")}
        become(self, type(mixed.__name__, bases, own))


def become(thing: object, kind: type) -> None:
    """Change the real class of `thing`, whatever its ``__class__`` says."""
    object.__dict__["__class__"].__set__(thing, kind)


class ModuleProxy(_SeenAs, torch.nn.Module):
    """Shares parameters, buffers, submodules and attributes with `original`, under the same names."""

    original: torch.nn.Module

    def _stand_for(self, original: torch.nn.Module) -> None:
        """Take the place of `original`."""
        super().__init__()
        become(self, _class_for(self._own_class(), original))
        state = self.__dict__
        state["original"] = original
        for name in _SHARED:
            state[name] = getattr(original, name)
        del state["_is_full_backward_hook"]  # says of which kind the hooks are: the model's own is asked

    @classmethod
    def _own_class(cls) -> type[Self]:
        """The class that the user made an instance of: the real one is made for the module behind."""
        return cls.__dict__.get("_made_from", cls)

    # ---- attributes --------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" in self.__dict__:
                value = getattr(self.original, name)
                return self._own_method(value) if getattr(value, "__self__", None) is self.original else value
            raise

    def _own_method(self, method: Any) -> Any:
        """`method` of the module behind, which gives this module back where it gives that one: ``return self``."""
        if not inspect.ismethod(method):
            return method

        @functools.wraps(method.__func__)
        def called(itself: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return itself if result is itself.original else result

        return types.MethodType(called, self)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the module behind has, or may have, goes there; what belongs to the wrapper stays here."""
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or "original" not in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.original, name)

    def _is_own(self, name: str) -> bool:
        """A new private name is a library's note about the module that it was given: this one."""
        if "original" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            return True
        return name.startswith("_") and not hasattr(self.original, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.original)})

    def _get_name(self) -> str:
        return "Rockmate"

    # ---- mode --------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The module's own mode."""
        original = self.__dict__.get("original")
        return True if original is None else original.training

    @training.setter
    def training(self, mode: bool) -> None:
        original = self.__dict__.get("original")
        if original is not None:
            original.training = mode


def _delegating(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.nn.Module, name))
    def method(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.original, name)(*args, **kwargs)
        return self if result is self.original else result

    return method


for _name in _DELEGATED:
    setattr(ModuleProxy, _name, _delegating(_name))


# Python looks these up on the class alone.
_OF_CONTAINERS = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


def _of_container(name: str) -> Callable[..., Any]:
    def method(self: ModuleProxy, *args: Any) -> Any:
        return getattr(self.original, name)(*args)

    return method


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return call


def _class_for(base: type[ModuleProxy], original: torch.nn.Module) -> type[ModuleProxy]:
    """`base` with a ``forward`` that has the signature, name and text of `original`'s: trainers inspect it."""

    def forward(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    functools.update_wrapper(forward, original.forward)
    del forward.__dict__["__wrapped__"]  # a bound method: it would keep the module alive, and has no `self`
    signature = inspect.signature(original.forward)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    plain, before_slash = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
    itself = inspect.Parameter("self", before_slash if before_slash in kinds else plain)
    signature = signature.replace(parameters=[itself, *signature.parameters.values()])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    own = {"forward": forward, "_made_from": base, "__module__": base.__module__, "__doc__": base.__doc__}
    if type(original).__call__ is not torch.nn.Module.__call__:  # one of its own, around the forward
        own["__call__"] = functools.wraps(type(original).__call__)(_calling(type(original).__call__))
    own |= {name: _of_container(name) for name in _OF_CONTAINERS if hasattr(type(original), name)}
    return type(base.__name__, (base,), own)
