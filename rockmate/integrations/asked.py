"""What the callbacks of trainers are asked for, checked where they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from rockmate.errors import ArgumentError
from rockmate.memory.budget import Budget, check_budget, is_fraction, is_what_is_free
from rockmate.options import PlanOptions

WhichBatch = Literal["largest"] | None
"""How a callback chooses the rows at a time: as many as fit, or, for None, as the trainer has it."""


def check_asked(budget: Budget, batch: WhichBatch) -> None:
    """Raise `BudgetError` for no budget, `ArgumentError` for no way to choose a batch, or none under this budget."""
    check_budget(budget)
    if batch not in (None, "largest"):
        raise ArgumentError(f'batch is {batch!r}: give "largest", or None for the batch that the trainer has')
    if batch is not None and is_fraction(budget):
        raise ArgumentError(
            f"the budget {budget!r} is a part of the eager peak, which grows with the batch: for batch={batch!r} "
            'give bytes, a size such as "8GiB", or "auto"'
        )


def leaves_state_out(budget: Budget, options: PlanOptions) -> bool:
    """Whether the budget is all that is free, and nothing says that the optimizer's state to come counts."""
    return is_what_is_free(budget) and options.scope == "step" and options.optimizer is None


def options_of(said: Mapping[str, Any]) -> PlanOptions:
    """Arguments of `Rockmate` as one record. Raises `ArgumentError` for others."""
    short = {name: said.get(name) for name in ("options", "time_limit", "gap")}
    others = {name: value for name, value in said.items() if name not in short}
    known = {field.name for field in fields(PlanOptions)}
    unknown = [name for name in others if name not in known]
    if unknown:
        raise ArgumentError(f"RockmateCallback has no argument {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    return PlanOptions.of(short["options"], others, short["time_limit"], short["gap"])
