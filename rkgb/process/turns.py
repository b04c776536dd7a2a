"""Threads of one process: what planning changes for all of them, only one may do at a time.

While a module is planned it holds other parameters, modes and buffers: no other thread may run it. And planning seeds
the random streams of the process, starts its profiler, traces, and puts functions of its own in the places of some of
PyTorch's: all that exists once in a process, so that only one thread plans at a time, whatever it plans. Steps of
modules that share no part with what is planned go on meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_acting_for: dict[int, int] = {}  # threads that do a part of what another one, which waits for them, does


def current_thread() -> int:
    """The thread whose turns are taken here."""
    me = threading.get_ident()
    return _acting_for.get(me, me)


@contextlib.contextmanager
def acting_for(thread: int) -> Iterator[None]:
    """Do here what `thread` does, which waits meanwhile: its turns are this thread's."""
    _acting_for[threading.get_ident()] = thread
    try:
        yield
    finally:
        del _acting_for[threading.get_ident()]


class PlanLock:
    """Who runs which module, and who plans.

    A thread may take a turn within its own: what it does while it plans, such as to tell of it, may call the module.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Thread and module of each turn; by an object of its own, as modules may compare in their own ways.
        self._running: dict[object, tuple[int, torch.nn.Module]] = {}
        self._planned: dict[object, tuple[int, torch.nn.Module]] = {}
        self._planner: int | None = None
        self._depth = 0

    def after_fork(self) -> None:
        """Of a process that was forked, only the thread that forked it is left, and its turns."""
        me = current_thread()
        self._changed = threading.Condition()
        for turns in (self._running, self._planned):
            for turn in [turn for turn, (thread, _) in turns.items() if thread != me]:
                del turns[turn]
        if self._planner != me:
            self._planner, self._depth = None, 0

    @contextlib.contextmanager
    def running(self, module: torch.nn.Module) -> Iterator[None]:
        """Run `module` inside, once no other thread plans it, or what shares a submodule with it."""
        turn, me = object(), current_thread()
        with self._changed:
            if self._planned:
                self._changed.wait_for(lambda: not _shared_by_others(self._planned, module, me))
            self._running[turn] = (me, module)
        try:
            yield
        finally:
            with self._changed:
                self._running.pop(turn, None)
                self._changed.notify_all()

    @contextlib.contextmanager
    def planning(self, module: torch.nn.Module) -> Iterator[None]:
        """Plan `module` inside, once no other thread plans anything, or runs what shares a submodule with it."""
        turn, me = object(), current_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._planner in (None, me) and not self._is_in_use(module, me))
            self._planner = me
            self._depth += 1
            self._planned[turn] = (me, module)
        try:
            yield
        finally:
            with self._changed:
                self._planned.pop(turn, None)
                self._depth -= 1
                if not self._depth:
                    self._planner = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def others_plan(self) -> Iterator[None]:
        """While this thread waits for what others make: they may plan, though not the modules that it plans."""
        me = current_thread()
        if self._planner != me:
            yield
            return
        with self._changed:
            depth, self._depth, self._planner = self._depth, 0, None
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: self._planner is None)
                self._depth, self._planner = depth, me

    def is_planner(self) -> bool:
        """Whether this thread plans."""
        return self._planner == current_thread()

    def _is_in_use(self, module: torch.nn.Module, me: int) -> bool:
        return _shared_by_others(self._running, module, me) or _shared_by_others(self._planned, module, me)


def _shared_by_others(turns: dict[object, tuple[int, torch.nn.Module]], module: torch.nn.Module, me: int) -> bool:
    others = [other for thread, other in turns.values() if thread != me]
    if not others:
        return False
    parts = {id(part) for part in module.modules()}
    return any(id(part) in parts for other in others for part in other.modules())


# What exists once in a process is guarded once in a process.
TURNS = PlanLock()


class TurnsOf:
    """Turns of one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def running(self) -> contextlib.AbstractContextManager[None]:
        """`PlanLock.running` of it."""
        return TURNS.running(self._module)

    def planning(self) -> contextlib.AbstractContextManager[None]:
        """`PlanLock.planning` of it."""
        return TURNS.planning(self._module)


