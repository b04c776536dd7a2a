"""Better schedules, looked for in a process of its own while training goes on.

The process solves a problem of plain numbers; it knows nothing of tensors, and runs at the lowest priority. Whatever
becomes of it, training goes on with the plans that are there.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from rk_solvers import Limits, Problem, Solution, Solver
from rk_solvers.side_process import SideProcess
from rkgb.devices.host_memory import address_space_is_limited
from rkgb.process.ranks import has_other_ranks
from rockmate.planning.request import PlanRequest

_SWITCH = "ROCKMATE_BACKGROUND"
_START_S = 30.0  # until the process is ready, on a machine that has much else to do
_HURRIED_S = 4.0  # of a search that training waits for, at most …
_HURRIED_ROUNDS = 1  # … and no more than what needs no program: for a chain its own, for others two greedy tries


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has come to."""

    key: Hashable
    solution: Solution | None  # None where it failed


def is_wanted(request: PlanRequest) -> bool:
    """Whether searches go on in the background: where there is a second core, and nothing has to be repeatable.

    Not where the user said so, or `ROCKMATE_BACKGROUND` is "0", nor under ``torch.use_deterministic_algorithms``, where
    searches end by rounds, where several ranks are to have one plan, or where address space is limited.
    """
    if not request.in_background or os.environ.get(_SWITCH, "1").strip().lower() in ("0", "off", "no", "false"):
        return False
    repeatable = request.limits.rounds is not None or torch.are_deterministic_algorithms_enabled()
    if repeatable or has_other_ranks() or (os.cpu_count() or 1) == 1:
        return False
    return not address_space_is_limited()  # of which the thread that listens to the process would take a part


def hurried(request: PlanRequest) -> PlanRequest:
    """`request` with little time for the search that training waits for, where a better plan may come later.

    A solver that the user names has all the time that it takes.
    """
    if not is_wanted(request) or request.solver != "auto":
        return request
    limits = request.limits
    return replace(request, limits=hurried_limits(limits), is_hurried=True)


def hurried_limits(limits: Limits) -> Limits:
    """Of a search whose result may be bettered in the background: it starts no process, and solves no program."""
    return replace(limits.within(min(limits.search_s, _HURRIED_S)), rounds=_HURRIED_ROUNDS)


class BackgroundSearch:
    """One search at a time. The process is there while there is one, and ends with this object, or with Python."""

    def __init__(self) -> None:
        self._process: SideProcess | None = None
        self._ends: weakref.finalize | None = None  # type: ignore[type-arg]
        self._owner = 0
        self._key: Hashable = None
        self._goes_on = False

    @property
    def is_busy(self) -> bool:
        """Whether a search goes on, or its answer has not been fetched. A fork of this process has none."""
        return self._goes_on and self._owner == os.getpid()

    def begin(self, key: Hashable, solver: Solver, problem: Problem, budget_bytes: int, limit_s: float) -> None:
        """Look for a schedule; `finished` gives it, with the `key`."""
        self._goes_on = False
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = SideProcess(yielding=True), os.getpid()
            self._ends = weakref.finalize(self, self._process.close)
        self._process.start(limit_s + _START_S, solver.solve, problem, budget_bytes)
        self._key, self._goes_on = key, True

    def finished(self) -> Found | None:
        """What the search that was begun has come to; None while it goes on, or where there is none. Never waits."""
        if not self.is_busy:
            return None
        assert self._process is not None
        if not self._process.answered():
            return None
        with warnings.catch_warnings(action="ignore"):  # of a search that failed: the plans that are there are as good
            solution = self._process.wait(None)
        self._goes_on = False
        return Found(self._key, solution)

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._ends is not None and self._owner == os.getpid():
            self._ends()
        self._process = self._ends = None
        self._goes_on = False
