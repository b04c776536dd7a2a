"""Recomputation schedules of training steps, on plain numbers: problems, schedules, solvers and a checker."""

from .auto import Auto
from .bound import lower_bound_ms
from .checker import CheckedSchedule, check
from .checkmate import Checkmate
from .chen import Chen
from .evaluate import Evaluation, evaluate, memory_curve, normalise, peak_and_time
from .greedy import Greedy, improve_plan
from .hiremate import Hiremate
from .intervals import Bounded, Intervals
from .keep_all import KeepAll
from .keep_none import KeepNone
from .knapsack import Knapsack
from .milp import BackendUnavailable
from .oracle import Oracle
from .problem import BackwardOp, Chain, Data, ForwardOp, Problem, Recompute, problem_from_json, problem_to_json
from .registry import SOLVERS, Effort, solver_named
from .rockmate import RockmateSolver
from .rotor import Rotor, RotorTable
from .schedule import Backward, Compute, Forget, Op, Schedule, ScheduleError, schedule_of
from .smallest import SmallestBudget, smallest_budget
from .solver import Solution, Solver, Status
from .sweep import solve_sweep

__all__ = [
    "SOLVERS",
    "Auto",
    "BackendUnavailable",
    "Backward",
    "BackwardOp",
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
    "Hiremate",
    "Intervals",
    "KeepAll",
    "KeepNone",
    "Knapsack",
    "Op",
    "Oracle",
    "Problem",
    "Recompute",
    "RockmateSolver",
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
    "problem_from_json",
    "problem_to_json",
    "schedule_of",
    "smallest_budget",
    "solve_sweep",
    "solver_named",
]
