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
from rockmate import distributed
from rockmate.errors import (
    BatchError,
    BudgetError,
    BudgetTooSmall,
    CheckpointingWarning,
    ExportWarning,
    FragmentationWarning,
    InputMismatch,
    IntegrationError,
    LossError,
    NothingToTrain,
    NotPlanned,
    OptimizerError,
    PickleWarning,
    PinError,
    PlanFileError,
    PlanFileMismatch,
    PlanFileWarning,
    PlanMismatch,
    ReplanWarning,
    ShapesError,
    SolverError,
    TransformError,
)
from rockmate.inverse import CheapestBudget, LargestBatch, max_batch, smallest_budget
from rockmate.memory.allocators import AllocatorSettings, keep_freed_memory, reduce_fragmentation
from rockmate.memory.peak import PeakMemory
from rockmate.memory.split import MemorySplit
from rockmate.module import Rockmate
from rockmate.plan import Plan
from rockmate.plan_files.content import PlanFile
from rockmate.verify import Verification, verify

__all__ = [
    "AllocatorSettings",
    "BatchError",
    "BudgetError",
    "BudgetTooSmall",
    "CheapestBudget",
    "CheckpointingWarning",
    "ExportWarning",
    "FragmentationWarning",
    "GraphError",
    "GuardError",
    "InputMismatch",
    "IntegrationError",
    "LargestBatch",
    "LossError",
    "MemorySplit",
    "ModelError",
    "NotPlanned",
    "NothingToTrain",
    "OptimizerError",
    "PeakMemory",
    "PickleWarning",
    "PinError",
    "Plan",
    "PlanFile",
    "PlanFileError",
    "PlanFileMismatch",
    "PlanFileWarning",
    "PlanMismatch",
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
    "keep_freed_memory",
    "max_batch",
    "reduce_fragmentation",
    "smallest_budget",
    "verify",
]
