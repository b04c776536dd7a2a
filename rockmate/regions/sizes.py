"""Regions that differ in sizes alone: which of their numbers vary, and for which others the same code holds.

A number that was the same in all regions that were seen is taken for a constant. Numbers that were equal in each of
them are one symbol. A stride that was another dimension's size times its stride in each of them stays that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rkgb import DGraph
from rkgb.ir.call import Call
from rkgb.ir.compiled import Handed, Layout
from rkgb.passes.equivalence import is_some_size
from rockmate.regions.find import Region


class RegionSizes(NamedTuple):
    """The whole numbers of a region."""

    layouts: tuple[Layout, ...]  # of its inputs
    arguments: tuple[int, ...]  # of its operations, in order


def sizes_of(graph: DGraph, region: Region) -> RegionSizes:
    """The numbers of `region`; of two with the same `form_of_any_size`, they are as many in the same order."""
    infos = [graph.values[name] for name in region.inputs]
    arguments = [number for op in region.ops for number in _numbers_in((op.call.args, op.call.kwargs))]
    return RegionSizes(tuple((tuple(one.shape), tuple(one.stride)) for one in infos), tuple(arguments))


def with_arguments(calls: Sequence[Call], arguments: Sequence[Any]) -> list[Call]:
    """Calls with `arguments` in the places of their whole numbers."""
    given = iter(arguments)
    return [replace(call, args=_put(call.args, given), kwargs=_put(call.kwargs, given)) for call in calls]


def _numbers_in(tree: Any) -> Iterator[int]:
    if is_some_size(tree):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _numbers_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _numbers_in(item)


def _put(tree: Any, given: Iterator[Any]) -> Any:
    if is_some_size(tree):
        return next(given)
    if isinstance(tree, (tuple, list)):
        return type(tree)([_put(item, given) for item in tree])
    if isinstance(tree, dict):
        return {key: _put(item, given) for key, item in tree.items()}
    return tree


class _Symbol(NamedTuple):
    place: int


class _Above(NamedTuple):
    """Of a stride: the size of that dimension times its stride."""

    dimension: int


_Entry = int | _Symbol


class _Lies(NamedTuple):
    """How a tensor lies, at any sizes."""

    sizes: tuple[_Entry, ...]
    strides: tuple[tuple[int, _Entry | _Above], ...]  # by dimension, each after those of which it is made


@dataclass(frozen=True, slots=True)
class Pattern:
    """What regions of one form have in common: symbols stand for what varies."""

    symbols: tuple[int, ...]  # what they stand for in the last of these regions
    inputs: tuple[_Lies, ...]
    arguments: tuple[_Entry, ...]

    @classmethod
    def of(cls, regions: Sequence[RegionSizes]) -> Pattern:
        """The pattern of these regions, all of one `form_of_any_size`."""
        symbols: dict[tuple[int, ...], _Symbol] = {}

        def entry(numbers: tuple[int, ...]) -> _Entry:
            if len(set(numbers)) == 1:
                return numbers[0]
            assert all(map(is_some_size, numbers)), numbers  # others are in the form
            return symbols.setdefault(numbers, _Symbol(len(symbols)))

        inputs = tuple(_lies(layouts, entry) for layouts in zip(*(one.layouts for one in regions), strict=True))
        arguments = tuple(map(entry, zip(*(one.arguments for one in regions), strict=True)))
        return cls(tuple(numbers[-1] for numbers in symbols), inputs, arguments)

    def numbers_at(self, region: RegionSizes) -> tuple[int, ...] | None:
        """What the symbols stand for in that region; None where it does not fit the pattern."""
        numbers: dict[int, int] = {}
        pairs = list(zip(self.arguments, region.arguments, strict=True))
        for lies, (sizes, strides) in zip(self.inputs, region.layouts, strict=True):
            pairs += zip(lies.sizes, sizes, strict=True)
            pairs += [(one, strides[place]) for place, one in lies.strides if not isinstance(one, _Above)]
        for one, number in pairs:
            if isinstance(one, _Symbol) and numbers.setdefault(one.place, number) != number:
                return None
        found = tuple(numbers[place] for place in range(len(self.symbols)))
        return found if self.region_at(found) == region else None

    def region_at(self, numbers: Sequence[Any]) -> RegionSizes:
        """The region where the symbols stand for these `numbers`."""
        return RegionSizes(self.layouts_at(numbers), self.arguments_at(numbers))

    def layouts_at(self, numbers: Sequence[Any]) -> tuple[Layout, ...]:
        """How the inputs lie where the symbols stand for these `numbers`."""
        return tuple(_layout(lies, numbers) for lies in self.inputs)

    def arguments_at(self, numbers: Sequence[Any]) -> tuple[Any, ...]:
        """What its operations are given where the symbols stand for these `numbers`."""
        return tuple(_at(one, numbers) for one in self.arguments)


def _at(entry: _Entry, numbers: Sequence[Any]) -> Any:
    return numbers[entry.place] if isinstance(entry, _Symbol) else entry


def _layout(lies: _Lies, numbers: Sequence[Any]) -> Layout:
    sizes = tuple(_at(one, numbers) for one in lies.sizes)
    strides: dict[int, Any] = {}
    for place, one in lies.strides:
        if isinstance(one, _Above):
            strides[place] = sizes[one.dimension] * strides[one.dimension]
        else:
            strides[place] = _at(one, numbers)
    return sizes, tuple(strides[place] for place in range(len(sizes)))


def _lies(layouts: Sequence[Layout], entry: Callable[[tuple[int, ...]], _Entry]) -> _Lies:
    sizes = [tuple(one) for one in zip(*(layout[0] for layout in layouts), strict=True)]
    strides = [tuple(one) for one in zip(*(layout[1] for layout in layouts), strict=True)]
    made: list[tuple[int, _Entry | _Above]] = []
    for place in sorted(range(len(strides)), key=lambda one: (strides[one][-1], one)):
        found: _Entry | _Above | None = strides[place][0] if len(set(strides[place])) == 1 else None
        for other, _ in made if found is None else ():
            if strides[place] == tuple(
                size * stride for size, stride in zip(sizes[other], strides[other], strict=True)
            ):
                found = _Above(other)
                break
        made.append((place, entry(strides[place]) if found is None else found))
    return _Lies(tuple(map(entry, sizes)), tuple(made))


@dataclass(frozen=True, slots=True)
class OfPattern:
    """For which sizes code holds that was compiled for a pattern."""

    pattern: Pattern
    conditions: Callable[[Sequence[int]], bool]  # on what the symbols stand for
    places: tuple[int, ...]  # of the inputs of these regions, those that it is given
    handed: tuple[Handed, ...] = ()  # what it is given after them

    def numbers_at(self, region: RegionSizes) -> tuple[int, ...] | None:
        """What the code is given for that region; None where it does not hold."""
        numbers = self.pattern.numbers_at(region)
        return numbers if numbers is not None and self.conditions(numbers) else None

    def holds(self, layouts: Sequence[Layout], numbers: tuple[int, ...]) -> bool:
        """Whether the code is right for inputs that lie so, where these are its numbers."""
        lies = self.pattern.layouts_at(numbers)
        given = (*(lies[place] for place in self.places), *(one.layout(numbers) for one in self.handed))
        return given == tuple(layouts) and self.conditions(numbers)
