"""Rockmate 1's module: graph, chain, sequence and code made one after the other."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rk_solvers import Limits, Problem, RotorTable, Solution, Solver, peak_and_time, schedule_of, simulate
from rk_solvers.chain.rotor import prepare_table, solved
from rk_solvers.chain.two_level import Blocks, RockmateSolver
from rk_solvers.solver import best_solution
from rkgb import make_sample
from rockmate.errors import NotPlanned, SolverError
from rockmate.memory.budget import Budget
from rockmate.plan_files import load, save
from rockmate.plan_files.record import plan_file_of
from rockmate.planning.costs import LossFunction
from rockmate.planning.plan import Plan
from rockmate.queries.measured_rockmate import MeasuredRockmate, PlannedStage

_MOST_UNITS = 5000  # of a budget: the table grows with it
_BACKENDS = {"highs": "scipy", "scipy": "scipy", "gurobi": "gurobi"}
_OWN = ("_chains", "_stage", "_sample")  # neither copied nor pickled


class Rockmate(MeasuredRockmate):
    """A module that is planned in stages, and for other budgets without tracing or measuring it again.

        module = Rockmate(model, sample, solve=False, get_sequence=False, get_compiled_fct=False)
        module.get_chain(nb_budget_save=20, nb_budget_peak=10)  # once: all that takes long
        module.get_sequence(2 * 2**30)  # for one budget after another
        module.get_compiled_fct()  # now it trains by that sequence

    The module itself is `rockmate.Rockmate`, with parameters, buffers and gradients shared with `original_mod`;
    ``backward()`` may be called after the loss's, and does nothing.

    Args:
        original_mod: the model; on any device.
        model_inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments of one step.
        budget: as for `rockmate.Rockmate`; a float above 1 is a number of bytes, too.
        mem_unit: bytes of one unit of memory in the dynamic program. None for about a 400th of the budget.
        verbose: True to show a progress display.
        solve: whether `get_chain` is called now. The three stages need each other in this order.
        get_sequence: whether `get_sequence` is.
        get_compiled_fct: whether `get_compiled_fct` is.
        nb_budget_save: bounds on the bytes that a block saves under which its exact program is solved …
        nb_budget_peak: … with each of these on its peak. A block has greedy options besides.
        ilp_solver: "highs", which SciPy brings, or "gurobi", for which gurobipy and a licence are needed.
        loss, time_limit: as for `rockmate.Rockmate`; the time is that of `get_chain`.

    Raises:
        SolverError: another `ilp_solver`, a `mem_unit` or a number of bounds that is not positive.

    Beside that it raises what `rockmate.Rockmate` does.
    """

    _chains: tuple[Blocks, ...] = ()
    _stage: PlannedStage | None = None
    _sample: Any = None
    _seconds: tuple[float, float] = (0.0, 0.0)  # that the chain and the sequence took

    def __init__(
        self,
        original_mod: torch.nn.Module,
        model_inputs: Any,
        budget: Budget = None,
        mem_unit: int | None = None,
        verbose: bool = False,
        solve: bool = True,
        get_sequence: bool = True,
        get_compiled_fct: bool = True,
        *,
        nb_budget_save: int = 10,
        nb_budget_peak: int = 5,
        ilp_solver: str = "highs",
        loss: LossFunction | None = None,
        time_limit: float = Limits().search_s,
    ) -> None:
        if ilp_solver not in _BACKENDS:
            raise SolverError(f'ilp_solver is {ilp_solver!r}; give "highs", or "gurobi". Others are not driven here.')
        if mem_unit is not None and mem_unit <= 0:
            raise SolverError(f"mem_unit is {mem_unit!r}; give the bytes of a unit of memory, or None.")
        super().__init__(
            original_mod, None, _bytes_of(budget), loss=loss, solver="rockmate", time_limit=time_limit, progress=verbose
        )
        sample = tuple(model_inputs) if isinstance(model_inputs, list) else model_inputs
        self.__dict__.update(_sample=make_sample(original_mod, sample), _mem_unit=mem_unit, _backend=ilp_solver)
        if solve:
            self.get_chain(nb_budget_save, nb_budget_peak)
            if get_sequence:
                self.get_sequence(budget)
                if get_compiled_fct:
                    self.get_compiled_fct()

    # ---- stages ----------------------------------------------------------------------------------

    def get_chain(self, nb_budget_save: int = 10, nb_budget_peak: int = 5) -> None:
        """Measure the module, and solve its blocks for all budgets. Raises as planning does."""
        if min(nb_budget_save, nb_budget_peak) < 1:
            raise SolverError(f"nb_budget_save {nb_budget_save} and nb_budget_peak {nb_budget_peak} must be positive.")
        if self._measured is None:
            self.measure(self._known_sample())
        measured = self._what_was_measured()
        started = time.perf_counter()
        solver = RockmateSolver(
            measured.chain,
            self._family.request.limits.longest_s,
            steps=nb_budget_peak,
            saved_steps=nb_budget_save,
            backend=_BACKENDS[self._backend],
        )
        deadline = time.monotonic() + solver.time_limit_s
        self.__dict__["_chains"] = tuple(solver.blocks(measured.problem, deadline))
        self._took(chain_s=time.perf_counter() - started)

    def get_sequence(self, budget: Budget = None) -> None:
        """Find the sequence for a budget, and run one step of it. Module and plan stay as they are until
        `get_compiled_fct`. Raises `NotPlanned` before `get_chain`, `BudgetTooSmall` as planning does.
        """
        if not self._chains:
            raise NotPlanned("there is no chain yet: call get_chain() first.")
        started = time.perf_counter()
        self.__dict__["_stage"] = self._planned_within(_bytes_of(budget), SolvedChains(self._chains, self._mem_unit))
        self._took(sequence_s=time.perf_counter() - started)

    def get_compiled_fct(self) -> None:
        """Train by the sequence found last. Raises `NotPlanned` before `get_sequence`."""
        self._take(self._stage_there())

    def reinit(self, set_to_none: bool = False) -> None:
        """Set gradients to zero, or to None. Nothing else is left of a step that is over."""
        self.original.zero_grad(set_to_none=set_to_none)

    # ---- predictions -----------------------------------------------------------------------------

    def expect_time(self) -> float:
        """Predicted milliseconds of a step of the sequence found last. Raises `NotPlanned` before `get_sequence`."""
        return self._sequence_plan().time_ms

    def expect_mem(self, overhead: bool = False) -> int:
        """Predicted bytes of a step, at most: between two operations, and with `overhead` also while they run."""
        plan = self._sequence_plan()
        if overhead:
            return plan.peak_bytes
        simulation = simulate(self._sequence_problem(), plan.schedule)
        return max(moment.alive_bytes for moment in simulation.moments)

    @property
    def simulation_time(self) -> float:
        """As `expect_time`."""
        return self.expect_time()

    @property
    def simulation_overhead(self) -> float:
        """Predicted time of a step over that of one that recomputes nothing: 1.1 is a tenth more."""
        return 1 + self._sequence_plan().overhead

    @property
    def ILP_solve_time(self) -> float:  # noqa: N802  Rockmate 1's name
        """Seconds that the blocks took in `get_chain`."""
        return self._seconds[0]

    @property
    def DP_solve_time(self) -> float:  # noqa: N802  Rockmate 1's name
        """Seconds that `get_sequence` took, with the real step that it ran."""
        return self._seconds[1]

    # ---- files -----------------------------------------------------------------------------------

    def save_to_file(self, path: str | os.PathLike[str], id: str) -> None:
        """Write the sequence found last, as a plan file named `id` in the folder `path`."""
        stage = self._stage
        plan_file = (
            self.plan_file()
            if stage is None
            else plan_file_of(self.original, stage.measured, stage.planned.plan, self._family.request)
        )
        save(plan_file, _file(path, id))

    def load_from_file(self, path: str | os.PathLike[str], id: str) -> None:
        """Train by the plan file that `save_to_file` wrote, or any other, for this module and these inputs.

        Neither measures nor solves. Raises `PlanFileError` and `PlanFileMismatch` for a file that is damaged, or of
        another module or inputs: then everything stays as it was.
        """
        self._follow(load(_file(path, id)), self._known_sample())
        self.__dict__["_stage"] = None

    # ---- inside ----------------------------------------------------------------------------------

    @property
    def original_mod(self) -> torch.nn.Module:
        """The model."""
        return self.original

    def _known_sample(self) -> Any:
        if self._sample is None:
            raise NotPlanned("inputs are not copied or pickled with a module: make it anew from the model and inputs.")
        return self._sample

    def _stage_there(self) -> PlannedStage:
        if self._stage is None:
            raise NotPlanned("there is no sequence yet: call get_sequence(budget) first.")
        return self._stage

    def _sequence_plan(self) -> Plan:
        return self.plan if self._stage is None and self._family.members else self._stage_there().planned.plan

    def _sequence_problem(self) -> Problem:
        return self._member.measured.problem if self._stage is None else self._stage.measured.problem

    def _took(self, chain_s: float | None = None, sequence_s: float | None = None) -> None:
        old_chain_s, old_sequence_s = self._seconds
        self.__dict__["_seconds"] = (
            old_chain_s if chain_s is None else chain_s,
            old_sequence_s if sequence_s is None else sequence_s,
        )

    def _notes(self) -> dict[str, Any]:
        return {name: value for name, value in super()._notes().items() if name not in _OWN}


class SolvedChains(Solver):
    """The dynamic program over chains whose blocks are solved: for one budget after another."""

    def __init__(self, chains: tuple[Blocks, ...], mem_unit: int | None) -> None:
        self._chains, self._mem_unit = chains, mem_unit

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "rockmate"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest plan that fits, else that of lowest peak. Raises `SolverError` for too small a unit of memory."""
        plans = [(self.name, schedule_of(problem, {}))]
        most_bytes = peak_and_time(problem, plans[0][1])[0]
        for blocks in self._chains:
            found = solved(partial(self._table, problem, blocks), budget_bytes, most_bytes)
            plans.append((self.name, found.schedule))
        return best_solution(problem, budget_bytes, plans)

    def _table(self, problem: Problem, blocks: Blocks, budget_bytes: int) -> RotorTable:
        if self._mem_unit is None:
            return prepare_table(problem, blocks, budget_bytes)
        units = -(-budget_bytes // self._mem_unit)
        if units > _MOST_UNITS:
            raise SolverError(
                f"mem_unit is {self._mem_unit} bytes, of which {budget_bytes} bytes are {units}: the dynamic program "
                f"takes at most {_MOST_UNITS}. Give at least {-(-budget_bytes // _MOST_UNITS)}, or None."
            )
        return prepare_table(problem, blocks, budget_bytes, max(50, round(1.3 * units)))  # it allows for 1.3 budgets


def _bytes_of(budget: Budget) -> Budget:
    """Rockmate 1 takes a float for bytes; one of at most 1 is a part of the eager peak here."""
    return int(budget) if isinstance(budget, float) and 1 < budget < sys.maxsize else budget


def _file(path: str | os.PathLike[str], id: str) -> Path:
    if Path(id).name != id:
        raise ValueError(f"the id is {id!r}; give the name of a file without its folder, which is the path.")
    return Path(path) / f"{id}.json"
