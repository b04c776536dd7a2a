"""Structures made of calls of different sizes, as one structure: what varies in it is a function of the sizes.

Two graphs of one module, or two problems, are aligned where they differ in numbers alone. Integers in them become
polynomials, which are exact; times become lines between what was measured.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rockmate.families.formulas import Formula
from rockmate.families.polynomials import Blocks, Chords, Point, Polynomial, bounded, fitted


class NotAligned(Exception):
    """What was made of calls of different sizes differs in more than in sizes."""


@dataclass(frozen=True, slots=True)
class Interpolated:
    """A time in ms, measured at a few points: between them on lines, and beyond them in proportion."""

    work: tuple[float, ...]  # how much there was to do, in rising order: the product of the sizes
    times_ms: tuple[float, ...]

    def at(self, point: Point) -> float:
        """The time at that point."""
        work = float(math.prod(point))
        if work <= self.work[0]:
            return self._between(0, work, lowest=min(1.0, work / self.work[0]) * self.times_ms[0])
        for place in range(1, len(self.work) - 1):
            if work <= self.work[place]:
                return self._between(place - 1, work, 0.0)
        return self._between(len(self.work) - 2, work, 0.0)

    def _between(self, place: int, work: float, lowest: float) -> float:
        (one, other), (first, second) = self.work[place : place + 2], self.times_ms[place : place + 2]
        share = (work - one) / (other - one)
        return max(lowest, first + share * (second - first), 0.0)


Leaf = Polynomial | Blocks | Chords | Formula | Interpolated
Steps = tuple[int | str, ...]  # from a structure to a part of it: places, names of fields and keys


_LEAVES = (Polynomial, Blocks, Chords, Formula, Interpolated)


def aligned(trees: Sequence[Any], points: tuple[Point, ...], block_bytes: int | None = None) -> Any:
    """One of `trees`, which were made at the `points`, with functions in the places of numbers that vary.

    Where `block_bytes` are given, in which the device hands out memory, what varies is what was measured: a number that
    is no polynomial is bounded by `Chords`, and a float is a time. Raises `NotAligned` where trees differ otherwise, or
    a number that operations are given is no polynomial.
    """
    first = trees[0]
    kind = type(first)
    if any(type(tree) is not kind for tree in trees):
        raise NotAligned(f"{trees}")
    if kind is int:
        return first if all(tree == first for tree in trees) else _integer(tuple(trees), points, block_bytes)
    if kind is float:
        if all(tree == first for tree in trees):
            return first
        if block_bytes is None:  # a number that operations are given: it is exact, or none
            raise NotAligned(f"{trees} at {points}")
        return _interpolated(tuple(trees), points)
    if kind in (tuple, list):
        if any(len(tree) != len(first) for tree in trees):
            raise NotAligned(f"{trees}")
        items = [aligned(parts, points, block_bytes) for parts in zip(*trees, strict=True)]
        return first if all(map(operator.is_, items, first)) else kind(items)
    if kind is dict:
        if any(tree.keys() != first.keys() for tree in trees):
            raise NotAligned(f"{trees}")
        found = {key: aligned([tree[key] for tree in trees], points, block_bytes) for key in first}
        return first if all(found[key] is item for key, item in first.items()) else found
    if dataclasses.is_dataclass(kind) and not issubclass(kind, enum.Enum):
        changes = {
            part.name: aligned([getattr(tree, part.name) for tree in trees], points, block_bytes)
            for part in dataclasses.fields(kind)
            if part.init
        }
        varying = {name: part for name, part in changes.items() if part is not getattr(first, name)}
        if not varying:
            return first
        return _Varying(kind, {name: part for name, part in changes.items() if name not in varying}, varying)
    if any(not _is_same(first, tree) for tree in trees):
        raise NotAligned(f"{trees}")
    return first


@dataclass(frozen=True, slots=True)
class _Varying:
    """An instance of a dataclass in which something varies: without its own checks, as it is none yet."""

    kind: Any
    fixed: dict[Any, Any]
    parts: dict[Any, Any]  # those in which something varies


Part = Callable[[Sequence[Any]], Any]  # of the values of all functions to a part of a structure


class AtPoint:
    """What was `aligned`, as a function of the point. What does not vary in it is gone through once for all points."""

    def __init__(self, tree: Any) -> None:
        self._functions: list[Leaf] = []
        self._places: dict[int, int] = {}  # by the identity of the function: `fitted` gives the same one again
        self._tree = tree
        self._part = self._part_of(tree)

    def __call__(self, point: Point) -> Any:
        """The structure at that point. Raises `NotWhole`."""
        if self._part is None:
            return self._tree
        return self._part([function.at(point) for function in self._functions])

    def _part_of(self, tree: Any) -> Part | None:
        """What makes it; None where nothing in it varies."""
        kind = type(tree)
        if kind in _LEAVES:
            if id(tree) not in self._places:
                self._places[id(tree)] = len(self._functions)
                self._functions.append(tree)
            return operator.itemgetter(self._places[id(tree)])
        if kind is tuple or kind is list:
            return self._items(tree, dict(enumerate(tree)), list, kind)
        if kind is dict:
            return self._items(tree, tree, dict, dict)
        if kind is _Varying:
            found = self._varying(tree.parts)
            parts = [(name, part) for name, part in found if part is not None]
            fixed = tree.fixed | {name: tree.parts[name] for name, part in found if part is None}
            return lambda values: tree.kind(**fixed, **{name: part(values) for name, part in parts})
        return None

    def _varying(self, parts: Mapping[Any, Any]) -> list[tuple[Any, Part | None]]:
        return [(key, self._part_of(part)) for key, part in parts.items()]

    def _items(self, tree: Any, by_key: Mapping[Any, Any], copied: Any, kind: Any) -> Part | None:
        parts = [(key, part) for key, part in self._varying(by_key) if part is not None]
        if not parts:
            return None

        def made(values: Sequence[Any]) -> Any:
            items = copied(tree)
            for key, part in parts:
                items[key] = part(values)
            return items if copied is kind else kind(items)

        return made


def at_point(tree: Any, point: Point) -> Any:
    """What was `aligned`, as it is at that point. Raises `NotWhole`."""
    return AtPoint(tree)(point)


def numbers_in(tree: Any, found: Callable[[Leaf], Any]) -> Any:
    """What was `aligned`, with something else in the place of each function."""
    if type(tree) in _LEAVES:
        return found(tree)
    if type(tree) in (tuple, list):
        return type(tree)(numbers_in(item, found) for item in tree)
    if type(tree) is dict:
        return {key: numbers_in(item, found) for key, item in tree.items()}
    if isinstance(tree, _Varying):
        return tree.kind(**tree.fixed, **{name: numbers_in(part, found) for name, part in tree.parts.items()})
    return tree


def varying_in(tree: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Leaf]]:
    """Each function in what was `aligned`, with the steps to it."""
    kind = type(tree)
    if kind in _LEAVES:
        yield steps, tree
    elif kind in (tuple, list):
        for place, item in enumerate(tree):
            yield from varying_in(item, (*steps, place))
    elif kind in (dict, _Varying):
        for name, item in (tree if kind is dict else tree.parts).items():
            yield from varying_in(item, (*steps, name))


def with_varying(tree: Any, functions: Mapping[Steps, Leaf]) -> Any:
    """`tree` with these functions in it, as if it had been `aligned`. Raises `NotAligned` for no places of it."""
    if not functions:
        return tree
    if () in functions:
        return functions[()]
    parts: dict[int | str, dict[Steps, Leaf]] = {}
    for (step, *rest), function in functions.items():
        parts.setdefault(step, {})[tuple(rest)] = function
    kind = type(tree)
    if kind in (tuple, list):
        known: Any = dict(enumerate(tree))
    elif kind is dict:
        known = tree
    elif dataclasses.is_dataclass(kind) and not issubclass(kind, enum.Enum):
        known = {part.name: getattr(tree, part.name) for part in dataclasses.fields(kind) if part.init}
    else:
        raise NotAligned(f"{tree}")
    if not parts.keys() <= known.keys():
        raise NotAligned(f"{parts.keys() - known.keys()}")
    varying = {step: with_varying(known[step], found) for step, found in parts.items()}
    if kind in (tuple, list):
        return kind({**known, **varying}.values())
    if kind is dict:
        return {**known, **varying}
    return _Varying(kind, {name: part for name, part in known.items() if name not in varying}, varying)


def _integer(
    values: tuple[int, ...], points: tuple[Point, ...], block_bytes: int | None
) -> Polynomial | Blocks | Chords:
    if block_bytes is not None and min(values) >= 0:
        return bounded(values, points, block_bytes)
    found = fitted(values, points)
    if found is None:
        raise NotAligned(f"{values} at {points}")
    return found


def _interpolated(times_ms: tuple[float, ...], points: tuple[Point, ...]) -> Interpolated:
    pairs = sorted((float(math.prod(point)), time_ms) for point, time_ms in zip(points, times_ms, strict=True))
    by_work = {work: min(ms for other, ms in pairs if other == work) for work, _ in pairs}
    if len(by_work) < 2:
        raise NotAligned(f"{times_ms} at {points}")
    return Interpolated(tuple(by_work), tuple(by_work.values()))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