# ---- what is put in the place of functions of PyTorch or Python, for one thread ---------------------------


@contextlib.contextmanager
def replaced_here(holder: Any, name: str, function: Any) -> Iterator[None]:
    """Meanwhile this thread finds `function` under `name` in `holder`, and all others what was there before."""
    before, me = getattr(holder, name), current_thread()

    def by_thread(*args: Any, **kwargs: Any) -> Any:
        return (function if current_thread() == me else before)(*args, **kwargs)

    setattr(holder, name, by_thread)
    try:
        yield
    finally:
        setattr(holder, name, before)


class _Collected:
    """What one thread warns of; in the place of a pattern of warning filters, it matches all that."""

    def __init__(self) -> None:
        self.thread = current_thread()
        self.is_on = True  # filters may stay where another thread's `warnings.catch_warnings` puts them back
        self.found: list[warnings.WarningMessage] = []

    def match(self, _: str) -> bool:
        """Whether it is that thread that warns."""
        return self.is_on and current_thread() == self.thread


class _Warnings:
    """Warnings of the process, and the threads whose own are collected."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._collecting: list[_Collected] = []  # the innermost last
        self._show: Any = warnings.showwarning  # of all others

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[warnings.WarningMessage]]:
        """Collect what this thread warns of."""
        mine = _Collected()
        everything: Any = ("always", mine, Warning, None, 0)
        with self.lock:
            self._collecting.append(mine)
            if warnings.showwarning != self._shown:
                self._show, warnings.showwarning = warnings.showwarning, self._shown
            warnings.filters.insert(0, everything)  # type: ignore[attr-defined]
            _forget_what_was_shown()
        try:
            yield mine.found
        finally:
            with self.lock:
                mine.is_on = False
                self._collecting.remove(mine)
                with contextlib.suppress(ValueError):
                    warnings.filters.remove(everything)  # type: ignore[attr-defined]
                _forget_what_was_shown()
                if not self._collecting and warnings.showwarning == self._shown:
                    warnings.showwarning = self._show

    def _shown(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        with self.lock:
            here = [one for one in self._collecting if one.match("")]
        if here:
            here[-1].found.append(warnings.WarningMessage(message, category, filename, lineno, *rest, **more))
        else:
            self._show(message, category, filename, lineno, *rest, **more)


def _forget_what_was_shown() -> None:
    """Python keeps what the filters have let through once, until they change."""
    with warnings.catch_warnings():
        pass


_warnings = _Warnings()


def warnings_collected() -> contextlib.AbstractContextManager[list[warnings.WarningMessage]]:
    """Context that collects all that this thread warns of, whatever the filters say; other threads' go their way.

    Unlike those of `warnings.catch_warnings`, several threads may be in it at once, and leave it in any order.
    """
    return _warnings.collected()


# ---- locks ------------------------------------------------------------------------------------------------


class ThreadsLock:
    """As `threading.RLock`, but who acts for the thread that holds it holds it, too: that one waits for the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Wait until no other thread holds it."""
        me = current_thread()
        if self._holder != me:
            self._lock.acquire()
            self._holder = me
        self._depth += 1

    def release(self) -> None:
        """Once for each `acquire`."""
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock, self._holder, self._depth = threading.Lock(), None, 0


# The random streams belong to the process, and so does the lock on them: while one thread repeats an operation with
# the numbers of its forward, or notes where a stream is before it draws, or compares a trace with its module from a
# seed, no other planned step may draw or put the stream elsewhere.
STREAMS = ThreadsLock()
# So does the profiler that records allocations: a second one ends the process.
ALLOCATIONS = ThreadsLock()


def _in_a_fork() -> None:
    TURNS.after_fork()
    for lock in (STREAMS, ALLOCATIONS, _warnings.lock):
        lock._at_fork_reinit()  # type: ignore[union-attr]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)
