"""What a user asks for when a module is to be planned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rk_solvers import SOLVERS, Limits, Solver
from rk_solvers.limits import USUAL_LIMITS
from rk_solvers.links import SecondMemory
from rockmate.errors import LossError, SolverError
from rockmate.kernels.option import ChosenKernels, Kernels, KnownKernels, check_kernels, has_others
from rockmate.layouts.option import ChosenLayout, Layout, check_layout
from rockmate.memory.budget import Budget, check_budget
from rockmate.memory.optimizer_state import OptimizerLike
from rockmate.memory.split import Scope, check_scope
from rockmate.nn.chunked_logits import Chunks, check_chunks
from rockmate.offload.tiers import Tiers
from rockmate.planning.costs import LossFunction
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.pins import Pin
from rockmate.progress import ProgressCallback, no_progress
from rockmate.regions.option import CompiledRegions, KnownTrials, is_compiled


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for."""

    budget: Budget
    loss: LossFunction | None = None
    solver: Solver | str = "auto"
    progress: ProgressCallback = no_progress
    limits: Limits = USUAL_LIMITS  # of searches, bounds and proofs; measuring takes time of its own
    pin: tuple[Pin, ...] = ()  # what is saved and never recomputed
    scope: Scope = "step"  # what the budget is for
    optimizer: OptimizerLike | None = None  # whose state is in a budget for all of training
    is_still: bool = False  # calls leave the module as it was, as was seen of it
    may_branch: bool = False  # data that take another branch of the model are planned by themselves
    opaque: tuple[str, ...] = ()  # paths of submodules whose call is one operation, beside compiled ones
    follow: PortablePlan | None = None  # those of another plan: taken where they fit, in place of a search
    in_background: bool = True  # searches may go on while training does
    is_checked: bool = False  # its trace was compared with the model when the plan was made that is to be restored
    is_hurried: bool = False  # with little time for a search, as a better plan is looked for in the background
    tiers: Tiers | None = None  # second memories, where data may be that nothing reads; None where all stay
    may_exceed: bool = False  # where no plan fits the budget, take the one of lowest peak
    layout: Layout = "as given"  # which layout the weights of convolutions are to have
    chosen_layout: ChosenLayout | None = None  # which they have; None where none was asked for
    kernels: Kernels = "as given"  # whether operations run by those that PyTorch picks
    chosen_kernels: ChosenKernels | None = None  # those of another plan, to be had in this one
    known_kernels: KnownKernels | None = None  # what was found of others before; None where nothing is kept
    compile: bool = False  # whether parts of the model are compiled where that pays
    compiles_anew: bool = True  # and not only where code of them is there already
    loss_chunks: Chunks = None  # rows whose logits the model makes at once; None where it makes them whole
    chosen_regions: CompiledRegions | None = None  # those of another plan, to be compiled in this one
    of_any_size: bool = False  # of these regions, those alone whose code is for other sizes, too
    trials: KnownTrials | None = None  # what was found of such parts before; None where nothing is kept

    def in_each_way(self) -> tuple[PlanRequest, ...]:
        """What is asked for; then, where there may be such, without compiled parts, and without other kernels, too.

        Either may take more memory than it is worth: the best answer is taken.
        """
        ways = [self]
        if self.compile:
            ways.append(self.without_parts())
        if self.kernels != "as given":
            ways.append(replace(ways[-1], kernels="as given", chosen_kernels=None))
        return tuple(ways)

    def is_answered_by(self, regions: CompiledRegions | None, kernels: ChosenKernels | None) -> bool:
        """Whether a graph that has these is what is asked for here, as there are no others in it."""
        has_others_than_usual = self.kernels == "as given" and has_others(kernels)
        return not has_others_than_usual and (self.compile or not is_compiled(regions))

    def without_parts(self) -> PlanRequest:
        """The same, where nothing is compiled."""
        return replace(self, compile=False, chosen_regions=None)

    def memory_to_rest_in(self, device: torch.device) -> SecondMemory | None:
        """Where parameters may be that no operation reads, as under a budget for all of training; else None."""
        return None if self.tiers is None or self.scope != "total" else self.tiers.links_on(device)


def limits_of(time_limit: float | None = None, gap: float | None = None, limits: Limits | None = None) -> Limits:
    """`limits`, else the usual ones, with what users say for short. Raises `SolverError`."""
    if limits is not None and (time_limit is not None or gap is not None):
        raise SolverError("give limits, or time_limit and gap, but not both: limits has search_s, extra_s and gap.")
    if time_limit is not None and not time_limit >= 0:
        raise SolverError(f"time_limit is {time_limit!r}; give the seconds that a search may take.")
    if gap is not None and not 0 <= gap < 1:
        raise SolverError(
            f"gap is {gap!r}; give the share of the step's time that a faster plan may save, such "
            "as 0.01 for 1 %, and 0 for a proof."
        )
    found = (limits or Limits()).within(time_limit)
    return found if gap is None else replace(found, gap=gap)


def check_request(request: PlanRequest) -> None:
    """Refuse what could only fail after minutes of measuring.

    Raises `BudgetError`, `SolverError`, `OptimizerError`, `LossError`, `LayoutError`, `KernelsError`,
    `ArgumentError`.
    """
    check_budget(request.budget)
    check_layout(request.layout)
    check_kernels(request.kernels)
    check_chunks(request.loss_chunks)
    known = request.solver in SOLVERS if isinstance(request.solver, str) else isinstance(request.solver, Solver)
    if not known:
        raise SolverError(
            f"solver must be one of {', '.join(sorted(SOLVERS))}, or an instance of rk_solvers.Solver such as "
            f'Greedy(), but is {request.solver!r}. Leave it out, or say "auto", to have the best of several.'
        )
    check_scope(request.scope, request.optimizer)
    if request.loss is not None and not callable(request.loss):
        raise LossError(f"loss must be a function of the model's output, but is {request.loss!r}.")
