"""What Python computes with sizes, as functions of a point: what the front end has followed (`rkgb.sizes`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rkgb.sizes import OPERATIONS, Computed, SizeRead, Unknown
from rockmate.families.polynomials import Point, Polynomial, constant

_POLYNOMIAL: Mapping[str, Callable[..., Polynomial]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "negative": operator.neg,
}


@dataclass(frozen=True, slots=True)
class Formula:
    """An operation on polynomials of sizes, on other formulas, and on numbers."""

    operation: str
    operands: tuple[Any, ...]

    def at(self, point: Point) -> Any:
        """Its value. Raises `NotWhole`, and what Python raises."""
        return OPERATIONS[self.operation](
            *(one.at(point) if isinstance(one, (Polynomial, Formula)) else one for one in self.operands)
        )

    def __str__(self) -> str:
        texts = [f"({one})" if isinstance(one, (Polynomial, Formula)) else str(one) for one in self.operands]
        return f" {self.operation} ".join(texts) if len(texts) == 2 else f"{self.operation}{''.join(texts)}"


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number that comes of sizes that do not vary: whatever it is, it is that in every call."""


class Unfollowed(Exception):
    """A number comes of sizes in a way that is not known, or in ways that differ from call to call."""


def formula(expressions: Sequence[Any], size: Callable[[Sequence[SizeRead]], Polynomial], symbols: int) -> Any:
    """What expressions of several calls have in common: a polynomial, a formula or a number, or that it is `Fixed`.

    `size` tells what was read in them all. Raises `Unfollowed`.
    """
    first: Any = expressions[0]
    if any(type(one) is not type(first) for one in expressions):
        raise Unfollowed(str(first))
    if isinstance(first, SizeRead):
        return size(expressions)
    if isinstance(first, (Computed, Unknown)):
        if any((one.operation, len(one.operands)) != (first.operation, len(first.operands)) for one in expressions):
            raise Unfollowed(str(first))
        operands = [formula(parts, size, symbols) for parts in zip(*(one.operands for one in expressions), strict=True)]
        if isinstance(first, Computed) and not any(isinstance(one, Fixed) for one in operands):
            return _applied(first.operation, operands, symbols)
        if all(isinstance(_number(one), (bool, int, float, Fixed)) for one in operands):
            return Fixed()
        raise Unfollowed(str(first))
    if isinstance(first, (bool, int, float)) and all(one == first for one in expressions):
        return first
    raise Unfollowed(str(first))


def _applied(operation: str, operands: list[Any], symbols: int) -> Any:
    if operation in _POLYNOMIAL and all(isinstance(one, Polynomial) or type(one) is int for one in operands):
        given = [one if isinstance(one, Polynomial) else constant(one, symbols) for one in operands]
        return _POLYNOMIAL[operation](*given)
    fixed = list(map(_number, operands))
    if all(isinstance(one, (bool, int, float)) for one in fixed):
        return OPERATIONS[operation](*fixed)
    return Formula(operation, tuple(operands))


def _number(operand: Any) -> Any:
    """The number that a constant polynomial is."""
    found = operand.constant if isinstance(operand, Polynomial) else None
    return operand if found is None else found
