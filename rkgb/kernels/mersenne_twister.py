"""Zeros and ones from the stream of PyTorch's CPU generators: as its own operation draws them, in a part of the time.

A CPU generator is a Mersenne Twister (Matsumoto and Nishimura, 1998): 624 words of state, of which all are renewed at
once, and a word is handed on after some shifts that spread its bits. PyTorch's operation asks for one word after the
other. Here all 624 are renewed, spread and compared in loops that the compiler turns into vector instructions.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

WORDS = 624  # of the state
_BITS = 53  # of a number between 0 and 1, as many as a double has

# What `torch.Generator.get_state` gives of a CPU generator; `left` counts the words until they are renewed, and one.
_STATE = np.dtype(
    [
        ("seed", "=u8"),
        ("left", "=i4"),
        ("is_seeded", "=i4"),
        ("next", "=u8"),
        ("words", "=u8", (WORDS,)),
        ("of_normal_numbers", "u1", (40,)),
    ]
)

Draw = Callable[[NDArray[Any], int, NDArray[Any], Any, Any, Any], int]


def draw_into(places: NDArray[Any], p: float, one: int, generator: torch.Generator, draw: Draw) -> None:
    """Write `one` or 0 into the `places`, unsigned integers, as `generator` says for the probability `p` of a one.

    The generator goes on as after PyTorch's operation. `draw` is that of `loops`.
    """
    state = generator.get_state()
    told = state.numpy().view(_STATE)[0]
    words = told["words"].astype(np.uint32)
    least = math.ceil(math.ldexp(p, _BITS))  # an integer below it is a number below p
    high, low = np.uint32(least >> 32), np.uint32(least & 0xFFFFFFFF)
    used = draw(words, WORDS + 1 - int(told["left"]), places, high, low, places.dtype.type(one))
    told["words"], told["next"], told["left"] = words, used, WORDS + 1 - used
    generator.set_state(state)


@functools.cache
def drawing() -> Draw | None:
    """The compiled loops; None where numba, which compiles them, is not installed, or is told not to."""
    try:
        draw: Draw = importlib.import_module("rkgb.kernels.loops").draw
    except ImportError:
        return None
    return draw
