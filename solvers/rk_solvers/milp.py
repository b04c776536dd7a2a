"""Mixed-integer linear programs: a small builder, and the back ends that solve them.

Always a minimisation. `"scipy"` is HiGHS inside SciPy; `"gurobi"` is Gurobi through gurobipy, an optional package
that is imported only when selected. The back ends take a row for satisfied within about 1e-6, and an integer for whole
within as much: scale the rows for the exactness that is needed.
"""

from __future__ import annotations

import enum
import importlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse

Floats = NDArray[np.float64]
Term = tuple[int, float]  # a variable and its coefficient

FAILED = 4  # status of SciPy: neither solved nor stopped by a limit
BACKENDS = ("scipy", "gurobi")


class BackendUnavailable(RuntimeError):
    """The selected back end cannot be used here; the message says what to do."""


class Outcome(enum.Enum):
    """What a back end proved."""

    OPTIMAL = "optimal"  # within the gap asked for
    INFEASIBLE = "infeasible"
    LIMIT = "limit"  # stopped before; values may be present, the bound is valid


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """When to stop, and the back end's own parameters, passed on as they are."""

    time_limit_s: float = 60.0
    gap: float = 0.0  # relative to the objective; 0.01 is 1 %
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Result:
    """The answer of a back end."""

    outcome: Outcome
    values: Floats | None  # of all variables in order; None if no feasible point is known
    objective: float  # of these values; infinite without
    bound: float  # the objective of no feasible point is below this
    reduced: Floats | None = None  # of a linear program: cost of each variable by the multipliers that prove the bound


@dataclass(slots=True)
class Model:
    """Variables and rows of a program; both are numbered from 0 in the order of their addition."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    _starts: list[int] = field(default_factory=lambda: [0])
    _columns: list[int] = field(default_factory=list)
    _coefficients: list[float] = field(default_factory=list)

    def add_variable(
        self, cost: float = 0.0, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False
    ) -> int:  # fmt: skip
        """Add a variable and return its number."""
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def add_row(self, terms: Iterable[Term], *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """Require `lower <= sum of coefficient x variable <= upper`; a variable may occur several times."""
        terms = list(terms)
        self._columns += [variable for variable, _ in terms]
        self._coefficients += [coefficient for _, coefficient in terms]
        self._starts.append(len(self._columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    @property
    def entries(self) -> int:
        """How many coefficients the rows have."""
        return len(self._columns)

    def matrix(self) -> Any:
        """The rows as a SciPy sparse matrix."""
        shape = (len(self.row_lower), len(self.cost))
        matrix = sparse.csr_array((self._coefficients, self._columns, self._starts), shape=shape, dtype=np.float64)
        matrix.sum_duplicates()
        return matrix


def solve(model: Model, backend: str = "scipy", limits: BackendLimits | None = None) -> Result:
    """Solve a program with the back end of that name.

    Raises `ValueError` for an unknown back end and `BackendUnavailable` for one that is not installed or not licensed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"there is no back end {backend!r}; use one of {', '.join(BACKENDS)}")
    limits = limits or BackendLimits()
    if not model.cost:  # no back end takes a program without variables
        fits = all(low <= 0 <= high for low, high in zip(model.row_lower, model.row_upper, strict=True))
        if fits:
            return Result(Outcome.OPTIMAL, np.zeros(0), 0.0, 0.0)
        return Result(Outcome.INFEASIBLE, None, math.inf, math.inf)
    return _solve_scipy(model, limits) if backend == "scipy" else _solve_gurobi(model, limits)


def relaxation_bound(model: Model, time_limit_s: float = 60.0, method: str = "highs") -> Result:
    """A bound on the program without integrality, from the multipliers of its linear program.

    The bound is computed anew from the multipliers, so it holds whatever the solver's tolerances: any multipliers of
    the right sign give one. All variables must have finite bounds.
    """
    matrix = model.matrix()
    lower, upper = np.array(model.row_lower), np.array(model.row_upper)
    capped, floored = np.isfinite(upper), np.isfinite(lower)
    rows = sparse.vstack([matrix[capped], -matrix[floored]], format="csr")
    limit = np.concatenate([upper[capped], -lower[floored]])
    cost, low, high = np.array(model.cost), np.array(model.lower), np.array(model.upper)
    deadline = time.monotonic() + time_limit_s
    for presolve in (True, False):
        options = {"time_limit": max(deadline - time.monotonic(), 1e-3), "presolve": presolve}
        bounds = np.column_stack([low, high])
        answer = optimize.linprog(cost, A_ub=rows, b_ub=limit, bounds=bounds, method=method, options=options)
        if answer.status != FAILED:
            break
    if answer.status == 2:
        return Result(Outcome.INFEASIBLE, None, math.inf, math.inf)
    if answer.status != 0:
        return Result(Outcome.LIMIT, None, math.inf, -math.inf)
    multipliers = np.minimum(answer.ineqlin.marginals, 0.0)  # of rows "<=": never positive
    reduced = cost - rows.T @ multipliers
    bound = float(multipliers @ limit + np.minimum(reduced * low, reduced * high).sum())
    return Result(Outcome.OPTIMAL, np.asarray(answer.x), float(answer.fun), bound, reduced)


