"""Compiled parts of a family: code for any size, which is given the numbers that stand for the sizes of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rkgb import DGraph, DNode
from rkgb.ir.compiled import AnySize, CompiledCall, Layout
from rockmate.errors import SizeMismatch

_MOST_KNOWN = 4096  # calls of one part that were looked at


class AtAnySize:
    """The code of a compiled part, called with its inputs and then with its numbers."""

    def __init__(self, call: CompiledCall, any_size: AnySize) -> None:
        self._call, self._any_size = call, any_size
        self._known: set[Any] = set()

    @property
    def __name__(self) -> str:
        return self._call.name

    @property
    def count(self) -> int:
        """How many numbers it takes."""
        return len(self._call.numbers)

    def __call__(self, *given: Any) -> Any:
        """What the part gives. Raises `SizeMismatch` where its code is not for inputs that lie so."""
        inputs: Sequence[torch.Tensor]
        inputs, numbers = given[: -self.count], given[-self.count :]
        if not self.holds([(tuple(one.shape), one.stride()) for one in inputs], numbers):
            raise SizeMismatch(f"{self.__name__} was not compiled for inputs that lie as these do")
        return self._call.at(numbers, inputs)

    def holds(self, layouts: Iterable[Layout], numbers: tuple[int, ...]) -> bool:
        """Whether its code is right for inputs that lie so, where these are its numbers."""
        lies = tuple(layouts)
        key = numbers, lies
        if key in self._known:
            return True
        if not self._any_size.holds(lies, numbers):
            return False
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(key)
        return True


def code_of(op: DNode) -> int:
    """Equal for operations that run the same compiled code; of those that are no compiled part, too."""
    function = op.call.function
    return id(function.kernels[0]) if isinstance(function, CompiledCall) and function.kernels else 0


def has_parts_of_one_size(graph: DGraph) -> bool:
    """Whether parts of it were compiled for its sizes alone."""
    parts = [op.call.function for op in graph if isinstance(op.call.function, CompiledCall)]
    return any(not part.kernels or part.kernels[0].any_size is None for part in parts)
