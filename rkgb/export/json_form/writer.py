"""A graph as a JSON value, guided by the types of its fields."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Sequence
from typing import Any

import torch

from rkgb.export.json_form import names
from rkgb.export.json_form.classes import Classes, Things, is_identity
from rkgb.export.json_form.errors import Place, refuse_generator
from rkgb.export.json_form.functions import write_function
from rkgb.export.json_form.tensors import TensorWriter
from rkgb.export.json_form.trees import TreeWriter
from rkgb.ir.restoration import Restoration
from rkgb.restore import KINDS
from rkgb.state.generators import OwnGenerator

OPTIONAL = (types.UnionType, typing.Union)


def item_hints(arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The types of that many items of what is annotated by ``list[X]``, ``tuple[X, ...]`` or ``tuple[X, Y]``."""
    if len(arguments) == 1 or arguments[-1] is Ellipsis:
        return arguments[:1] * count
    return arguments


class Writer:
    """Writes one graph: each object that has an identity once, and then its name."""

    def __init__(self) -> None:
        self.place = Place()
        self.things = Things()
        self._classes = Classes()
        self.tensors = TensorWriter(self.place)
        self._trees = TreeWriter(self.place)
        self._keys: dict[int, str] = {}  # by identity

    def write(self, value: Any, hint: Any, strict: bool = True) -> Any:
        """The form of `value`, which is of the type that `hint` says."""
        if hint is Any:
            return self._trees.write(value, strict)
        if hint in (int, float, str, bool, types.NoneType):
            return self._plain(value, hint)
        origin = typing.get_origin(hint) or hint
        if origin is Restoration:
            return self._one_of(value, KINDS)
        if origin in OPTIONAL:
            return self._one_of(value, typing.get_args(hint))
        if origin in (list, tuple):
            return self._items(list(value), typing.get_args(hint))
        if origin is frozenset:
            return self._items(sorted(value), typing.get_args(hint))
        if origin in (dict, collections.abc.Mapping):
            return self._mapping(value, *typing.get_args(hint))
        if origin is collections.abc.Callable:
            return write_function(value, self.place, self._trees)
        if not isinstance(origin, type) or not isinstance(value, origin):
            raise self.place.error(f"{type(value).__name__} where {hint} is expected has no form in JSON")
        if isinstance(value, torch.Tensor):
            return self.tensors.write(value)
        if isinstance(value, torch.dtype):
            return names.name_in(names.DTYPES, value)
        if isinstance(value, torch.device):
            return str(value)
        if isinstance(value, OwnGenerator):
            refuse_generator(self.place)
        if isinstance(value, enum.Enum):
            return value.value
        if dataclasses.is_dataclass(origin):
            return self._fields(value, origin)
        raise self.place.error(f"{hint} has no form in JSON")

    def _one_of(self, value: Any, kinds: Sequence[Any]) -> Any:
        """None as it is; of several classes, beside the name of the one that it is."""
        others = [kind for kind in kinds if kind is not types.NoneType]
        if value is None:
            return None
        if len(others) == 1:
            return self.write(value, others[0])
        if type(value) not in others or not dataclasses.is_dataclass(value):
            told = " | ".join(map(str, kinds))
            raise self.place.error(f"{type(value).__name__} where {told} is expected has no form in JSON")
        return [type(value).__name__, self.write(value, type(value))]

    def _plain(self, value: Any, hint: Any) -> Any:
        if hint is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, hint):
            raise self.place.error(f"{type(value).__name__} where {hint.__name__} is expected has no form in JSON")
        return self._trees.write(value)

    def _items(self, values: Sequence[Any], hint: tuple[Any, ...]) -> list[Any]:
        written = []
        for index, (value, kind) in enumerate(zip(values, item_hints(hint, len(values)), strict=True)):
            with self.place.at(index):
                written.append(self.write(value, kind))
        return written

    def _mapping(self, value: Any, key: Any, item: Any) -> Any:
        if item in (None, types.NoneType):  # an ordered set
            return self._items(list(value), (key,))
        if key is not str:
            return self._items(list(value.items()), (tuple[key, item],))
        written = {}
        for name, thing in value.items():
            with self.place.at(name):
                written[self._plain(name, str)] = self.write(thing, item)
        return written

    def _fields(self, thing: Any, kind: type[Any]) -> Any:
        if id(thing) in self._keys:
            return self._keys[id(thing)]
        written = {}
        for part in self._classes.parts(kind):
            value = getattr(thing, part.name)
            if part.is_default(value):
                continue
            with self.place.at(part.name):
                written[part.name] = self.write(value, part.hint, strict=not part.is_output)
        if is_identity(kind):
            self._keys[id(thing)] = self.things.add(thing)
        return written
