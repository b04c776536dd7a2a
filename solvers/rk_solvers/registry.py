"""Solvers by name: what a user may write instead of making one."""

from __future__ import annotations

from collections.abc import Callable

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
from rk_solvers.limits import Limits
from rk_solvers.local.greedy import Greedy
from rk_solvers.problem import Chain
from rk_solvers.solver import Solver

Tell = Callable[[str], None]
MakeSolver = Callable[[Limits, Chain | None, Tell | None], Solver]


def _chain(chain: Chain | None, name: str) -> Chain:
    if chain is None:
        raise ValueError(f"the solver {name!r} works along a chain of blocks, and none is given")
    return chain


SOLVERS: dict[str, MakeSolver] = {
    "auto": lambda limits, chain, tell: Auto(chain, limits=limits, progress=tell),
    "checkmate": lambda limits, chain, tell: Checkmate(time_limit_s=limits.search_s),
    "chen": lambda limits, chain, tell: Chen(chain),
    "greedy": lambda limits, chain, tell: Greedy(limits.seed, time_limit_s=limits.search_s),
    "hiremate": lambda limits, chain, tell: Hiremate(chain, limits.seed, limits.search_s),
    "intervals": lambda limits, chain, tell: Intervals(time_limit_s=limits.search_s, seed=limits.seed, chain=chain),
    "keep-all": lambda limits, chain, tell: KeepAll(),
    "keep-none": lambda limits, chain, tell: KeepNone(),
    "knapsack": lambda limits, chain, tell: Knapsack(),
    "rockmate": lambda limits, chain, tell: RockmateSolver(_chain(chain, "rockmate"), limits.search_s),
    "rotor": lambda limits, chain, tell: Rotor(_chain(chain, "rotor")),
}
"""What makes each solver that has a name: from its limits, the chain of the problem, and whom to tell of progress."""


def solver_named(
    name: str, limits: Limits | None = None, chain: Chain | None = None, progress: Tell | None = None
) -> Solver:
    """The solver of that name, within `limits`, along `chain`; an anytime one tells `progress` how far it is.

    Raises `ValueError` naming the solvers that there are, and for one that works along a chain and is given none.
    """
    if name not in SOLVERS:
        raise ValueError(f"there is no solver {name!r}; there are {', '.join(sorted(SOLVERS))}")
    return SOLVERS[name](limits or Limits(), chain, progress)
