"""Errors of planning and running. Every message says what happened, with which values, and what to do."""

from __future__ import annotations

from rkgb.errors import GuardError, RockmateError


class BudgetError(RockmateError, ValueError):
    """The budget cannot be read: it must be a positive number of bytes, a size, or a fraction."""


class BudgetTooSmall(RockmateError):
    """No schedule that any solver found fits the budget.

    `smallest_budget_bytes` is the smallest for which one was found, and a step was run in it. `binding_op` is where its
    peak occurs. No schedule takes less than `proven_bytes`: the truth is between the two.
    """

    def __init__(self, message: str, smallest_budget_bytes: int, binding_op: str, proven_bytes: int) -> None:
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes
        self.binding_op = binding_op
        self.proven_bytes = proven_bytes


class ArgumentError(RockmateError, ValueError):
    """An argument is not what it should be."""


class OffloadError(RockmateError):
    """A tensor could not be moved to the second memory or back: no space there, or none that can be used."""


class LayoutError(RockmateError, ValueError):
    """A layout is none that there is, or the model cannot run in it."""


class ChunkError(RockmateError, ValueError):
    """The model is none whose logits can be made a few rows at a time."""


class CompileError(RockmateError, RuntimeError):
    """Parts of the model that a plan has compiled cannot be compiled here."""


class KernelsError(RockmateError, ValueError):
    """No such choice of kernels, or one of a plan that this PyTorch has not."""


class CompileWarning(UserWarning):
    """Parts of the model that were to be compiled stay as they are."""


class OffloadWarning(UserWarning):
    """Data that were to be moved to a second memory stay where they are."""


class FragmentationWarning(UserWarning):
    """On CUDA, a plan's step reserves more memory than a tenth above its budget: the allocator leaves gaps."""


class ExportWarning(UserWarning):
    """A planned module in training mode is recorded by another tracer, which makes a module without a plan of it."""


class PoorPlanWarning(UserWarning):
    """A search ended with a plan that may be much slower than the best one."""


class CheckpointingWarning(UserWarning):
    """A model's own checkpointing is switched on. Planned steps run without it: the plan chooses what is recomputed."""


class DoubleBackwardWarning(UserWarning):
    """A backward with `create_graph=True` goes through a module whose plan recomputes: it may exceed the budget."""


class NothingToTrain(RockmateError):
    """The module has no gradient to compute, so there is no training step to plan."""


class LossError(RockmateError, TypeError):
    """The loss given for measuring is no function from the model's output to a scalar with a gradient."""


class SolverError(RockmateError, TypeError):
    """What was given as the solver is none."""


class OptimizerError(RockmateError, TypeError):
    """What was given as the optimizer is none, or what it keeps cannot be told."""


class PinError(RockmateError, ValueError):
    """What was to be pinned is nothing that the model runs."""


class InputMismatch(RockmateError):
    """A call does not look like the sample with which the module was planned."""


class PlanMismatch(RockmateError):
    """The module has changed since it was planned, so that its plan no longer holds."""


class SizeMismatch(GuardError):
    """A call's sizes are none of those that the code holds for, as its first run showed."""


class PlanFileError(RockmateError):
    """A file is no plan that this version can read, or is damaged."""


class PlanFileMismatch(PlanMismatch):
    """The plan in a file was made for another graph than this module has on this sample."""


class PlanFileWarning(UserWarning):
    """The plan in a file was made with another PyTorch or device: only what it recomputes is taken from it."""


class NotPlanned(RockmateError):
    """There is no plan yet: it is made with the first training batch."""


class BatchError(RockmateError, ValueError):
    """No dimension of a sample proves to be its batch, or the loss takes no other one."""


class ShapesError(RockmateError, ValueError):
    """What is to happen to calls of other shapes is not one of the answers."""


class ReplanWarning(UserWarning):
    """A call came that no plan held for: it was planned, or ran without a plan."""


class FallbackWarning(ReplanWarning):
    """A call ran by the module itself, or by a plan above the budget, as it could not be planned within the budget.

    What planning ended with is its ``__cause__``. It comes once for each reason; `Rockmate.fallbacks` counts.
    """


class PickleWarning(UserWarning):
    """Something that planning was given cannot be pickled, and is left out of what was saved."""


class PlanExchangeError(RockmateError):
    """Another rank was to make the plan, and did not: it failed (`rank` tells which), or was not heard of in time."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PlanExchangeWarning(UserWarning):
    """This rank plans by itself, as it cannot follow the plan of another."""


class IntegrationError(RockmateError):
    """A trainer of another library and a planned module do not go together as they are."""


class TransformError(RockmateError):
    """A planned module was called within a transform of `torch.func`, or in forward-mode differentiation."""
