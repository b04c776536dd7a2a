"""A solver by its name and the values of its fields, made for each module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rk_solvers import SOLVERS, Chain, Limits, Solver, solver_named
from rk_solvers.limits import USUAL_LIMITS
from rockmate.errors import SolverError
from rockmate.planning.graph_solver import GraphSolver
from rockmate.planning.measured import Measured

Value = int | float | str
_PLAIN = (int, float, str)
_OWN = ("chain", "limits", "time_limit_s", "extra_s", "gap", "progress")  # of the module, or asked for elsewhere


@dataclass(frozen=True, slots=True)
class Configured(GraphSolver):
    """The solver of that name, some of whose fields have other values than by default."""

    solver: str
    options: tuple[tuple[str, Value], ...]
    limits: Limits = USUAL_LIMITS

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return self.solver

    def for_measured(self, measured: Measured) -> Solver:
        """The solver along the blocks of this module."""
        options: dict[str, Any] = dict(self.options)
        limits = replace(self.limits, seed=options.pop("seed", self.limits.seed))
        usual: Any = solver_named(self.solver, limits, measured.chain)  # a dataclass, as all of them are
        return replace(usual, **options)


def configured(
    solver: str,
    options: Mapping[str, Value],
    limits: Limits | None = None,
) -> Solver | str:
    """The solver of that name with these values of its fields; its name alone where there are none.

    Raises `SolverError` for a name or a field that is not there, or a value of another type.
    """
    if solver not in SOLVERS:
        raise SolverError(f"there is no solver {solver!r}; there are {', '.join(sorted(SOLVERS))}.")
    usual = options_of(solver)
    for name, value in options.items():
        if name not in usual:
            known = ", ".join(usual) or "none"
            raise SolverError(f"the solver {solver!r} has no option {name!r}; it has {known}.")
        expected = type(usual[name])
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise SolverError(
                f"the option {name!r} of the solver {solver!r} is {value!r}; give {expected.__name__} such as "
                f"{usual[name]!r}."
            )
    return Configured(solver, tuple(sorted(options.items())), limits or Limits()) if options else solver


def options_of(solver: str) -> dict[str, Value]:
    """The fields of a solver that may be given other values, with what they are by default."""
    made: Any = solver_named(solver, chain=Chain((), ()))
    found = {field.name: getattr(made, field.name) for field in fields(made)}
    return {name: value for name, value in found.items() if name not in _OWN and type(value) in _PLAIN}
