"""Rockmate: train a PyTorch module under a memory budget, with the same outputs and gradients."""

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
from rockmate.allocators import AllocatorSettings, reduce_fragmentation
from rockmate.errors import (
    BudgetError,
    BudgetTooSmall,
    FragmentationWarning,
    InputMismatch,
    LossError,
    NothingToTrain,
    OptimizerError,
    PinError,
    PlanMismatch,
    SolverError,
)
from rockmate.memory import PeakMemory
from rockmate.memory_split import MemorySplit
from rockmate.module import Rockmate
from rockmate.plan import Plan
from rockmate.verify import Verification, verify

__all__ = [
    "AllocatorSettings",
    "BudgetError",
    "BudgetTooSmall",
    "FragmentationWarning",
    "GraphError",
    "GuardError",
    "InputMismatch",
    "LossError",
    "MemorySplit",
    "ModelError",
    "NothingToTrain",
    "OptimizerError",
    "PeakMemory",
    "PinError",
    "Plan",
    "PlanMismatch",
    "ReplayMismatch",
    "Rockmate",
    "RockmateError",
    "SampleError",
    "SolverError",
    "TraceError",
    "TraceWarning",
    "Verification",
    "reduce_fragmentation",
    "verify",
]
