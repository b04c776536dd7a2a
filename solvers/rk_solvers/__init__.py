"""Recomputation schedules of training steps, on plain numbers: problems, schedules, solvers and a checker."""

from .auto import Auto
from .bound import Bound, lower_bound_ms
from .checker import CheckedSchedule, check
from .checkmate import Checkmate
from .chen import Chen
from .evaluate import Evaluation, evaluate, memory_curve, normalise, peak_and_time
from .greedy import Greedy, improve_plan
from .intervals import Bounded, Intervals
from .keep_all import KeepAll
from .keep_none import KeepNone
from .knapsack import Knapsack
from .milp import BackendUnavailable
from .oracle import Oracle
from .problem import BackwardOp, Chain, Data, ForwardOp, Problem, Recompute
from .registry import SOLVERS, Effort, solver_named
from .rotor import Rotor, RotorTable
from .schedule import Backward, Compute, Forget, Op, Schedule, ScheduleError, schedule_of
from .smallest import SmallestBudget, smallest_budget
from .solver import Solution, Solver, Status

__all__ = [
    "SOLVERS",
    "Auto",
    "BackendUnavailable",
    "Backward",
    "BackwardOp",
    "Bound",
    "Bounded",
    "Chain",
    "CheckedSchedule",
    "Checkmate",
    "Chen",
    "Compute",
    "Data",
    "Effort",
    "Evaluation",
    "Forget",
    "ForwardOp",
    "Greedy",
    "Intervals",
    "KeepAll",
    "KeepNone",
    "Knapsack",
    "Op",
    "Oracle",
    "Problem",
    "Recompute",
    "Rotor",
    "RotorTable",
    "Schedule",
    "ScheduleError",
    "SmallestBudget",
    "Solution",
    "Solver",
    "Status",
    "check",
    "evaluate",
    "improve_plan",
    "lower_bound_ms",
    "memory_curve",
    "normalise",
    "peak_and_time",
    "schedule_of",
    "smallest_budget",
    "solver_named",
]
