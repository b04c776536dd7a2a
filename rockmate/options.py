"""What users say of planning, beside a model, a sample and a budget: one record, which every entrance takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch

from rk_solvers import Limits, Solver
from rk_solvers.limits import USUAL_LIMITS
from rockmate.errors import ArgumentError, ShapesError
from rockmate.kernels.option import Kernels
from rockmate.layouts.option import Layout
from rockmate.memory.budget import Budget
from rockmate.memory.optimizer_state import OptimizerLike
from rockmate.memory.split import Scope
from rockmate.nn.chunked_logits import Chunks
from rockmate.offload.option import Offload, as_offload
from rockmate.offload.tiers import Tiers
from rockmate.planning.costs import LossFunction
from rockmate.planning.pins import Pins, as_pins
from rockmate.planning.request import PlanRequest, check_request, limits_of
from rockmate.progress import ProgressCallback

Shapes = Literal["replan", "nearest", "eager", "error"]
"""What happens to a call that no plan holds for."""

SHAPES: tuple[str, ...] = get_args(Shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """How to plan: the arguments of `Rockmate` under the same names and with the same defaults, as one record.

    `Rockmate`, `max_batch`, `smallest_budget`, `verify`, the sweep, `distributed.plan_blocks` and `distributed.apply`
    take it as ``options=``. ``dataclasses.replace(options, solver=...)`` makes another one.
    """

    loss: LossFunction | None = None  # on the model's output; None: as much as a cross-entropy takes is assumed
    solver: Solver | str = "auto"  # the name of one, or an instance
    limits: Limits = USUAL_LIMITS  # seconds and rounds of searches, bounds and proofs
    progress: bool | ProgressCallback = False  # True: a display on standard error
    pin: Pins = ()  # what is saved and never recomputed: submodules, operators, names of operations
    scope: Scope = "step"  # what the budget is for
    optimizer: OptimizerLike | None = None  # whose state is in a budget for all of training
    shapes: Shapes = "replan"  # what happens to a call that no plan holds for
    opaque: torch.nn.Module | Iterable[torch.nn.Module] = ()  # submodules whose call is one operation
    cache: bool = True  # whether to look for plans in the user's cache, and to keep them there
    offload: Offload | str | None = None  # where data may be moved while nothing reads them
    layout: Layout = "as given"  # of the weights of convolutions; "auto": as is measured to be faster
    kernels: Kernels = "as given"  # that PyTorch picks; "auto": whichever of its kernels are measured to be faster
    compile: bool = False  # parts between products are compiled where that is measured to pay
    loss_chunks: Chunks = None  # rows whose logits a causal language model makes at once; None: it makes them whole
    plan_in_background: bool = True  # better plans are looked for while training goes on with what was found quickly

    @classmethod
    def of(
        cls,
        options: Self | None,
        said: Mapping[str, Any],
        time_limit: float | None = None,
        gap: float | None = None,
    ) -> Self:
        """`options`, or the record of what was `said` for short: arguments by their names here.

        Raises `ArgumentError` where both are given, and `SolverError` for limits that are none.
        """
        usual = cls()
        given = {name: value for name, value in said.items() if not _is_same(value, getattr(usual, name))}
        if given.get("limits", USUAL_LIMITS) is None:  # nothing said of them
            del given["limits"]
        if options is None:
            limits = limits_of(time_limit, gap, given.pop("limits", None))
            return cls(limits=limits, **given)
        short = {"time_limit": time_limit, "gap": gap}
        given |= {name: value for name, value in short.items() if value is not None}
        if given:
            name = min(given)
            raise ArgumentError(
                f"options are given, and {name} beside them: say it in the options, or leave the options out."
            )
        return options

    def request(self, budget: Budget) -> PlanRequest:
        """What planning is asked for under `budget`; what a module has to do with it is still to be found.

        Raises `BudgetError`, `SolverError`, `OptimizerError`, `LossError`, `ShapesError`, `PinError`, `OffloadError`,
        `LayoutError`, `KernelsError`.
        """
        check_shapes(self.shapes)
        offload = as_offload(self.offload)
        request = PlanRequest(
            budget,
            loss=self.loss,
            solver=self.solver,
            limits=self.limits,
            pin=as_pins(self.pin),
            scope=self.scope,
            optimizer=self.optimizer,
            in_background=self.plan_in_background,
            tiers=None if offload is None else Tiers(offload),
            layout=self.layout,
            kernels=self.kernels,
            compile=self.compile,
            loss_chunks=self.loss_chunks,
        )
        check_request(request)
        return request


def check_shapes(shapes: object) -> None:
    """Raise `ShapesError` for no answer to a call of another shape."""
    if shapes not in SHAPES:
        raise ShapesError(
            f'shapes is {shapes!r}; say what to do with a call unlike those that were planned: "replan", "nearest" '
            '(plan it, but follow the decisions of the plan next in size), "eager" or "error".'
        )


def _is_same(value: Any, usual: Any) -> bool:
    """Whether a value of plain Python is the usual one; others are never, and are not compared."""
    plain = isinstance(value, str | bool | tuple) and isinstance(usual, type(value))
    return value is usual or (plain and bool(value == usual))
