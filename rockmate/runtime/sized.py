"""Code that holds for several sizes: where it reads numbers from the step's tables instead of having them in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rkgb.ir.call import Call

Layout = tuple[Any, Any, Any]
"""Size, stride and offset of a tensor, in which a `Size` may stand for a number."""


@dataclass(frozen=True, slots=True)
class Size:
    """Stands for a number that depends on the sizes of a call."""

    text: str  # what it is looked up by, and what the reader sees


@dataclass(frozen=True, eq=False, slots=True)
class SizedCode:
    """What of a graph's code depends on sizes."""

    calls: Mapping[str, Call]  # by operation: calls in whose arguments sizes stand
    values: Mapping[str, Layout]  # by value or phantom: of what is made anew
    saved: Mapping[tuple[str, int], Layout]  # of what autograd saves: by operation, and place
    symbols: tuple[str, ...]  # what the sizes' names are, as lines of a comment
    is_checked: bool = False  # whether the shape of each value is compared with what it is to be
