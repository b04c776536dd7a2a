"""A JSON value as a graph, guided by the types of the graph's fields. All that does not fit is refused."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rkgb.export.json_form import names
from rkgb.export.json_form.classes import Classes, Things, is_identity
from rkgb.export.json_form.errors import Place, shortly
from rkgb.export.json_form.functions import FunctionReader
from rkgb.export.json_form.tensors import TensorReader
from rkgb.export.json_form.trees import TreeReader
from rkgb.export.json_form.writer import OPTIONAL, item_hints
from rkgb.ir.restoration import Restoration
from rkgb.restore import KINDS


class Reader:
    """Reads one graph. A file says nothing of classes: the types of the fields do."""

    def __init__(self, storages: list[Any], functions: Mapping[str, Callable[..., Any]]) -> None:
        self.place = Place()
        self._classes = Classes()
        self.things = Things()
        self._trees = TreeReader(self.place)
        self._functions = FunctionReader(self.place, self._trees, functions)
        self._tensors = TensorReader(self.place, self._trees, storages)
        self._leaf_readers: dict[Any, Callable[[Any], Any]] = {
            Any: self._trees.read,
            str: self._trees.text,
            int: self._trees.whole_number,
            float: self._float,
            bool: self._bool,
            torch.Tensor: self._tensors.read,
            torch.dtype: lambda form: self._trees.named(names.DTYPES, form),
            torch.device: self._trees.device,
        }

    def read(self, form: Any, hint: Any) -> Any:
        """What has that form, and the type that `hint` says."""
        if hint in self._leaf_readers:
            return self._leaf_readers[hint](form)
        origin = typing.get_origin(hint) or hint
        if origin is Restoration:
            return self._one_of(form, KINDS)
        if origin in OPTIONAL:
            return self._one_of(form, typing.get_args(hint))
        if origin in (list, tuple, frozenset):
            return origin(self._items(form, typing.get_args(hint)))
        if origin in (dict, collections.abc.Mapping):
            return self._mapping(form, *typing.get_args(hint))
        if origin is collections.abc.Callable:
            return self._functions.read(form)
        if isinstance(origin, type) and issubclass(origin, enum.Enum):
            return self._member(form, origin)
        if dataclasses.is_dataclass(origin) and isinstance(origin, type):
            return self._named(form, origin) if type(form) is str else self._fields(form, origin)
        raise self.place.error(f"{hint} has no form in JSON")

    def _float(self, form: Any) -> float:
        number = self._trees.read(form)  # also what is not finite
        if type(number) not in (int, float):
            raise self.place.error(f"a number is expected, not {shortly(form)}")
        return float(number)

    def _bool(self, form: Any) -> bool:
        if type(form) is not bool:
            raise self.place.error(f"true or false is expected, not {shortly(form)}")
        return form

    def _member(self, form: Any, kind: type[enum.Enum]) -> enum.Enum:
        try:
            return kind(self._trees.text(form))
        except ValueError as error:
            known = ", ".join(str(member.value) for member in kind)
            raise self.place.error(f"one of {known} is expected, not {shortly(form)}") from error

    def _items(self, form: Any, hint: tuple[Any, ...]) -> list[Any]:
        if type(form) is not list:
            raise self.place.error(f"a list is expected, not {shortly(form)}")
        hints = item_hints(hint, len(form))
        if len(hints) != len(form):
            raise self.place.error(f"{len(hints)} items are expected, not {len(form)}")
        found = []
        for index, (item, kind) in enumerate(zip(form, hints, strict=True)):
            with self.place.at(index):
                found.append(self.read(item, kind))
        return found

    def _one_of(self, form: Any, kinds: Sequence[Any]) -> Any:
        others = {kind.__name__: kind for kind in kinds if kind is not types.NoneType}
        if form is None and len(others) < len(kinds):
            return None
        if len(others) == 1:
            return self.read(form, *others.values())
        name = form[0] if type(form) is list and len(form) == 2 else None
        if type(name) is not str or name not in others:
            raise self.place.error(f"one of {', '.join(others)} and its fields are expected, not {shortly(form)}")
        return self.read(form[1], others[name])

    def _mapping(self, form: Any, key: Any, item: Any) -> dict[Any, Any]:
        if item in (None, types.NoneType):
            return dict.fromkeys(self._items(form, (key,)))
        if key is not str:
            return self._pairs(form, key, item)
        if type(form) is not dict:
            raise self.place.error(f"an object is expected, not {shortly(form)}")
        found = {}
        for name, thing in form.items():
            with self.place.at(self._trees.text(name)):
                found[name] = self.read(thing, item)
        return found

    def _pairs(self, form: Any, key: Any, item: Any) -> dict[Any, Any]:
        return dict(self._items(form, (tuple[key, item],)))

    def _named(self, key: str, kind: type[Any]) -> Any:
        thing = self.things.get(kind, key)
        if thing is None:
            raise self.place.error(f"there is no {kind.__name__} called {shortly(key)} before this place")
        return thing

    def _fields(self, form: Any, kind: type[Any]) -> Any:
        if type(form) is not dict:
            raise self.place.error(f"a {kind.__name__} is expected, not {shortly(form)}")
        known = self._classes.parts(kind)
        unknown = form.keys() - {part.name for part in known}
        if unknown:
            raise self.place.error(f"a {kind.__name__} has no {shortly(min(map(str, unknown)))}")
        values = {}
        for part in known:
            if part.name in form:
                with self.place.at(part.name):
                    read = self._trees.read_output if part.is_output else functools.partial(self.read, hint=part.hint)
                    values[part.name] = read(form[part.name])
            elif part.is_needed:
                raise self.place.error(f"{part.name} of this {kind.__name__} is missing")
        thing = kind(**values)
        if is_identity(kind):
            self.things.add(thing)
        return thing
