"""Forms of what is called: operations and guards by name; of functions of the user's, nothing but the name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rkgb.json_form import names
from rkgb.json_form.containers import MissingFunction
from rkgb.json_form.errors import Place, shortly
from rkgb.json_form.trees import TreeReader, TreeWriter
from rkgb.tracing.guard import Guard
from rkgb.tracing.opaque import OpaqueCall
from rkgb.tracing.record import UnderAutocast

_GUARD = {"read", "expected", "place", "may_vary"}
_CUSTOM = {"custom", "autocast"}


def write_function(function: Any, place: Place, trees: TreeWriter) -> Any:
    """The form of what a call calls."""
    if isinstance(function, torch._ops.OpOverload):
        return names.operation_name(function)
    if isinstance(function, Guard):
        place.enter("expected")
        expected = trees.write(function.expected)
        place.leave()
        return {
            "read": _write_read(function.read, place),
            "expected": expected,
            "place": function.place,
            **({"may_vary": True} if function.may_vary else {}),
        }
    if isinstance(function, MissingFunction):
        return _custom(function.name, function.autocast)
    if isinstance(function, OpaqueCall):
        return _custom(function.name, function.autocast)
    if isinstance(function, UnderAutocast):
        return _custom(name_of(function.apply), (function.kind, function.dtype))
    return _custom(name_of(function), None)


def _custom(name: str, autocast: tuple[str, torch.dtype] | None) -> dict[str, Any]:
    if autocast is None:
        return {"custom": name}
    return {"custom": name, "autocast": [autocast[0], names.name_in(names.DTYPES, autocast[1])]}


def name_of(function: Any) -> str:
    """Of a bound method, that of what it is bound to: the class of an autograd function."""
    if isinstance(function, MissingFunction):
        return function.name
    owner = getattr(function, "__self__", None)
    named = owner if isinstance(owner, type) else function
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{named.__module__}.{named.__qualname__}"


def _write_read(read: Callable[..., Any], place: Place) -> str:
    if isinstance(read, torch._ops.OpOverload):
        return names.operation_name(read)
    name = names.name_in(names.READS, read)
    if name is None:
        raise place.error(f"the guard reads by {read!r}, for which the format has no name")
    return name


class FunctionReader:
    """Finds what the forms name."""

    def __init__(self, place: Place, trees: TreeReader, given: Mapping[str, Callable[..., Any]]) -> None:
        self._place = place
        self._trees = trees
        self._given = given
        self._operations: dict[str, torch._ops.OpOverload] = {}

    def read(self, form: Any) -> Callable[..., Any]:
        """What a call calls."""
        if type(form) is str:
            return self._operation(form)
        if type(form) is dict and "read" in form and form.keys() <= _GUARD:
            return self._guard(form)
        if type(form) is dict and "custom" in form and form.keys() <= _CUSTOM:
            return self._custom(form)
        raise self._place.error(f"neither an operation, nor a guard, nor a custom function, but {shortly(form)}")

    def _operation(self, name: str) -> torch._ops.OpOverload:
        if name not in self._operations:
            try:
                self._operations[name] = names.operation(name)
            except ValueError as error:
                raise self._place.error(f"{shortly(name)}: {error}") from error
        return self._operations[name]

    def _guard(self, form: dict[str, Any]) -> Guard:
        name, told, may_vary = form["read"], form.get("place"), form.get("may_vary", False)
        if type(name) is not str or type(told) is not str or type(may_vary) is not bool or "expected" not in form:
            raise self._place.error("a guard needs how it reads, what it expects, and the place of the read")
        read = names.READS[name] if name in names.READS else self._operation(name)
        self._place.enter("expected")
        expected = self._trees.read(form["expected"])
        self._place.leave()
        return Guard(read, expected, told, may_vary)

    def _custom(self, form: dict[str, Any]) -> Callable[..., Any]:
        name, autocast = form["custom"], form.get("autocast")
        if type(name) is not str:
            raise self._place.error(f"the name of a function is {shortly(name)}")
        region = None if "autocast" not in form else self._region(autocast)
        if name not in self._given:
            return MissingFunction(name, region)
        return self._given[name] if region is None else UnderAutocast(self._given[name], *region)

    def _region(self, autocast: Any) -> tuple[str, torch.dtype]:
        parts = autocast if type(autocast) is list and len(autocast) == 2 else [None, None]
        kind, dtype = parts
        if type(kind) is not str or kind not in ("cpu", "cuda") or type(dtype) is not str or dtype not in names.DTYPES:
            raise self._place.error("an autocast region is a kind of device and a type of elements")
        return kind, names.DTYPES[dtype]
