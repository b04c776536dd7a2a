"""Numbers that depend on sizes, as polynomials: found from a few points, exactly, and evaluated at any other.

A `Point` has one size for each symbol: for each dimension, or group of dimensions, that varies from call to call.
Bytes, shapes and strides are sums of products of sizes, so that a few points tell the whole polynomial. Coefficients
are fractions, as half a length is a size, too; where a value is no whole number, the polynomial does not hold.

Kernels of attention on GPUs have whole rows: PyTorch pads masks to multiples of 8 elements, if they are none already,
and what the forward hands to the backward to multiples of 32. Such sizes are further symbols of a polynomial.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

Point = tuple[int, ...]
Monomial = tuple[int, ...]  # the exponent of each symbol, and then perhaps those of what `_PADDED` makes of each

_HIGHEST = 2  # exponent of a symbol: attention's scores have the square of a length
_HIGHEST_IN_ALL = 3  # as height times width times a batch
_PADDED: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("above", lambda size: 8 * (size // 8 + 1)),
    ("padded", lambda size: 32 * -(-size // 32)),
)


class NotWhole(Exception):
    """A polynomial of sizes has no whole value at a point: what it stood for is none there."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of monomials, each with its coefficient."""

    terms: tuple[tuple[Monomial, Fraction], ...]
    has_padded: bool = False  # whether monomials have exponents of padded sizes, too
    # The same in integers, over one denominator: it is evaluated far more often than it is made.
    _integers: tuple[tuple[Monomial, int], ...] = field(init=False, repr=False, compare=False)
    _denominator: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        denominator = math.lcm(*(Fraction(coefficient).denominator for _, coefficient in self.terms))
        integers = tuple((monomial, int(coefficient * denominator)) for monomial, coefficient in self.terms)
        object.__setattr__(self, "_integers", integers)
        object.__setattr__(self, "_denominator", denominator)

    def at(self, point: Point) -> int:
        """Its value. Raises `NotWhole`."""
        sizes = _with_padded(point) if self.has_padded else point
        total = sum(coefficient * _value(monomial, sizes) for monomial, coefficient in self._integers)
        whole, rest = divmod(total, self._denominator)
        if rest:
            raise NotWhole(f"{self} is {Fraction(total, self._denominator)}")
        return whole

    @property
    def constant(self) -> int | None:
        """Its value where it is the same at all points."""
        if not self.terms:
            return 0
        ((monomial, coefficient), *more) = self.terms
        return None if more or any(monomial) or coefficient.denominator != 1 else coefficient.numerator

    def __add__(self, other: Polynomial) -> Polynomial:
        return _summed([*self.terms, *other.terms], self.has_padded or other.has_padded)

    def __neg__(self) -> Polynomial:
        return Polynomial(tuple((monomial, -coefficient) for monomial, coefficient in self.terms), self.has_padded)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + -other

    def __mul__(self, other: Polynomial) -> Polynomial:
        return _summed(
            [
                (_product(mine, theirs), coefficient * factor)
                for mine, coefficient in self.terms
                for theirs, factor in other.terms
            ],
            self.has_padded or other.has_padded,
        )

    def __str__(self) -> str:
        texts = (_text(monomial, coefficient, self.has_padded) for monomial, coefficient in self.terms)
        return " + ".join(texts) or "0"


