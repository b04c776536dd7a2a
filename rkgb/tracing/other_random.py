"""Random numbers of Python and of NumPy: streams that belong to no device, and that no run of a graph draws from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


def other_random_states() -> dict[str, Any]:
    """The states of these streams, by name."""
    numpy: Any = np.random.get_state()
    return {
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy),
    }


@contextlib.contextmanager
def other_random_states_kept() -> Iterator[None]:
    """Give Python's and NumPy's random numbers back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
