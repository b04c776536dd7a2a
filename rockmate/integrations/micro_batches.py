"""Batches that a trainer accumulates to one step of the optimizer: so many rows at a time, so many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample
from rkgb.state.module_state import random_states
from rkgb.state.other_random import other_random_states_kept
from rockmate.memory.budget import Budget
from rockmate.options import PlanOptions
from rockmate.queries.batch_search import LargestBatch
from rockmate.queries.batches import MakeBatch
from rockmate.queries.max_batch import max_batch


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """How the rows of one step of the optimizer are taken, on each device."""

    rows: int  # at a time
    times: int  # so often
    search: LargestBatch | None = None  # how that was found

    @property
    def rows_of_a_step(self) -> int:
        """Of all of them."""
        return self.rows * self.times

    def may_be(self) -> list[int]:
        """The rows at a time that give the same rows of a step, ascending."""
        whole = self.rows_of_a_step
        return [rows for rows in range(1, whole + 1) if whole % rows == 0]

    def largest(self, make: MakeBatch, budget: Budget, options: PlanOptions) -> LargestBatch:
        """The most rows at a time that fit, of those that `may_be`. Raises as `max_batch`."""
        most, among = self.rows_of_a_step, self.may_be()
        return max_batch(make, budget=budget, start=self.rows, most=most, among=among, options=options)

    def of(self, rows: int, search: LargestBatch | None = None) -> MicroBatches:
        """The same step with other `rows` at a time, which `may_be`."""
        return MicroBatches(rows, self.rows_of_a_step // rows, search)


def captured(step: Callable[[torch.nn.Module], Any]) -> Sample | None:
    """What `step` calls the module with that it is given; None where it does not. The step goes no further."""
    found: list[Sample] = []
    with suppress(_Captured):
        step(_Capturing(found))
    return found[0] if found else None


class _Captured(BaseException):  # not an Exception: the code around the call may catch those
    """Raised in the place of a call."""


class _Capturing(torch.nn.Module):
    def __init__(self, found: list[Sample]) -> None:
        super().__init__()
        self._found = found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._found.append(Sample(args, kwargs))
        raise _Captured


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Context: all streams that loading data may draw from are given back as they were."""
    states = random_states({device})
    with other_random_states_kept():
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)
