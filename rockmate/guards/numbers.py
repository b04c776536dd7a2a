"""Numbers that a plan takes from each call: arguments and settings that enter the graph as scalars alone.

A temperature, a weight that is annealed, a step count: where all that becomes of one is arithmetic and an operand of
operations, the generated code computes that operand anew in every call. What Python decided by such a number is asked
again: a plan holds as long as the answers are those of its trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rkgb import Sample
from rkgb.ir.call import Call

Value = int | float
# Where C++ may take another way for a number: what depends on such a one is a plan of its own.
_SPECIAL = (0, 1, -1, 2, 0.5)


@dataclass(frozen=True, slots=True)
class Number:
    """An argument or a setting that is a number."""

    text: str
    argument: tuple[Any, ...] | None = None  # its path in ``(args, kwargs)``
    setting: tuple[str, str | None, str] | None = None  # submodule, attribute that holds the configuration, name

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """What Python computed of numbers, to be computed in the same way of others."""

    text: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]  # each a `Number`, an `Expression` or a value

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """What Python asked of numbers, and the answer that leads to the plan's graph."""

    asked: Number | Expression
    answer: Any

    def holds(self, known: Mapping[Number, Value]) -> bool:
        """Whether the answer is the same for these numbers."""
        return is_same(evaluated(self.asked, known), self.answer)


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands in the arguments of a call for what an expression gives."""

    expression: Number | Expression


@dataclass(frozen=True, eq=False, slots=True)
class RunTimeNumbers:
    """The free numbers of a plan: where they come from, what they must answer, and the calls that take them."""

    numbers: tuple[Number, ...]
    questions: tuple[Question, ...]
    operands: Mapping[tuple[str, tuple[Any, ...]], Number | Expression]  # by operation, and place in its arguments
    _asked: tuple[Question, ...] = field(init=False, repr=False)  # each once
    _needed: Mapping[str, Number | Expression] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        asked = {(str(question.asked), repr(question.answer)): question for question in self.questions}
        object.__setattr__(self, "_asked", tuple(asked.values()))
        object.__setattr__(self, "_needed", {str(expression): expression for expression in self.operands.values()})

    def known(self, call: Sample, module: Any) -> dict[Number, Value] | None:
        """The numbers of a call on `module` as it is; None where one is no number."""
        found: dict[Number, Value] = {}
        for number in self.numbers:
            value = at(call, number.argument) if number.argument is not None else setting_of(module, number)
            if type(value) not in (int, float):
                return None
            found[number] = value
        return found

    def holds(self, known: Mapping[Number, Value]) -> bool:
        """Whether the plan is for these numbers."""
        try:
            return all(question.holds(known) for question in self._asked)
        except ArithmeticError:
            return False  # the module itself will raise it

    def values(self, known: Mapping[Number, Value]) -> dict[str, Value]:
        """What the generated code looks up, by the text of each expression."""
        return {text: evaluated(expression, known) for text, expression in self._needed.items()}

    def call(self, name: str, call: Call) -> Call:
        """`call`, of the operation `name`, with operands in their places."""
        places = {place: expression for (op, place), expression in self.operands.items() if op == name}
        if not places:
            return call
        args, kwargs = list(call.args), dict(call.kwargs)
        for (where, key), expression in places.items():
            if where == 0:
                args[key] = Operand(expression)
            else:
                kwargs[key] = Operand(expression)
        return Call(call.function, tuple(args), kwargs)


def evaluated(tree: Any, known: Mapping[Number, Value]) -> Any:
    """The value of an expression for these numbers."""
    if isinstance(tree, Number):
        return known[tree]
    if isinstance(tree, Expression):
        return tree.function(*(evaluated(operand, known) for operand in tree.operands))
    return tree


def is_same(value: Any, other: Any) -> bool:
    """Equality of type and of every bit: a NaN is equal to a NaN, and a zero not to a negative one."""
    return type(value) is type(other) and repr(value) == repr(other)


def is_same_structure(mine: Any, other: Any) -> bool:
    """Equality of two structures of arguments, in which 1 is neither 1.0 nor True."""
    if type(mine) is tuple and type(other) is tuple:
        return len(mine) == len(other) and all(map(is_same_structure, mine, other))
    return is_same(mine, other) if type(mine) in (bool, int, float) else bool(mine == other)


def kind_of(value: Value) -> str:
    """In which way C++ may treat a number: the same for all that are ordinary and of one sign and side of one."""
    if not math.isfinite(value) or value in _SPECIAL:
        return repr(value)
    return f"{type(value).__name__} {'-' if value < 0 else '+'} {'below' if abs(value) < 1 else 'above'} one"


def numbers_in(skeleton: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Value]]:
    """Numbers in the structure of a call's arguments, each with its path."""
    if type(skeleton) in (int, float):
        yield path, skeleton
    elif type(skeleton) is tuple and skeleton and skeleton[0] in ("tuple", "list"):
        for index, item in enumerate(skeleton[1:]):
            yield from numbers_in(item, (*path, index))
    elif type(skeleton) is tuple and skeleton and skeleton[0] == "dict":
        for key, item in skeleton[1:]:
            yield from numbers_in(item, (*path, key))


def blanked(skeleton: Any, free: frozenset[tuple[Any, ...]], path: tuple[Any, ...] = ()) -> Any:
    """The structure with the kind of number in the place of each one that is `free`."""
    if type(skeleton) in (int, float):
        return type(skeleton) if path in free else skeleton
    if type(skeleton) is not tuple or not skeleton:
        return skeleton
    if skeleton[0] in ("tuple", "list"):
        return (skeleton[0], *(blanked(item, free, (*path, index)) for index, item in enumerate(skeleton[1:])))
    if skeleton[0] == "dict":
        return ("dict", *((key, blanked(item, free, (*path, key))) for key, item in skeleton[1:]))
    return skeleton


def at(call: Sample, path: tuple[Any, ...]) -> Any:
    """What is at `path` in the arguments."""
    found: Any = (call.args, call.kwargs)
    for step in path:
        found = found[step]
    return found


def with_values(call: Sample, values: Mapping[tuple[Any, ...], Any]) -> Sample:
    """The call with other values at these paths."""

    def put(tree: Any, path: tuple[Any, ...]) -> Any:
        if path in values:
            return values[path]
        if not any(place[: len(path)] == path for place in values):
            return tree
        if isinstance(tree, dict):
            return {key: put(item, (*path, key)) for key, item in tree.items()}
        return type(tree)(put(item, (*path, index)) for index, item in enumerate(tree))

    args, kwargs = put((call.args, call.kwargs), ())
    return Sample(args, kwargs)


def setting_holder(module: Any, number: Number) -> dict[str, Any]:
    """The attributes among which a setting is."""
    assert number.setting is not None
    path, configuration, _ = number.setting
    holder = vars(module.get_submodule(path))
    return holder if configuration is None else vars(holder[configuration])


def setting_of(module: Any, number: Number) -> Any:
    """The value of a setting; None where there is none."""
    assert number.setting is not None
    return setting_holder(module, number).get(number.setting[2])
