"""Rockmate: a module that trains like the one it wraps, under a memory budget."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch

from rk_solvers import Solver
from rk_solvers.registry import DEFAULT_GAP, DEFAULT_TIME_LIMIT_S
from rockmate.budget import Budget
from rockmate.costs import LossFunction
from rockmate.errors import PickleError
from rockmate.measured import Measured
from rockmate.memory_split import MemorySplit, Scope
from rockmate.optimizer_state import OptimizerLike
from rockmate.pinned import Pins, as_pins
from rockmate.plan import Plan
from rockmate.planner import Planned, plan_model
from rockmate.progress import Progress, progress_display
from rockmate.request import PlanRequest
from rockmate.runner import Runner


class Rockmate(torch.nn.Module):
    """`model` with the same outputs, gradients, buffers and random stream, and a peak within `budget`.

    The wrapper shares the model's parameters, buffers and submodules, under the same names. In
    training it runs generated code (`code`) that forgets and recomputes as `plan` says; in eval mode
    and without gradients it runs the model itself.

    Args:
        model: any module that `rkgb` can trace. It is left as it was.
        sample: a tensor, a tuple of positional arguments, or a dict of keyword arguments of one step.
        budget: most bytes that a training step may allocate above what was resident before it: an int,
            a size such as "2GiB", a float fraction of the eager peak, or None or "auto" for what is free now, when
            the plan is made, less 10 %.
        scope: "step" for a budget as above. "total" for one that bounds parameters, their gradients, buffers, the
            inputs and the optimizer's state as well: a fraction is then of what eager training takes in all.
        optimizer: under scope "total", whose state is counted: an optimizer of the model's parameters, a class such
            as torch.optim.AdamW, or a function that makes one from a list of parameters. It is left as it was.
        loss: called on the model's output, returns the scalar of which training takes the backward. It
            is run once to measure what the loss itself allocates; without it, a cross-entropy's
            needs are assumed.
        solver: "auto" for the best of several, the name of one ("greedy", "rotor", "knapsack", "chen",
            "checkmate", "intervals", "keep-all", "keep-none"), or an instance of `rk_solvers.Solver`.
        time_limit: seconds that one search for a plan may take. Ctrl-C ends it with the best plan so far.
        gap: the search ends earlier once no plan is faster by more than this share of the step's time.
        progress: True to show a progress display, or a callable told (stage, done, total).
        pin: what is always saved and never recomputed, beside what must not be anyway: submodules of `model`
            (all that runs while they are called), operators such as ``torch.ops.aten.topk``, and operations
            by their names in the graphs, such as "softmax_3".

    Raises:
        BudgetError: the budget or its scope cannot be read.
        BudgetTooSmall: no schedule fits; the error names the smallest budget found.
        SampleError, TraceError, NothingToTrain: the module cannot be planned on this sample.
        ModelError, LossError, SolverError, PinError, OptimizerError: an argument is not what it should be.
    """

    original: torch.nn.Module
    plan: Plan

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Any,
        budget: Budget = None,
        *,
        loss: LossFunction | None = None,
        solver: Solver | str = "auto",
        time_limit: float = DEFAULT_TIME_LIMIT_S,
        gap: float = DEFAULT_GAP,
        progress: bool | Progress = False,
        pin: Pins = (),
        scope: Scope = "step",
        optimizer: OptimizerLike | None = None,
    ) -> None:
        with progress_display(progress) as tell:
            request = PlanRequest(budget, loss, solver, tell, time_limit, gap, as_pins(pin), scope, optimizer)
            measured, planned = plan_model(model, sample, request)
        self._adopt(model, measured, planned)

    @classmethod
    def _following(cls, model: torch.nn.Module, measured: Measured, planned: Planned) -> Self:
        """`model` under a plan that is there already."""
        module = cls.__new__(cls)
        module._adopt(model, measured, planned)
        return module

    def _adopt(self, model: torch.nn.Module, measured: Measured, planned: Planned) -> None:
        """Become `model`, following `planned`."""
        super().__init__()
        compiled = planned.compile_for(model)
        state = self.__dict__
        state["original"] = model
        # The very dictionaries: names, and what is put under them later, are the model's own.
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[shared] = getattr(model, shared)
        state["plan"] = planned.plan
        state["_measured"] = measured
        state["_planned"] = planned
        state["_compiled"] = compiled
        state["_runner"] = Runner(model, measured.graphs.D_graph, measured.pattern, compiled)

    @property
    def code(self) -> str:
        """The generated source: the forward, and one function per recomputation."""
        return self._compiled.code.source

    @property
    def memory_split(self) -> MemorySplit | None:
        """What a budget for all of training (scope "total") is divided into; None of a budget for the step."""
        return self.plan.memory_split

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises `InputMismatch` for arguments unlike the sample's, `PlanMismatch` for a model unlike the one that was
        planned, and `GuardError` where the data would take another branch of the model than the sample took.
        """
        if not self.original.training or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self._runner(*args, **kwargs)

    def backward(self, *_: Any, **__: Any) -> None:
        """Nothing: ``loss.backward()`` is enough. Accepted for code written for older versions."""

    # ---- the model, seen through -----------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The model's own mode."""
        original = self.__dict__.get("original")
        return True if original is None else original.training

    @training.setter
    def training(self, mode: bool) -> None:
        original = self.__dict__.get("original")
        if original is not None:
            original.training = mode

    def train(self, mode: bool = True) -> Rockmate:
        """Set the model's mode, and its submodules'."""
        self.original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state dict: same keys."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model."""
        return self.original.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" in self.__dict__:
                return getattr(self.original, name)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Rockmate:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._adopt(copy.deepcopy(self.original, memo), self._measured, self._planned)
        twin._runner.expect_flags_of(self._runner)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PickleError(
            f"a planned {type(self.original).__name__} cannot be pickled: its generated code belongs to this process. "
            "Save model.state_dict() or pickle model.original, and plan again where it is loaded."
        )

    def extra_repr(self) -> str:
        """The plan, on one line."""
        return str(self.plan)
