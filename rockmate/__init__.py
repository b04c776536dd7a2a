"""Rockmate: train a PyTorch module under a memory budget, with the same outputs and gradients."""

from rkgb.errors import GraphError, ReplayMismatch, RockmateError, SampleError, TraceError
from rockmate.errors import BudgetError, BudgetTooSmall, InputMismatch, NothingToTrain, PlanMismatch
from rockmate.memory import PeakMemory
from rockmate.module import Rockmate
from rockmate.plan import Plan
from rockmate.verify import Verification, verify

__all__ = [
    "BudgetError",
    "BudgetTooSmall",
    "GraphError",
    "InputMismatch",
    "NothingToTrain",
    "PeakMemory",
    "Plan",
    "PlanMismatch",
    "ReplayMismatch",
    "Rockmate",
    "RockmateError",
    "SampleError",
    "TraceError",
    "Verification",
    "verify",
]
