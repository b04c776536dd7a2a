"""Guards: what a module read out of its data while it was traced, checked at every later run.

A branch on data, ``.item()``, a result whose shape depends on data: the trace holds for runs that read
the same. A guard is an operation of the graph that reads again and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rkgb.errors import GuardError
from rkgb.ir.call import function_name
from rkgb.source import opaque_advice

_SHOWN = 60  # characters of a value in messages


@dataclass(frozen=True, eq=False, slots=True)
class Guard:
    """Reads again what the module read into Python, and compares it with what was read then.

    Calling it raises `GuardError` where the two differ.
    """

    read: Callable[..., Any]
    expected: Any
    place: str  # module path and source line of the read
    # Not read by the user's code as far as is known: by a check inside PyTorch, or a shape that nobody may have
    # looked at. Dropped where a run that reads another value proves to be exact.
    may_vary: bool = False
    is_guard = True

    @property
    def __name__(self) -> str:
        return "guard"

    def __repr__(self) -> str:
        return f"guard({function_name(self.read)} == {_short(self.expected)})"

    def __call__(self, *args: Any) -> None:
        """Check one run."""
        with torch.no_grad():
            found = self.read(*args)
        if not _same(found, self.expected):
            raise GuardError(
                f"at {self.place} the module reads {_short(found)} out of its data ({function_name(self.read)}), but "
                f"read {_short(self.expected)} when it was traced: it would go another way than the graph. Trace with "
                f"a sample that goes this way, keep such values in tensors, or {opaque_advice(self.place)}.",
                "" if self.place.startswith("(root)") else self.place.partition(" ")[0],
            )


def shape_guard(shape: tuple[int, ...], place: str) -> Guard:
    """The guard of a value that had `shape` when it was traced."""
    return Guard(read_shape, shape, place, may_vary=True)


def read_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of `tensor`."""
    return tuple(tensor.shape)


def snapshot(value: Any) -> Any:
    """A copy of what was read that later writes to its source do not change."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, np.ndarray) or isinstance(expected, np.ndarray):
        numeric = found.dtype.kind in "fc"
        return bool(np.array_equal(found, expected, equal_nan=numeric))
    return bool(found == expected) or (found != found and expected != expected)  # a NaN is read as a NaN again


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
