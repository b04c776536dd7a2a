"""What a user may give as a budget, and what it means in bytes."""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass

import torch

from rkgb.devices.registry import device_of
from rockmate.errors import BudgetError
from rockmate.units import parse_bytes


@dataclass(frozen=True, slots=True)
class AboveResidents:
    """So many bytes for the step, above all that training holds: parameters and gradients, whatever they take."""

    size_bytes: int


Budget = int | float | str | AboveResidents | None

# Part of the free memory left alone when the budget is the free memory: the allocator's gaps and rounding, scratch
# buffers that libraries take past it, and what other processes ask for meanwhile are in no plan.
RESERVE = 0.1

_FORMS = (
    'Give bytes (2_000_000_000 or "2e9"), a size ("2GiB"), a fraction of the eager peak (0.5 or "50%"), or None: what '
    "is free."
)
_NUMBER = re.compile(
    r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[-+]?\d+)?|[-+]?(inf(inity)?|nan)", re.ASCII | re.IGNORECASE
)


def check_budget(budget: object) -> None:
    """Raise `BudgetError` now for a budget that could never be read, before anything is measured."""
    read_budget(budget)


def read_budget(budget: object) -> int | float | AboveResidents | None:
    """A budget in the plainest of its forms: bytes as an int, a fraction of the eager peak as a float, None for "auto".

    Texts are read as they are written on the command line: "50%" and "0.5" are fractions, as is every number without a
    unit that is at most 1. Numbers of other libraries, and tensors of one number, count as what they hold.
    Raises `BudgetError` for anything that is no positive amount of memory.
    """
    if isinstance(budget, AboveResidents):
        _positive(budget.size_bytes, budget.size_bytes)
    if budget is None or isinstance(budget, AboveResidents):
        return budget
    if isinstance(budget, str):
        return _read_text(budget)
    number = budget
    if isinstance(number, torch.Tensor) and number.numel() == 1 and not number.is_meta:
        number = number.item()
    if isinstance(number, bool):
        raise BudgetError(f"the budget {budget!r} is no amount of memory. {_FORMS}")
    if isinstance(number, numbers.Integral):
        return _positive(int(number), budget)
    if isinstance(number, numbers.Real):
        return _fraction(float(number), budget)
    raise BudgetError(f"the budget {budget!r} is a {type(budget).__name__}. {_FORMS}")


def is_fraction(budget: object) -> bool:
    """Whether the budget is a part of the eager peak, which is to be measured then. Raises as `read_budget`."""
    return isinstance(read_budget(budget), float)


def is_what_is_free(budget: object) -> bool:
    """Whether the budget is the memory that is free when the plan is made. Raises as `read_budget`."""
    return read_budget(budget) is None


def resolve_budget(
    budget: object, eager_peak_bytes: int, device: torch.device, present_bytes: int = 0, held_bytes: int = 0
) -> int:
    """The budget in bytes: of the step, or, with `held_bytes` that training holds beside it, of both.

    A float is a fraction of `eager_peak_bytes`. None and "auto" are the free memory of `device`, less `RESERVE` of it
    and `present_bytes`: what the budget bounds and is allocated already.
    Raises `BudgetError` for anything that is no positive amount of memory.
    """
    read = read_budget(budget)
    if read is None:
        return int(device_of(device).available_bytes() * (1 - RESERVE)) + present_bytes
    if isinstance(read, AboveResidents):
        return resolve_budget(read.size_bytes, eager_peak_bytes, device) + held_bytes
    return round(read * eager_peak_bytes) if isinstance(read, float) else read


def _read_text(text: str) -> int | float | None:
    plain = text.strip()
    if plain.lower() == "auto":
        return None
    if plain.endswith("%") and _NUMBER.fullmatch(plain[:-1].strip()):
        return _fraction(float(plain[:-1]) / 100, text)
    if _NUMBER.fullmatch(plain):
        number = float(plain)
        if not number > 1 or not math.isfinite(number):
            return _fraction(number, text)
        if not number.is_integer():
            raise BudgetError(f"the budget {text!r} is no whole number of bytes. {_bytes_meant(number)}{_FORMS}")
    try:
        return _positive(parse_bytes(text), text)
    except ValueError as error:
        if isinstance(error, BudgetError):
            raise
        raise BudgetError(f"the budget cannot be read: {error}. {_FORMS}") from None


def _positive(size_bytes: int, written: object) -> int:
    if size_bytes <= 0:
        raise BudgetError(f"the budget {written!r} is not positive. {_FORMS}")
    return size_bytes


def _fraction(fraction: float, written: object) -> float:
    if not math.isfinite(fraction) or fraction <= 0 or fraction > 1:
        kind = "a fraction" if isinstance(written, str) else "a float, so a fraction"
        raise BudgetError(
            f"the budget {written!r} is {kind} of the eager peak: it must be above 0 and at most 1. "
            f"{'' if isinstance(written, str) else _bytes_meant(fraction)}{_FORMS}"
        )
    return fraction


def _bytes_meant(number: float) -> str:
    """What to write instead, where the number looks like one of bytes or of gibibytes."""
    if not math.isfinite(number) or number <= 1:
        return ""
    if number >= 1024:
        return f"Bytes are whole numbers: int({number!r}). "
    return f'For GiB, write "{number:g}GiB". '
