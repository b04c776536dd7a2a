"""Calls that ran otherwise than by a plan within the budget: counted by reason, for users to look at."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from rockmate.units import format_bytes

Ran = Literal["by itself", "above the budget"]
"""How a call ran: as the module itself does, or by the plan of lowest peak that was found."""

_MOST_REASONS = 32  # told apart: what a message says may be another thing for every batch
_NUMBERS = re.compile(r"\[[^\]]*\]?|\([^)]*\)?|\d[\d.,]*|#(?:, #)+")


@dataclass(frozen=True, slots=True)
class Fallback:
    """Calls in training that ran otherwise than by a plan within the budget, for one reason."""

    cause: str  # name of the exception that planning, or looking for a plan, ended with
    reason: str  # its message, for the first of these calls
    ran: Ran
    calls: int
    peak_bytes: int | None = None  # of their steps, the highest that is known

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", up to {format_bytes(self.peak_bytes)}"
        plural = "" if self.calls == 1 else "s"
        return f"{self.calls} call{plural} {self.ran}{peak}: {self.cause}: {self.reason}"


class FallbackCounts:
    """Counts such calls. Threads may share it."""

    def __init__(self, records: Iterable[Fallback] = ()) -> None:
        self._lock = threading.Lock()
        self._told: set[tuple[str, str, str]] = set()  # here: who reads a record that was saved was not told
        self._records = {_kind(record.cause, record.ran, record.reason): record for record in records}

    def count(self, cause: str, reason: str, ran: Ran, peak_bytes: int | None) -> bool:
        """One call more; whether nobody was told of this reason yet, sizes and numbers aside."""
        kind = _kind(cause, ran, reason)
        with self._lock:
            if kind not in self._records and len(self._records) >= _MOST_REASONS:
                kind = (cause, ran, "")
            before = self._records.get(kind) or Fallback(cause, reason, ran, 0)
            highest = max((peak for peak in (before.peak_bytes, peak_bytes) if peak is not None), default=None)
            self._records[kind] = replace(before, calls=before.calls + 1, peak_bytes=highest)
            is_news = kind not in self._told
            self._told.add(kind)
            return is_news

    @property
    def records(self) -> tuple[Fallback, ...]:
        """Most calls first."""
        with self._lock:
            return tuple(sorted(self._records.values(), key=lambda record: -record.calls))


def _kind(cause: str, ran: str, reason: str) -> tuple[str, str, str]:
    return cause, ran, _NUMBERS.sub("#", reason)
