"""Nested Python structures holding tensors: inputs and outputs keep their shape through us.

Tuples, named tuples, lists, dictionaries (and their subclasses) and dataclass instances are
walked; everything else is a leaf or is left alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def is_tensor(leaf: object) -> bool:
    """Whether `leaf` is a tensor: the usual predicate of `map_leaves`."""
    return isinstance(leaf, torch.Tensor)


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[object], bool] = is_tensor) -> Any:
    """Copy of `tree` in which every leaf chosen by `is_leaf` is replaced by ``function(leaf)``."""
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        items = [map_leaves(function, item, is_leaf) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [map_leaves(function, item, is_leaf) for item in tree]
    if isinstance(tree, dict):
        # A shallow copy keeps the class (OrderedDict, a library's output class) and its order.
        mapping = copy.copy(tree)
        for key, item in tree.items():
            mapping[key] = map_leaves(function, item, is_leaf)
        return mapping
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        record = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(record, field.name, map_leaves(function, getattr(tree, field.name), is_leaf))
        return record
    return tree


def leaves(tree: Any, is_leaf: Callable[[object], bool] = is_tensor) -> list[Any]:
    """The leaves of `tree` chosen by `is_leaf`, in the order in which `map_leaves` meets them."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, tree, is_leaf)
    return found
