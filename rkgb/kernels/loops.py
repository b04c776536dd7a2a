"""Loops that numba compiles; to be imported where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from rkgb.kernels.mersenne_twister import WORDS

_MIDDLE = 397  # from a word to the one that it is joined with
_HIGHEST, _OTHERS, _MATRIX = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
_ONE, _ZERO = np.uint32(1), np.uint32(0)
_HIGH_BITS = np.uint32((1 << 21) - 1)  # of a pair's first word: 53 bits of the two make a number


if getattr(numba.config, "DISABLE_JIT", False):
    raise ImportError("numba is told to compile nothing")


def _compiled(loop: Callable[..., Any]) -> Any:
    try:
        return numba.njit(cache=True)(loop)
    except RuntimeError:  # there is no folder to keep the machine code in
        return numba.njit(loop)


@_compiled
def _renew(words: NDArray[np.uint32]) -> None:
    """The next words of the state, in the place of these. Three loops, whose turns do not wait for each other's."""
    for place in range(WORDS - _MIDDLE):
        bits = (words[place] & _HIGHEST) | (words[place + 1] & _OTHERS)
        words[place] = words[place + _MIDDLE] ^ (bits >> _ONE) ^ ((_ZERO - (bits & _ONE)) & _MATRIX)
    for place in range(WORDS - _MIDDLE, WORDS - 1):
        bits = (words[place] & _HIGHEST) | (words[place + 1] & _OTHERS)
        words[place] = words[place + _MIDDLE - WORDS] ^ (bits >> _ONE) ^ ((_ZERO - (bits & _ONE)) & _MATRIX)
    bits = (words[WORDS - 1] & _HIGHEST) | (words[0] & _OTHERS)
    words[WORDS - 1] = words[_MIDDLE - 1] ^ (bits >> _ONE) ^ ((_ZERO - (bits & _ONE)) & _MATRIX)


@_compiled
def _spread(words: NDArray[np.uint32], into: NDArray[np.uint32]) -> None:
    """The words that are handed on."""
    for place in range(WORDS):
        bits = words[place]
        bits ^= bits >> np.uint32(11)
        bits ^= (bits << np.uint32(7)) & np.uint32(0x9D2C5680)
        bits ^= (bits << np.uint32(15)) & np.uint32(0xEFC60000)
        bits ^= bits >> np.uint32(18)
        into[place] = bits


@_compiled
def draw(words: NDArray[np.uint32], used: int, places: NDArray[Any], high: np.uint32, low: np.uint32, one: Any) -> int:
    """Write `one` into those `places` whose number is below that of the words `high` and `low`, and 0 into the others.

    `used` of the `words` were handed on. Returns how many are after this; the words are renewed as often as need be.
    """
    handed = np.empty(WORDS, np.uint32)
    _spread(words, handed)
    zero = one ^ one
    done = 0
    while done < places.size:
        if used == WORDS:
            _renew(words)
            _spread(words, handed)
            used = 0
        pairs = min(places.size - done, (WORDS - used) // 2)
        if pairs:
            given, into = handed[used : used + 2 * pairs], places[done : done + pairs]
            for place in range(pairs):
                first, second = given[2 * place] & _HIGH_BITS, given[2 * place + 1]
                into[place] = one if (first < high) | ((first == high) & (second < low)) else zero
            used += 2 * pairs
            done += pairs
            continue
        first = handed[WORDS - 1] & _HIGH_BITS  # the second word is of the next ones
        _renew(words)
        _spread(words, handed)
        places[done] = one if (first < high) | ((first == high) & (handed[0] < low)) else zero
        used = 1
        done += 1
    return used