@dataclass(frozen=True, slots=True)
class Chords:
    """Bytes that are no polynomial, as the most of several is none: at least as many as there are.

    Each of the several is a polynomial without negative coefficients, of one size at most a square, that is nowhere
    above the values. So it is below any mixture of these whose mixtures of squares, of sizes and of ones are at least
    those of the point: the dual of the linear program for the largest such polynomial there. Of several sizes, it is at
    most what it is at a point above, and grows no faster than `_HIGHEST_IN_ALL` allows. What its parts are rounded up
    by comes on top.
    """

    points: tuple[Point, ...]
    values: tuple[int, ...]
    rounded_bytes: int = 0  # at most

    def at(self, point: Point) -> int:
        """So many bytes at most."""
        return self._largest(point) + self.rounded_bytes

    def _largest(self, point: Point) -> int:
        if len(point) == 1:
            found = _mixtures(self.points, point[0])
            return min(-(-sum(map(operator.mul, weights, self.values)) // whole) for weights, whole in found)
        above = [value for other, value in zip(self.points, self.values, strict=True) if _is_below(point, other)]
        if above:
            return min(above)
        growth = max(
            Fraction(size, known) for size, known in zip(point, map(max, zip(*self.points, strict=True)), strict=True)
        )
        return math.ceil(max(self.values) * growth**_HIGHEST_IN_ALL)

    def __str__(self) -> str:
        return f"at most {self.values}"


def _is_below(point: Point, other: Point) -> bool:
    return all(map(operator.le, point, other))


@cache
def _mixtures(points: tuple[Point, ...], size: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Mixtures of values at the `points`, as weights over a whole, that bound a polynomial at `size`; see `Chords`."""
    rows = [[Fraction(known) ** exponent for (known,) in points] for exponent in range(_HIGHEST + 1)]
    wanted = [Fraction(size) ** exponent for exponent in range(_HIGHEST + 1)]
    found: dict[tuple[tuple[int, ...], int], None] = {}
    for count in range(1, min(len(points), len(rows)) + 1):
        for places in itertools.combinations(range(len(points)), count):
            for tight in itertools.combinations(range(len(rows)), count):
                weights = _solution([[*(rows[row][place] for place in places), wanted[row]] for row in tight])
                if weights is None or min(weights) < 0:
                    continue
                by_place = dict(zip(places, weights, strict=True))
                whole = [by_place.get(place, Fraction(0)) for place in range(len(points))]
                if all(sum(map(operator.mul, whole, row)) >= least for row, least in zip(rows, wanted, strict=True)):
                    denominator = math.lcm(*(weight.denominator for weight in whole))
                    found[tuple(int(weight * denominator) for weight in whole), denominator] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes in whole blocks, as an allocator hands them out: at least as many as there are.

    Where sizes are padded, few and small blocks are of this form by chance, too. What they are of instead may be
    larger between the points; `beside` bounds it.
    """

    terms: Polynomial
    block_bytes: int
    beside: Chords | None = None

    def at(self, point: Point) -> int:
        """So many bytes at most."""
        largest = max(self.terms.at(point), self.beside.at(point) if self.beside else 0)
        return -(-largest // self.block_bytes) * self.block_bytes

    def __str__(self) -> str:
        return f"whole blocks of {self.terms}"


def bounded(values: tuple[int, ...], points: tuple[Point, ...], block_bytes: int) -> Polynomial | Blocks | Chords:
    """What has these `values` at the `points`, and elsewhere is at least as large as what they are of.

    Bytes of several storages at once, each in blocks of its own, are none of one formula: they are bounded.
    """
    found = fitted(values, points)
    if found is not None and (block_bytes == 1 or (len(found.terms) == 1 and not found.has_padded)):
        return found
    if block_bytes > 1:
        symbols = len(points[0])
        for monomials, has_padded in ((_monomials(symbols), False), (_padded_monomials(symbols), True)):
            for monomial in monomials:
                works = [_value(monomial, _with_padded(point) if has_padded else point) for point in points]
                most = min(value // work for value, work in zip(values, works, strict=True))
                if all(most * work > value - block_bytes for value, work in zip(values, works, strict=True)):
                    beside = Chords(points, values) if has_padded else None
                    return Blocks(_summed([(monomial, Fraction(most))], has_padded), block_bytes, beside)
    return Chords(points, values, (block_bytes - 1) * _BLOCKS)


_BLOCKS = 8  # that one number is the sum of, or so


def constant(value: int, symbols: int) -> Polynomial:
    """The polynomial that is `value` everywhere."""
    return Polynomial((((0,) * symbols, Fraction(value)),) if value else ())


def _summed(terms: Sequence[tuple[Monomial, Fraction]], has_padded: bool) -> Polynomial:
    found: dict[Monomial, Fraction] = {}
    symbols = max((len(monomial) for monomial, _ in terms), default=0)
    for known, coefficient in terms:
        monomial = known + (0,) * (symbols - len(known))
        found[monomial] = found.get(monomial, Fraction(0)) + coefficient
    kept = sorted((item for item in found.items() if item[1]), key=lambda item: (sum(item[0]), item))
    return Polynomial(tuple(kept), has_padded)


def symbol_name(index: int) -> str:
    """``n``, then ``n1``, ``n2``, …"""
    return f"n{index or ''}"


@cache
def fitted(values: tuple[int, ...], points: tuple[Point, ...]) -> Polynomial | None:
    """The polynomial of fewest and lowest terms that has these `values` at the `points`; None where none is sure.

    It has fewer terms than there are points, so that one of them at least confirms it.
    """
    if values == (0,) * len(values):
        return Polynomial(())
    plain = _monomials(len(points[0]))
    for count in range(1, len(points)):
        for chosen in itertools.combinations(plain, count):
            if (terms := _through(chosen, values, points)) is not None:
                return _summed(terms, has_padded=False)
    extended = tuple(map(_with_padded, points))
    for padded in _padded_monomials(len(points[0])):
        terms = _through((padded,), values, extended)
        if terms is not None and terms[0][1].denominator == 1:
            return _summed(terms, has_padded=True)
        # By how much a size is padded.
        rest = [_value(padded, sizes) - value for value, sizes in zip(values, extended, strict=True)]
        for place, sizes in enumerate(zip(*points, strict=True)):
            if rest == list(sizes):
                return _summed([(padded, Fraction(1)), (_symbol(place, len(padded)), Fraction(-1))], has_padded=True)
    return None


def _through(
    chosen: tuple[Monomial, ...], values: tuple[int, ...], points: tuple[Point, ...]
) -> list[tuple[Monomial, Fraction]] | None:
    """These monomials, all of them, with coefficients by which they have these values."""
    coefficients = _solved(chosen, values, points)
    if coefficients is None or not all(coefficients):
        return None
    return list(zip(chosen, coefficients, strict=True))


def _with_padded(point: Point) -> Point:
    return point + tuple(pad(size) for _, pad in _PADDED for size in point)


@cache
def _monomials(symbols: int) -> tuple[Monomial, ...]:
    """Those that a polynomial may have, the lowest first."""
    found = itertools.product(range(_HIGHEST + 1), repeat=symbols)
    return tuple(sorted((one for one in found if sum(one) <= _HIGHEST_IN_ALL), key=lambda one: (sum(one), one)))


@cache
def _padded_monomials(symbols: int) -> tuple[Monomial, ...]:
    """Those with one padded size in them, the lowest first."""
    padded = len(_PADDED) * symbols
    found = itertools.product(_monomials(symbols), range(padded))
    return tuple(monomial + _symbol(place, padded) for monomial, place in found if sum(monomial) < _HIGHEST_IN_ALL)


def _symbol(place: int, symbols: int) -> Monomial:
    return tuple(int(place == other) for other in range(symbols))


def _product(mine: Monomial, theirs: Monomial) -> Monomial:
    return tuple(map(sum, itertools.zip_longest(mine, theirs, fillvalue=0)))


def _solved(
    chosen: tuple[Monomial, ...], values: Sequence[int], points: Sequence[Point]
) -> tuple[Fraction, ...] | None:
    """The coefficients of these monomials, where they give all values; None where none do, or several."""
    rows = [
        [*(Fraction(_value(monomial, point)) for monomial in chosen), Fraction(value)]
        for point, value in zip(points, values, strict=True)
    ]
    return _solution(rows)


def _solution(rows: list[list[Fraction]]) -> tuple[Fraction, ...] | None:
    """What solves these equations, each its coefficients and its right side; None where nothing does, or more does."""
    unknowns = len(rows[0]) - 1
    for column in range(unknowns):
        pivot = next((row for row in rows[column:] if row[column]), None)
        if pivot is None:
            return None
        rows.remove(pivot)
        rows.insert(column, pivot)
        for place, row in enumerate(rows):
            if place != column and row[column]:
                factor = row[column] / pivot[column]
                rows[place] = [mine - factor * theirs for mine, theirs in zip(row, pivot, strict=True)]
    if any(row[-1] for row in rows[unknowns:]):
        return None
    return tuple(rows[place][-1] / rows[place][place] for place in range(unknowns))


def _value(monomial: Monomial, point: Point) -> int:
    return math.prod(size**exponent for size, exponent in zip(point, monomial, strict=True))


def _text(monomial: Monomial, coefficient: Fraction, has_padded: bool) -> str:
    names = [symbol_name(index) for index in range(len(monomial) // (1 + len(_PADDED) * has_padded))]
    names += [f"{kind}({name})" for kind, _ in _PADDED for name in names] if has_padded else []
    factors = [name for name, exponent in zip(names, monomial, strict=True) for _ in range(exponent)]
    if coefficient != 1 or not factors:
        factors.insert(0, str(coefficient))
    return " * ".join(factors)
