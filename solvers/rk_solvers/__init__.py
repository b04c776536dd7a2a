"""Recomputation schedules of training steps, on plain numbers: problems, schedules, solvers and a checker."""

from rk_solvers.anytime.auto import Auto
from rk_solvers.anytime.min_budget import SmallestBudget, smallest_budget
from rk_solvers.anytime.sweep import solve_sweep
from rk_solvers.baselines.chen import Chen
from rk_solvers.baselines.keep_all import KeepAll
from rk_solvers.baselines.keep_none import KeepNone
from rk_solvers.baselines.knapsack import Knapsack
from rk_solvers.bounds.time_bound import lower_bound_ms
from rk_solvers.chain.hiremate import Hiremate
from rk_solvers.chain.rotor import Rotor, RotorTable
from rk_solvers.chain.two_level import RockmateSolver
from rk_solvers.exact.checkmate import Checkmate
from rk_solvers.exact.oracle import Oracle
from rk_solvers.intervals.solver import Bounded, Intervals
from rk_solvers.limits import Limits
from rk_solvers.links import Link, SecondMemory
from rk_solvers.liveness import (
    Evaluation,
    Recomputed,
    binding,
    evaluate,
    memory_curve,
    normalise,
    peak_and_time,
    schedule_of,
)
from rk_solvers.local.greedy import Greedy, improve_plan
from rk_solvers.milp import BackendUnavailable
from rk_solvers.problem import (
    BackwardOp,
    Chain,
    Data,
    ForwardOp,
    Option,
    Problem,
    problem_from_json,
    problem_to_json,
)
from rk_solvers.registry import SOLVERS, solver_named
from rk_solvers.replay.checker import CheckedSchedule, check
from rk_solvers.replay.simulation import LinkUse, Moment, Simulation, simulate
from rk_solvers.schedule import Backward, Compute, Forget, Op, Schedule, ScheduleError
from rk_solvers.solver import Solution, Solver, Status

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
    "Evaluation",
    "Forget",
    "ForwardOp",
    "Greedy",
    "Hiremate",
    "Intervals",
    "KeepAll",
    "KeepNone",
    "Knapsack",
    "Limits",
    "Link",
    "LinkUse",
    "Moment",
    "Op",
    "Option",
    "Oracle",
    "Problem",
    "Recomputed",
    "RockmateSolver",
    "Rotor",
    "RotorTable",
    "Schedule",
    "ScheduleError",
    "SecondMemory",
    "Simulation",
    "SmallestBudget",
    "Solution",
    "Solver",
    "Status",
    "binding",
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
    "simulate",
    "smallest_budget",
    "solve_sweep",
    "solver_named",
]
