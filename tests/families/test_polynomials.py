"""Functions of sizes that are found from a few values."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rockmate.families.aligned import NotAligned, aligned
from rockmate.families.polynomials import Chords, NotWhole, Polynomial, constant, fitted

LENGTHS = ((16,), (24,), (56,), (72,))
SQUARES = ((4, 16), (4, 24), (4, 56), (4, 72), (3, 40))  # a batch that is always the same, but for the last one


def values(function, points):
    return tuple(function(*point) for point in points)


@pytest.mark.parametrize(
    "function",
    [lambda n: 0, lambda n: 7, lambda n: 4 * n, lambda n: n * n, lambda n: 3 * n * n + 5 * n + 11, lambda n: n // 8],
)
def test_what_sizes_give_is_found_and_holds_elsewhere(function):
    found = fitted(values(function, LENGTHS), LENGTHS)
    assert found is not None
    assert [found.at((n,)) for n in (8, 40, 800)] == [function(n) for n in (8, 40, 800)]


@pytest.mark.parametrize(
    "function",
    [lambda b, n: b * n, lambda b, n: 8 * b * n * n, lambda b, n: n + 3, lambda b, n: 64 * b, lambda b, n: 5],
)
def test_one_other_batch_tells_what_is_of_the_batch(function):
    found = fitted(values(function, SQUARES), SQUARES)
    assert found is not None
    assert found.at((7, 100)) == function(7, 100)


@pytest.mark.parametrize("function", [lambda n: min(n, 40), lambda n: max(n * n, 30 * n), lambda n: (n * 7919) % 101])
def test_what_is_no_polynomial_is_none(function):
    assert fitted(values(function, LENGTHS), LENGTHS) is None


def test_three_values_do_not_tell_a_polynomial_of_three_terms():
    assert fitted(values(lambda n: n * n + n + 1, LENGTHS[:3]), LENGTHS[:3]) is None


@pytest.mark.parametrize(
    ("function", "pad"),
    [
        (lambda n, up: up - n, lambda n: 8 * (n // 8 + 1)),
        (lambda n, up: 3 * up, lambda n: 8 * (n // 8 + 1)),
        (lambda n, up: 4 * n * up, lambda n: 8 * (n // 8 + 1)),
        (lambda n, up: 12 * up, lambda n: (n + 31) // 32 * 32),
    ],
)
def test_sizes_that_pytorch_pads_to_whole_rows_are_found(function, pad):
    def padded(n):
        return function(n, pad(n))

    lengths = ((29,), (34,), (45,), (9,))
    found = fitted(values(padded, lengths), lengths)
    assert found is not None
    assert "(n)" in str(found)
    assert [found.at((n,)) for n in range(1, 70)] == [padded(n) for n in range(1, 70)]
    assert [(found + found * found - constant(1, 1)).at((n,)) for n in (7, 8)] == [
        padded(n) + padded(n) ** 2 - 1 for n in (7, 8)
    ]


def test_half_a_length_is_none_where_it_is_no_whole_number():
    found = fitted(values(lambda n: n // 8, LENGTHS), LENGTHS)
    assert found is not None
    with pytest.raises(NotWhole, match="9/8"):
        found.at((9,))


def test_arithmetic_is_that_of_the_values():
    n, two = Polynomial((((1,), 1),)), constant(2, 1)
    both = (n + two) * (n - two)
    assert [both.at((size,)) for size in (0, 3, 10)] == [size * size - 4 for size in (0, 3, 10)]
    assert str(both) == "-4 + n * n"
    assert str(n) == "n"
    assert (n - n).constant == 0


@given(
    st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=8),
    st.lists(st.integers(1, 60), min_size=3, max_size=5, unique=True),
    st.integers(1, 90),
)
@example([(8, 28, 0)], [1, 15, 35], 25)  # which 5 n padded(n) has at these points, too
@example([(0, 20, 0)], [1, 20, 35], 30)
def test_chords_are_above_sums_of_whole_blocks(terms, lengths, length):
    """As an allocator hands them out: each part is rounded up by itself."""

    def blocks(n):
        return sum(-(-(a * n * n + b * n + c) // 512) * 512 for a, b, c in terms)

    points = tuple((n,) for n in lengths)
    found = aligned([blocks(n) for n in lengths], points, 512)
    if min(lengths) <= length <= max(lengths):  # but for a few blocks, which several parts are rounded up by
        assert (found if isinstance(found, int) else found.at((length,))) >= blocks(length) - 512 * len(terms)


@given(
    st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), min_size=3, max_size=5, unique=True),
    st.integers(1, 90),
)
def test_chords_are_above_the_most_of_polynomials(terms, lengths, length):
    def most(n):
        return max(a * n * n + b * n + c for a, b, c in terms)

    points = tuple((n,) for n in lengths)
    assert Chords(points, values(most, points)).at((length,)) >= most(length)


def test_floats_are_times_where_something_was_measured_and_no_numbers_for_operations():
    points = ((16,), (24,), (56,))
    assert aligned([1.0, 2.0, 6.0], points, 1).at((40,)) == pytest.approx(4.0)
    with pytest.raises(NotAligned):
        aligned([[1 / 16], [1 / 24], [1 / 56]], points)
    assert aligned([[0.5], [0.5], [0.5]], points) == [0.5]


def test_what_is_the_most_of_polynomials_is_bounded_closely_between_far_points():
    """As peaks of attention, which small calls do not have of the square of their length."""

    def peak(n):
        return max(8 * n * n + 3 * n, 900 * n)

    points = ((37,), (74,), (506,))
    found = Chords(points, values(peak, points))
    assert all(peak(n) <= found.at((n,)) <= 1.35 * peak(n) for n in range(37, 700))
    assert all(found.at((n,)) <= 1.07 * peak(n) for n in range(300, 700))
