"""Threads that share a module: several may run it at once, but none while another one plans it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator


class Turns:
    """While a module is planned it holds other parameters, modes and buffers: no step may see those.

    A thread may take a turn within its own: what it does while it plans, such as to tell of it, may call the module.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[int] = Counter()  # calls going on, by thread
        self._planner: int | None = None
        self._depth = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the module inside, once no other thread plans it."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._planner in (None, me))
            self._running[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                self._running += Counter()  # drops threads that run nothing
                self._changed.notify_all()

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Plan the module inside, once no other thread runs or plans it."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(
                lambda: self._planner == me or (self._planner is None and self._running.keys() <= {me})
            )
            self._planner = me
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._planner = None
                self._changed.notify_all()
