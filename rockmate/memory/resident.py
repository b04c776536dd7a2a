"""By how much the process's resident memory rises at most while something runs: what planning itself takes."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

_INTERVAL_S = 0.05  # between two looks; a look takes some hundredths of a millisecond


class ResidentRise:
    """Context that looks at the resident memory of this process every twentieth of a second, in a thread of its own.

    All that the process has counts: Python's objects, tables of solvers, tensors on the CPU. What comes and goes
    between two looks is not seen; memory of other processes, and of accelerators, does not count.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before_bytes = self._highest_bytes = self._now_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rockmate-resident", daemon=True)

    def __enter__(self) -> ResidentRise:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def rise_bytes(self) -> int:
        """Most bytes until now above what was there at first."""
        self._highest_bytes = max(self._highest_bytes, self._now_bytes())
        return self._highest_bytes - self._before_bytes

    def _look(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._highest_bytes = max(self._highest_bytes, self._now_bytes())

    def _now_bytes(self) -> int:
        return int(self._process.memory_info().rss)
