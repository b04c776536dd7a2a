"""Rockmate 2's modules: each is planned by one solver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from rockmate import module
from rockmate.compat.configured import Value, configured
from rockmate.memory.budget import Budget
from rockmate.offload.option import Offload
from rockmate.planning.request import limits_of


class _Pure(module.Rockmate):
    """`rockmate.Rockmate` with its solver chosen.

    Args:
        model, sample, budget: as for `rockmate.Rockmate`.
        solver_options: values of the solver's fields, by their names.
        options: other arguments of `rockmate.Rockmate`, such as loss or time_limit.

    Raises:
        SolverError: the solver has no such field.

    Beside that it raises what `rockmate.Rockmate` does.
    """

    solver_name: ClassVar[str]

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Any = None,
        budget: Budget = None,
        *,
        solver_options: Mapping[str, Value] | None = None,
        **options: Any,
    ) -> None:
        limits = limits_of(options.get("time_limit"), options.get("gap"))
        solver = configured(self.solver_name, solver_options or {}, limits)
        super().__init__(model, sample, budget, solver=solver, **options)


class PureRotor(_Pure):
    """Planned by the dynamic program over the chain of blocks (`rk_solvers.Rotor`)."""

    solver_name = "rotor"


class PureCheckmate(_Pure):
    """Planned by the exact program alone (`rk_solvers.Checkmate`): for some tens of operations."""

    solver_name = "checkmate"


class PureRockmate(_Pure):
    """Planned by exact programs for blocks, and the dynamic program over them (`rk_solvers.RockmateSolver`)."""

    solver_name = "rockmate"


class OffMate(_Pure):
    """Planned by recursive division, with data moved to a second memory where that is faster (`offload`)."""

    solver_name = "hiremate"

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Any = None,
        budget: Budget = None,
        *,
        offload: Offload | Literal["auto", "disk", "host"] = "auto",
        **options: Any,
    ) -> None:
        super().__init__(model, sample, budget, offload=offload, **options)


class Hiremate(_Pure):
    """Planned by recursive division (`rk_solvers.Hiremate`)."""

    solver_name = "hiremate"