def _solve_scipy(model: Model, limits: BackendLimits) -> Result:
    constraints = []
    if model.row_lower:
        constraints.append(optimize.LinearConstraint(model.matrix(), model.row_lower, model.row_upper))
    deadline = time.monotonic() + limits.time_limit_s
    for presolve in (True, False):  # HiGHS fails in the presolve of some programs that are barely infeasible
        left_s = max(deadline - time.monotonic(), 1e-3)
        options = {"time_limit": left_s, "mip_rel_gap": limits.gap, "presolve": presolve, **limits.parameters}
        answer = optimize.milp(
            np.array(model.cost),
            integrality=np.array(model.integer, np.int64),
            bounds=optimize.Bounds(np.array(model.lower), np.array(model.upper)),
            constraints=constraints,
            options=options,
        )
        if answer.status != FAILED:
            break
    if answer.status == 2:
        return Result(Outcome.INFEASIBLE, None, math.inf, math.inf)
    if answer.status not in (0, 1):  # unbounded or a numerical failure
        return Result(Outcome.LIMIT, None, math.inf, -math.inf)
    bound = -math.inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound)
    if answer.x is None:
        return Result(Outcome.LIMIT, None, math.inf, bound)
    outcome = Outcome.OPTIMAL if answer.status == 0 else Outcome.LIMIT
    if outcome is Outcome.OPTIMAL and bound == -math.inf:  # HiGHS names none where it had nothing to branch on
        bound = float(answer.fun)
    return Result(outcome, np.asarray(answer.x), float(answer.fun), bound)


def gurobi() -> Any:
    """The module gurobipy. Raises `BackendUnavailable` where it is not installed."""
    try:
        return importlib.import_module("gurobipy")
    except ImportError as error:
        raise BackendUnavailable(
            "the back end 'gurobi' needs the package gurobipy, which is not installed: install it, or select the back "
            "end 'scipy', which needs nothing more"
        ) from error


def _solve_gurobi(model: Model, limits: BackendLimits) -> Result:
    gp = gurobi()
    settings = {"OutputFlag": 0, "TimeLimit": max(limits.time_limit_s, 0.0), "MIPGap": limits.gap, **limits.parameters}
    try:
        with gp.Env(params=settings) as environment, gp.Model(env=environment) as program:
            return _run_gurobi(gp, program, model)
    except gp.GurobiError as error:
        raise BackendUnavailable(
            f"Gurobi refused this program of {len(model.cost)} variables and {len(model.row_lower)} rows: {error}. "
            "If its licence is missing, expired or too small, install one that is large enough (the licence that comes "
            "with gurobipy takes 2000 variables and 2000 rows), or select the back end 'scipy'"
        ) from error


def _run_gurobi(gp: Any, program: Any, model: Model) -> Result:
    kinds = np.where(np.array(model.integer), gp.GRB.INTEGER, gp.GRB.CONTINUOUS)
    variables = program.addMVar(
        len(model.cost), lb=np.array(model.lower), ub=np.array(model.upper), obj=np.array(model.cost), vtype=kinds
    )
    matrix, lower, upper = model.matrix(), np.array(model.row_lower), np.array(model.row_upper)
    equal = np.isfinite(lower) & (lower == upper)
    capped, floored = np.isfinite(upper) & ~equal, np.isfinite(lower) & ~equal
    for chosen, sense, limit in ((equal, "=", upper), (capped, "<", upper), (floored, ">", lower)):
        if chosen.any():
            program.addMConstr(sparse.csr_matrix(matrix[chosen]), variables, sense, limit[chosen])
    program.optimize()
    if program.Status in (gp.GRB.INFEASIBLE, gp.GRB.INF_OR_UNBD):  # all programs built here are bounded
        return Result(Outcome.INFEASIBLE, None, math.inf, math.inf)
    if program.Status == gp.GRB.INTERRUPTED:
        raise KeyboardInterrupt  # gurobipy ends the search at Ctrl-C without raising
    bound = float(program.ObjBound)
    if program.SolCount == 0:
        return Result(Outcome.LIMIT, None, math.inf, bound)
    outcome = Outcome.OPTIMAL if program.Status == gp.GRB.OPTIMAL else Outcome.LIMIT
    return Result(outcome, np.asarray(variables.X), float(program.ObjVal), bound)
