"""What a user may give as a budget, and what it means in bytes."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from rkgb.measuring.available import available_bytes
from rockmate.errors import BudgetError
from rockmate.units import parse_bytes


@dataclass(frozen=True, slots=True)
class AboveResidents:
    """So many bytes for the step, above all that training holds: parameters and gradients, whatever they take."""

    size_bytes: int


Budget = int | float | str | AboveResidents | None

# Part of the free memory left alone when the budget is "what is free": the allocator's gaps and rounding, scratch
# buffers that libraries take past it, and what other processes ask for meanwhile are in no plan.
RESERVE = 0.1

_FORMS = 'Give bytes (2_000_000_000), a size ("2GiB"), a fraction of the eager peak (0.5), or None: what is free.'


def check_budget(budget: object) -> None:
    """Raise `BudgetError` now for a budget that could never be read, before anything is measured."""
    resolve_budget(budget, eager_peak_bytes=1 << 40, device=torch.device("cpu"))


def resolve_budget(
    budget: object, eager_peak_bytes: int, device: torch.device, present_bytes: int = 0, held_bytes: int = 0
) -> int:
    """The budget in bytes: of the step, or, with `held_bytes` that training holds beside it, of both.

    A float is a fraction of `eager_peak_bytes`. None and "auto" are what is free on `device` now, less `RESERVE` of
    it, and `present_bytes`: what the budget bounds and is allocated already.
    Raises `BudgetError` for anything that is no positive amount of memory.
    """
    if budget is None or (isinstance(budget, str) and budget.strip().lower() == "auto"):
        return int(available_bytes(device) * (1 - RESERVE)) + present_bytes
    if isinstance(budget, AboveResidents):
        return resolve_budget(budget.size_bytes, eager_peak_bytes, device) + held_bytes
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
            f"{_bytes_meant(fraction)}{_FORMS}"
        )
    return round(fraction * eager_peak_bytes)


def _bytes_meant(fraction: float) -> str:
    """What to write instead, where the float looks like a number of bytes or of gibibytes."""
    if not math.isfinite(fraction) or fraction <= 1:
        return ""
    if fraction >= 1024:
        return f"Bytes are whole numbers: int({fraction!r}). "
    return f'For GiB, write "{fraction:g}GiB". '
