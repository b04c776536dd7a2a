"""Nested Python structures holding tensors: inputs and outputs keep their shape through us.

Tuples, named tuples, lists, dictionaries (and their subclasses), dataclass instances and other
objects whose attributes hold tensors (a cache of keys and values) are walked; everything else is
a leaf or is left alone.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

# Most of what is met, and holds nothing; of `_OPAQUE`, which takes longer to ask, too.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
# Never looked into: they hold tensors, if at all, as a part of the program and not of the data.
_OPAQUE = (
    int,
    float,
    complex,
    str,
    bytes,
    torch.nn.Module,
    torch.Generator,
    torch.dtype,
    torch.device,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)


def is_tensor(leaf: object) -> bool:
    """Whether `leaf` is a tensor: the usual predicate of `map_leaves`."""
    return isinstance(leaf, torch.Tensor)


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[object], bool] = is_tensor) -> Any:
    """Copy of `tree` in which every leaf chosen by `is_leaf` is replaced by ``function(leaf)``.

    An object that appears twice is copied once. Objects in which there is no leaf stay themselves.
    """
    return _Mapper(function, is_leaf).map(tree)


def leaves(tree: Any, is_leaf: Callable[[object], bool] = is_tensor) -> list[Any]:
    """The leaves of `tree` chosen by `is_leaf`, in the order in which `map_leaves` meets them."""
    found: list[Any] = []
    _collect(tree, is_leaf, set(), found)
    return found


def structure(tree: Any) -> Any:
    """`tree` as plain tuples and values that compare equal for trees of equal structure, tensors blanked."""
    if is_tensor(tree):
        return "tensor"
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        return (type(tree).__name__, *(structure(item) for item in tree))
    if isinstance(tree, dict):
        return (type(tree).__name__, *((key, structure(item)) for key, item in tree.items()))
    if isinstance(tree, np.ndarray) and not tree.dtype.hasobject:
        return ("ndarray", tree.dtype.str, tree.shape, tree.tobytes())  # as it is now: it may be written into
    if isinstance(tree, set):
        return ("set", frozenset(tree))
    if _has_leaf(tree, is_tensor):
        return (type(tree).__name__, *((name, structure(item)) for name, item in attributes_of(tree).items()))
    return tree


class _Mapper:
    """One call of `map_leaves`."""

    def __init__(self, function: Callable[[Any], Any], is_leaf: Callable[[object], bool]) -> None:
        self._function = function
        self._is_leaf = is_leaf
        self._copies: dict[int, Any] = {}  # of objects, which may refer to each other

    def map(self, tree: Any) -> Any:
        if self._is_leaf(tree):
            return self._function(tree)
        if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
            items = [self.map(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
        if isinstance(tree, list):
            return [self.map(item) for item in tree]
        if isinstance(tree, dict):
            # A shallow copy keeps the class (OrderedDict, a library's output class) and its order.
            mapping = copy.copy(tree)
            for key, item in tree.items():
                mapping[key] = self.map(item)
            return mapping
        if type(tree) in _PLAIN:
            return tree
        if id(tree) in self._copies:
            return self._copies[id(tree)]
        if _has_leaf(tree, self._is_leaf):
            twin = self._copies[id(tree)] = copy.copy(tree)
            for name, item in attributes_of(tree).items():
                object.__setattr__(twin, name, self.map(item))
            return twin
        return tree


def _collect(
    tree: Any, is_leaf: Callable[[object], bool], seen: set[int], found: list[Any], first: bool = False
) -> bool:
    """Add the leaves of `tree` to those `found`, or the `first` one alone; whether to stop there.

    No generator: this is most of what graphs are walked through by.
    """
    if is_leaf(tree):
        found.append(tree)
        return first
    kind = type(tree)
    if kind in _PLAIN:
        return False
    if isinstance(tree, (tuple, list)):
        items: Iterable[Any] = tree if not isinstance(tree, torch.Size) else ()
    elif isinstance(tree, dict):
        items = tree.values()
    elif id(tree) in seen:
        return False
    else:
        items = attributes_of(tree).values()
        if items:
            seen.add(id(tree))
    for item in items:
        if _collect(item, is_leaf, seen, found, first):
            return True
    return False


def _has_leaf(tree: Any, is_leaf: Callable[[object], bool]) -> bool:
    found: list[Any] = []
    return _collect(tree, is_leaf, set(), found, first=True)


def attributes_of(thing: Any) -> dict[str, Any]:
    """What an object holds, by name; nothing for numbers, text, functions, modules."""
    if thing is None or isinstance(thing, _OPAQUE):
        return {}
    held = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                held[name] = getattr(thing, name)
    return held
