"""Rockmate: train a PyTorch module under a memory budget, with the same outputs and gradients."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from rockmate.moved import tell_of_moved_modules

if TYPE_CHECKING:
    from rk_solvers.limits import Limits
    from rkgb.errors import (
        GraphError,
        GuardError,
        ModelError,
        ReplayMismatch,
        RockmateError,
        SampleError,
        TraceError,
        TraceWarning,
    )
    from rockmate import distributed
    from rockmate.calls.fallbacks import Fallback
    from rockmate.errors import (
        ArgumentError,
        BatchError,
        BudgetError,
        BudgetTooSmall,
        CheckpointingWarning,
        ChunkError,
        CompileError,
        CompileWarning,
        DoubleBackwardWarning,
        ExportWarning,
        FallbackWarning,
        FragmentationWarning,
        InputMismatch,
        IntegrationError,
        KernelsError,
        LayoutError,
        LossError,
        NothingToTrain,
        NotPlanned,
        OffloadError,
        OffloadWarning,
        OptimizerError,
        PickleWarning,
        PinError,
        PlanFileError,
        PlanFileMismatch,
        PlanFileWarning,
        PlanMismatch,
        PoorPlanWarning,
        ReplanWarning,
        ShapesError,
        SolverError,
        TransformError,
    )
    from rockmate.forecast.answer import Estimate
    from rockmate.forecast.estimate import estimate
    from rockmate.memory.allocators import AllocatorSettings, keep_freed_memory, reduce_fragmentation
    from rockmate.memory.peak import PeakMemory
    from rockmate.memory.split import MemorySplit
    from rockmate.module import Rockmate
    from rockmate.observing.peak_report import PeakReport
    from rockmate.offload.option import Offload
    from rockmate.options import PlanOptions
    from rockmate.plan_files.content import PlanFile
    from rockmate.planning.plan import Plan
    from rockmate.queries.batch_search import LargestBatch
    from rockmate.queries.max_batch import max_batch
    from rockmate.queries.min_budget import CheapestBudget, smallest_budget
    from rockmate.queries.verification import Verification, verify
    from rockmate.resting.optimizer import OffloadedOptimizer

__all__ = [
    "AllocatorSettings",
    "ArgumentError",
    "BatchError",
    "BudgetError",
    "BudgetTooSmall",
    "CheapestBudget",
    "CheckpointingWarning",
    "ChunkError",
    "CompileError",
    "CompileWarning",
    "DoubleBackwardWarning",
    "Estimate",
    "ExportWarning",
    "Fallback",
    "FallbackWarning",
    "FragmentationWarning",
    "GraphError",
    "GuardError",
    "InputMismatch",
    "IntegrationError",
    "KernelsError",
    "LargestBatch",
    "LayoutError",
    "Limits",
    "LossError",
    "MemorySplit",
    "ModelError",
    "NotPlanned",
    "NothingToTrain",
    "Offload",
    "OffloadError",
    "OffloadWarning",
    "OffloadedOptimizer",
    "OptimizerError",
    "PeakMemory",
    "PeakReport",
    "PickleWarning",
    "PinError",
    "Plan",
    "PlanFile",
    "PlanFileError",
    "PlanFileMismatch",
    "PlanFileWarning",
    "PlanMismatch",
    "PlanOptions",
    "PoorPlanWarning",
    "ReplanWarning",
    "ReplayMismatch",
    "Rockmate",
    "RockmateError",
    "SampleError",
    "ShapesError",
    "SolverError",
    "TraceError",
    "TraceWarning",
    "TransformError",
    "Verification",
    "distributed",
    "estimate",
    "keep_freed_memory",
    "max_batch",
    "reduce_fragmentation",
    "smallest_budget",
    "verify",
]

# Where each name is, to be imported when it is first asked for: the command line answers without PyTorch where it can.
_HOMES = {
    "rkgb.errors": (
        "GraphError",
        "GuardError",
        "ModelError",
        "ReplayMismatch",
        "RockmateError",
        "SampleError",
        "TraceError",
        "TraceWarning",
    ),
    "rockmate.errors": (
        "ArgumentError",
        "BatchError",
        "BudgetError",
        "BudgetTooSmall",
        "CheckpointingWarning",
        "DoubleBackwardWarning",
        "ExportWarning",
        "FallbackWarning",
        "FragmentationWarning",
        "InputMismatch",
        "IntegrationError",
        "ChunkError",
        "CompileError",
        "CompileWarning",
        "KernelsError",
        "LayoutError",
        "LossError",
        "NothingToTrain",
        "NotPlanned",
        "OffloadError",
        "OffloadWarning",
        "OptimizerError",
        "PickleWarning",
        "PinError",
        "PlanFileError",
        "PlanFileMismatch",
        "PlanFileWarning",
        "PlanMismatch",
        "PoorPlanWarning",
        "ReplanWarning",
        "ShapesError",
        "SolverError",
        "TransformError",
    ),
    "rockmate.calls.fallbacks": ("Fallback",),
    "rockmate.forecast.answer": ("Estimate",),
    "rockmate.forecast.estimate": ("estimate",),
    "rockmate.observing.peak_report": ("PeakReport",),
    "rockmate.queries.batch_search": ("LargestBatch",),
    "rockmate.queries.max_batch": ("max_batch",),
    "rockmate.queries.min_budget": (
        "CheapestBudget",
        "smallest_budget",
    ),
    "rk_solvers.limits": ("Limits",),
    "rockmate.memory.allocators": (
        "AllocatorSettings",
        "keep_freed_memory",
        "reduce_fragmentation",
    ),
    "rockmate.offload.option": ("Offload",),
    "rockmate.resting.optimizer": ("OffloadedOptimizer",),
    "rockmate.memory.peak": ("PeakMemory",),
    "rockmate.memory.split": ("MemorySplit",),
    "rockmate.module": ("Rockmate",),
    "rockmate.options": ("PlanOptions",),
    "rockmate.planning.plan": ("Plan",),
    "rockmate.plan_files.content": ("PlanFile",),
    "rockmate.queries.verification": (
        "Verification",
        "verify",
    ),
}
tell_of_moved_modules()
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a module of this package, which is imported for it."""
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
