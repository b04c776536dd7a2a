"""What a user may give as a budget, and what it means in bytes."""

from __future__ import annotations

import math
import numbers

import torch

from rkgb.memory import free_bytes
from rockmate.errors import BudgetError
from rockmate.units import parse_bytes

Budget = int | float | str | None

RESERVE = 0.1  # part of the free memory left alone when the budget is "what is free"

_FORMS = 'Give bytes (2_000_000_000), a size ("2GiB"), a fraction of the eager peak (0.5), or None: what is free.'


def check_budget(budget: object) -> None:
    """Raise `BudgetError` now for a budget that could never be read, before anything is measured."""
    resolve_budget(budget, eager_peak_bytes=1 << 40, device=torch.device("cpu"))


def resolve_budget(budget: object, eager_peak_bytes: int, device: torch.device) -> int:
    """The budget in bytes.

    A float is a fraction of `eager_peak_bytes`; None is what is free on `device` now, less 10 %.
    Raises `BudgetError` for anything that is no positive amount of memory.
    """
    if budget is None:
        return int(free_bytes(device) * (1 - RESERVE))
    if isinstance(budget, bool):
        raise BudgetError(f"the budget {budget!r} is no amount of memory. {_FORMS}")
    if isinstance(budget, str):
        try:
            size_bytes = parse_bytes(budget)
        except ValueError as error:
            raise BudgetError(f"the budget cannot be read: {error}. {_FORMS}") from None
    elif isinstance(budget, numbers.Integral):
        size_bytes = int(budget)
    elif isinstance(budget, numbers.Real):
        return _fraction(float(budget), eager_peak_bytes)
    else:
        raise BudgetError(f"the budget {budget!r} is a {type(budget).__name__}. {_FORMS}")
    if size_bytes <= 0:
        raise BudgetError(f"the budget {budget!r} is not positive. {_FORMS}")
    return size_bytes


def _fraction(fraction: float, eager_peak_bytes: int) -> int:
    if not math.isfinite(fraction) or fraction <= 0 or fraction > 1:
        raise BudgetError(
            f"the budget {fraction!r} is a float, so a fraction of the eager peak: it must be above 0 and at most 1. "
            f"{_FORMS}"
        )
    return round(fraction * eager_peak_bytes)
