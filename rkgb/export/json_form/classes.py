"""Which classes a file may hold, and of what types their fields are: those that the graphs' annotations lead to."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rkgb.ir.bgraph import BGraph
from rkgb.ir.call import Call
from rkgb.ir.dgraph import DGraph
from rkgb.ir.kgraph import KComp, KData, KGraph
from rkgb.ir.sgraph import SGraph, SNode
from rkgb.pipeline import AllGraphs

Graph = BGraph | DGraph | SGraph | KGraph | AllGraphs
KINDS: Mapping[str, type[Any]] = {"B": BGraph, "D": DGraph, "S": SGraph, "K": KGraph, "All": AllGraphs}
# What other fields tell already: who uses and makes what is the other end of `deps` and `outputs`.
_OTHER_ENDS: Mapping[type[Any], frozenset[str]] = {
    SNode: frozenset({"users"}),
    KData: frozenset({"users", "producers"}),
}
# Of use where a graph was traced: calls of other sizes are compared with those that were planned there.
_NOT_KEPT: Mapping[type[Any], frozenset[str]] = {Call: frozenset({"sizes"}), BGraph: frozenset({"questions"})}
# Written first, so that what the other fields hold is only named by them.
_FIRST: Mapping[type[Any], tuple[str, ...]] = {KGraph: ("sgraph", "blocks", "data")}


@dataclass(frozen=True, slots=True)
class Part:
    """A field that is written."""

    name: str
    hint: Any  # its type, resolved
    default: Any  # what it is when a file does not tell; `dataclasses.MISSING` where a file must
    factory: Any

    @property
    def is_needed(self) -> bool:
        """Whether a file must tell it."""
        return self.default is dataclasses.MISSING and self.factory is dataclasses.MISSING

    @property
    def is_output(self) -> bool:
        """Whether it is what the module returns, or leaves in an attribute.

        That alone may be of the user's classes: nothing is called with it.
        """
        return self.name in ("output", "value") and self.hint is Any

    def is_default(self, value: Any) -> bool:
        """Whether a file need not tell that it is `value`."""
        if self.is_needed:
            return False
        usual = self.factory() if self.default is dataclasses.MISSING else self.default
        return value is usual or (type(value) is type(usual) and bool(value == usual))


class Classes:
    """The fields of classes, looked up once."""

    def __init__(self) -> None:
        self._parts: dict[type[Any], tuple[Part, ...]] = {}

    def parts(self, kind: type[Any]) -> tuple[Part, ...]:
        """The fields of a dataclass that are written, in the order in which they are."""
        if kind not in self._parts:
            self._parts[kind] = tuple(_parts(kind))
        return self._parts[kind]


def _parts(kind: type[Any]) -> list[Part]:
    hints = typing.get_type_hints(kind)
    left_out = _OTHER_ENDS.get(kind, frozenset()) | _NOT_KEPT.get(kind, frozenset())
    found = [
        Part(field.name, hints[field.name], field.default, field.default_factory)
        for field in dataclasses.fields(kind)
        if field.init and field.name not in left_out
    ]
    first = _FIRST.get(kind, ())
    return sorted(found, key=lambda part: first.index(part.name) if part.name in first else len(first))


def is_identity(kind: type[Any]) -> bool:
    """Whether it matters which object of a class it is: such objects are written once, and then named."""
    return "__eq__" not in vars(kind)


class Things:
    """The objects of each class that have an identity, by the keys under which they are named."""

    def __init__(self) -> None:
        self._by_key: dict[type[Any], dict[str, Any]] = {}
        self._last: Counter[tuple[type[Any], str]] = Counter()

    def add(self, thing: Any) -> str:
        """Give the next object its key: its own name, or its class and a number; with a mark if that is taken."""
        kind = type(thing)
        taken = self._by_key.setdefault(kind, {})
        own = getattr(thing, "name", None)
        key = stem = own if isinstance(own, str) else f"{kind.__name__} {len(taken)}"
        while key in taken:
            self._last[kind, stem] += 1
            key = f"{stem}#{self._last[kind, stem] + 1}"
        taken[key] = thing
        return key

    def get(self, kind: type[Any], key: str) -> Any:
        """The object of that class and key; None where there is none."""
        return self._by_key.get(kind, {}).get(key)

    def of(self, kind: type[Any]) -> list[Any]:
        """All objects of a class, as they were added."""
        return list(self._by_key.get(kind, {}).values())


def connect(things: Things) -> None:
    """Fill in what is not written: the other ends."""
    for node in things.of(SNode):
        for dep in node.deps:
            dep.users[node] = None
    for comp in things.of(KComp):
        for data in comp.deps:
            data.users[comp] = None
        for data in comp.outputs:
            data.producers[comp] = None
