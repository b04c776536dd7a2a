"""Solvers by name: what a user may write instead of making one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rk_solvers.anytime.auto import Auto
from rk_solvers.baselines.chen import Chen
from rk_solvers.baselines.keep_all import KeepAll
from rk_solvers.baselines.keep_none import KeepNone
from rk_solvers.baselines.knapsack import Knapsack
from rk_solvers.chain.hiremate import Hiremate
from rk_solvers.chain.rotor import Rotor
from rk_solvers.chain.two_level import RockmateSolver
from rk_solvers.exact.checkmate import Checkmate
from rk_solvers.intervals.solver import Intervals
from rk_solvers.local.greedy import Greedy
from rk_solvers.problem import Chain
from rk_solvers.solver import Solver

DEFAULT_TIME_LIMIT_S = 15.0
DEFAULT_EXTRA_S = 45.0  # beyond it, where the plan found in that time may be far from the best
DEFAULT_GAP = 0.01


@dataclass(frozen=True, slots=True)
class Effort:
    """What a solver may take, and what it may know of the problem."""

    chain: Chain | None = None
    time_limit_s: float | None = None  # None: the default limit, and the default extra time beyond it
    seed: int = 0
    gap: float = DEFAULT_GAP  # enough: no plan is faster by more than this share of the step's time
    progress: Callable[[str], None] | None = None  # told in a line how far an anytime solver is

    @property
    def limit_s(self) -> float:
        """Seconds that a search may take."""
        return DEFAULT_TIME_LIMIT_S if self.time_limit_s is None else self.time_limit_s

    @property
    def extra_s(self) -> float:
        """Seconds beyond that, for as long as the best plan may be far from the best there is."""
        return DEFAULT_EXTRA_S if self.time_limit_s is None else 0.0


def _rotor(effort: Effort) -> Solver:
    return Rotor(_chain(effort, "rotor"))


def _rockmate(effort: Effort) -> Solver:
    return RockmateSolver(_chain(effort, "rockmate"), effort.limit_s)


def _chain(effort: Effort, name: str) -> Chain:
    if effort.chain is None:
        raise ValueError(f"the solver {name!r} works along a chain of blocks, and none is given")
    return effort.chain


SOLVERS: dict[str, Callable[[Effort], Solver]] = {
    "auto": lambda effort: Auto(
        effort.chain,
        effort.seed,
        time_limit_s=effort.limit_s,
        extra_s=effort.extra_s,
        gap=effort.gap,
        progress=effort.progress,
    ),
    "checkmate": lambda effort: Checkmate(time_limit_s=effort.limit_s),
    "chen": lambda effort: Chen(effort.chain),
    "greedy": lambda effort: Greedy(effort.seed, time_limit_s=effort.limit_s),
    "hiremate": lambda effort: Hiremate(effort.chain, effort.seed, effort.limit_s),
    "intervals": lambda effort: Intervals(time_limit_s=effort.limit_s, seed=effort.seed, chain=effort.chain),
    "keep-all": lambda effort: KeepAll(),
    "keep-none": lambda effort: KeepNone(),
    "knapsack": lambda effort: Knapsack(),
    "rockmate": _rockmate,
    "rotor": _rotor,
}
"""What makes each solver that has a name, from how hard it shall try."""


def solver_named(name: str, effort: Effort | None = None) -> Solver:
    """The solver of that name, as `effort` sets it up. Raises `ValueError` naming those there are."""
    if name not in SOLVERS:
        raise ValueError(f"there is no solver {name!r}; there are {', '.join(sorted(SOLVERS))}")
    return SOLVERS[name](effort or Effort())
