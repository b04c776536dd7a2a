"""Forms of what is called: operations and guards by name; of functions of the user's, nothing but the name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rkgb.export.json_form import names
from rkgb.export.json_form.containers import MissingFunction
from rkgb.export.json_form.errors import Place, shortly
from rkgb.export.json_form.trees import TreeReader, TreeWriter
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.opaque import OpaqueCall
from rkgb.process.autocast import OFF, Autocast, autocast_kinds
from rkgb.recording.guard import Guard
from rkgb.recording.record import UnderAutocast
from rkgb.torch_private.operations import OpOverload

_GUARD = {"read", "expected", "place", "may_vary"}
_CUSTOM = {"custom", "autocast", "autocast_off", "autocast_caches"}


def write_function(function: Any, place: Place, trees: TreeWriter) -> Any:
    """The form of what a call calls."""
    if isinstance(function, OpOverload):
        return names.operation_name(function)
    if isinstance(function, Guard):
        with place.at("expected"):
            expected = trees.write(function.expected)
        return {
            "read": _write_read(function.read, place),
            "expected": expected,
            "place": function.place,
            **({"may_vary": True} if function.may_vary else {}),
        }
    if isinstance(function, MissingFunction):
        return _custom(function.name, function.autocast)
    if isinstance(function, CompiledCall):
        return _custom(function.name, OFF)
    if isinstance(function, OpaqueCall):
        return _custom(function.name, function.autocast)
    if isinstance(function, UnderAutocast):
        return _custom(name_of(function.apply), function.autocast)
    return _custom(name_of(function), OFF)


def _custom(name: str, autocast: Autocast) -> dict[str, Any]:
    form: dict[str, Any] = {"custom": name}
    for key, regions in (("autocast", autocast.regions), ("autocast_off", autocast.off)):
        if regions:
            form[key] = [[kind, names.name_in(names.DTYPES, dtype)] for kind, dtype in regions]
    return form if autocast.caches else form | {"autocast_caches": False}


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
    if isinstance(read, OpOverload):
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
        self._operations: dict[str, OpOverload] = {}

    def read(self, form: Any) -> Callable[..., Any]:
        """What a call calls."""
        if type(form) is str:
            return self._operation(form)
        if type(form) is dict and "read" in form and form.keys() <= _GUARD:
            return self._guard(form)
        if type(form) is dict and "custom" in form and form.keys() <= _CUSTOM:
            return self._custom(form)
        raise self._place.error(f"neither an operation, nor a guard, nor a custom function, but {shortly(form)}")

    def _operation(self, name: str) -> OpOverload:
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
        with self._place.at("expected"):
            expected = self._trees.read(form["expected"])
        return Guard(read, expected, told, may_vary)

    def _custom(self, form: dict[str, Any]) -> Callable[..., Any]:
        name = form["custom"]
        if type(name) is not str:
            raise self._place.error(f"the name of a function is {shortly(name)}")
        autocast = self._autocast(form)
        if name not in self._given:
            return MissingFunction(name, autocast)
        return self._given[name] if autocast == OFF else UnderAutocast(self._given[name], autocast)

    def _autocast(self, form: dict[str, Any]) -> Autocast:
        on, off, caches = form.get("autocast", []), form.get("autocast_off", []), form.get("autocast_caches", True)
        if type(on) is list and len(on) == 2 and type(on[0]) is str:
            on = [on]  # as files have it from when a call was in one region at most
        if type(on) is not list or type(off) is not list or type(caches) is not bool:
            raise self._place.error("autocast is a list of regions, and whether it caches")
        regions, others = tuple(map(self._region, on)), tuple(map(self._region, off))
        kinds = [kind for kind, _ in (*regions, *others)]
        if len(set(kinds)) < len(kinds):
            raise self._place.error("a kind of device has two autocast regions")
        return Autocast(regions, others, caches)

    def _region(self, region: Any) -> tuple[str, torch.dtype]:
        kind, dtype = region if type(region) is list and len(region) == 2 else (None, None)
        if type(kind) is not str or kind not in autocast_kinds() or type(dtype) is not str or dtype not in names.DTYPES:
            raise self._place.error("an autocast region is a kind of device and a type of elements")
        return kind, names.DTYPES[dtype]
