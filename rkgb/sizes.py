"""Numbers of a trace that come of sizes: as expressions, so that they can be computed for other sizes.

A module computes with the sizes of its tensors, and hands the results to operations. Where the front end has followed
what Python did, each such number is an expression of sizes that were read (`Call.sizes`), and each decision that
Python made by one is a `SizeQuestion`: a run on other sizes goes the same way if all questions have the same answers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Number = bool | int | float

OPERATIONS: Mapping[str, Callable[..., Number]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "negative": operator.neg,
    "abs": abs,
    "max": max,
    "min": min,
    "not": operator.not_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "bool": bool,
    "int": int,
    "float": float,
}
"""What Python computes with sizes, by the name that a `Computed` has for it."""

# What the tracer runs in the place of these, on tensors that hold one number, or on one and a number.
_NAMES: Mapping[str, str] = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "true_divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "pow": "**",
    "neg": "negative",
    "abs": "abs",
    "maximum": "max",
    "minimum": "min",
    "logical_not": "not",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}


@dataclass(frozen=True, slots=True)
class SizeRead:
    """The size of a value in one of its dimensions, which Python read."""

    value: str
    dimension: int
    seen: int = field(compare=False)  # on the sample


@dataclass(frozen=True, slots=True)
class Computed:
    """What one of the `OPERATIONS` gives."""

    operation: str
    operands: tuple[Any, ...]  # each a `SizeRead`, a `Computed` or a number


@dataclass(frozen=True, slots=True)
class Unknown:
    """A number that comes of sizes in a way that was not followed: it is the same where its operands are."""

    operation: str
    operands: tuple[Any, ...]


SizeExpression = SizeRead | Computed | Unknown


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """What Python asked of sizes, and the answer with which it went on."""

    asked: SizeExpression
    answer: Number


def evaluated(tree: Any, read: Callable[[SizeRead], Number]) -> Any:
    """The value of an expression, or of a number, where `read` tells sizes. Raises what Python would raise."""
    if isinstance(tree, SizeRead):
        return read(tree)
    if isinstance(tree, Unknown):
        raise ValueError(tree.operation)
    if isinstance(tree, Computed):
        return OPERATIONS[tree.operation](*(evaluated(operand, read) for operand in tree.operands))
    return tree


def computed(function: Any, operands: tuple[Any, ...], result: Number) -> SizeExpression:
    """What the tracer's `function` gives: of `operands` that are expressions or numbers, where that is `result`.

    The tracer computes in tensors, and Python in its own numbers: an expression is what Python computes.
    """
    operation = str(function._schema.name).removeprefix("aten::")
    if operation in ("add", "sub", "rsub") and len(operands) == 3 and operands[-1] == 1:
        operands = operands[:2]  # the third is what the second is multiplied by
    if operation == "rsub":
        operation, operands = "sub", operands[::-1]
    if operation == "to":
        operation, operands = type(result).__name__, operands[:1]
    name = operation if operation in ("int", "float", "bool") else _NAMES.get(operation)
    if name is None:
        return Unknown(operation, operands)
    try:
        expression = Computed(name, operands)
        value = evaluated(expression, lambda read: read.seen)
    except (ArithmeticError, TypeError, ValueError):
        return Unknown(operation, operands)
    return expression if type(value) is type(result) and value == result else Unknown(operation, operands)


def cast(kind: type, operand: Any) -> SizeExpression:
    """A number made a ``bool``, an ``int`` or a ``float``."""
    try:
        seen = evaluated(operand, lambda read: read.seen)
    except ValueError:
        return Unknown(kind.__name__, (operand,))
    return operand if type(seen) is kind else Computed(kind.__name__, (operand,))
