"""Dynamic program over a chain of blocks.

References: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory", Inria RR-9302, 2019;
O. Beaumont, L. Eyraud-Dubois, A. Shilova, "Efficient combination of rematerialization and offloading for
training DNNs", NeurIPS 2021; options per block: Rockmate, ICML 2023 (see `blocks`).

Notation: `T[i, j, m]` is the least time to run the forwards and backwards of blocks `i..j` with the input of
`i` stored and `m` slots of memory beside it; pins (data that blocks beyond the next one read) are no inputs,
but counted in every cell where they are alive. Either the forward of `i` runs once, with one of its options
(`Fe`), and what it saves is stored while blocks `i+1..j` are solved; or blocks `i..k-1` run keeping only the
inputs of `i` and of `k` (`Fck`, then `Fng`), `k..j` are solved, then `i..k-1` again. The loss is block `L`,
with no forward. In a cell before it the forward of the last block runs again for its backward alone: what only
later blocks would read is not computed again.

Complexity: O(L^2 (L + options) M) for L blocks and M slots: 100 blocks, 500 slots and 10 options take a quarter of
a second once numba is loaded, and about half a second in numpy (`rotor_tables`). Schedules are
persistent: what is stored stays until the backward that it was stored for. Known gaps: a pin is recomputed only
with the block that makes it, and counted until the end of the forward even where its readers could be through with
it before; what a block hands on is computed again with the block even while it is still stored for the next one,
which costs time where a block's backward reads its output; sizes are rounded up to slots. The expanded plan is
therefore evaluated exactly, for several internal budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .blocks import Block, blocks_of
from .evaluate import normalise, peak_and_time
from .problem import Chain, Problem, Recompute
from .rotor_tables import ChainNumbers, ChainTable, fill, least_to_pass
from .sequence import Operation, expand
from .solver import Solution, Solver, best_solution, solution_of


@dataclass(frozen=True, slots=True)
class Rotor(Solver):
    """Dynamic program along `chain`."""

    chain: Chain
    slots: int = 500  # of the greatest budget
    grid: int = 4  # bounds per axis when options are made
    rounds: int = 10  # local search on each option
    internal: int = 9  # internal budgets tried for one budget

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "rotor"

    def prepare(self, problem: Problem, max_budget_bytes: int) -> RotorTable:
        """The table for every budget up to `max_budget_bytes`; `ValueError` on a chain of another problem."""
        held = sum(problem.data[item].size_bytes for item in problem.held)
        room = max(self.slots, round(1.3 * max(0, max_budget_bytes - problem.base_bytes - held)))
        slot_bytes = -(-room // self.slots)
        blocks = blocks_of(problem, self.chain, self.grid, self.rounds)
        table = fill(ChainNumbers.of(blocks, slot_bytes, self.slots))
        return RotorTable(problem, blocks, table, slot_bytes, problem.base_bytes + held, self.internal)

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """The fastest plan of the table that fits `budget_bytes`; see `prepare` for several budgets."""
        most = peak_and_time(problem, problem.no_recompute)[0]
        if most <= budget_bytes:
            return solution_of(problem, budget_bytes, problem.no_recompute, self.name)
        solution = self.prepare(problem, max(budget_bytes, 0)).solve(budget_bytes)
        if not solution.status.fits:  # the lowest peak may lie above what that table holds
            solution = self.prepare(problem, most).solve(budget_bytes)
        return solution


@dataclass(frozen=True, slots=True)
class RotorTable:
    """A filled table, reusable for every budget up to the one it was prepared for."""

    problem: Problem
    blocks: tuple[Block, ...]
    table: ChainTable
    slot_bytes: int
    fixed_bytes: int  # resident and held throughout
    internal: int

    def solve(self, budget_bytes: int) -> Solution:
        """The fastest plan that fits `budget_bytes`, or the one of lowest peak that the table knows."""
        plans = [("rotor", plan) for plan in self.plans(budget_bytes)]
        if not any(peak_and_time(self.problem, plan)[0] <= budget_bytes for _, plan in plans):
            least = self._least_slots()
            if least is not None:
                plans.append(("rotor", self.plan(least)))
        plans.append(("rotor", self.problem.no_recompute))
        return best_solution(self.problem, budget_bytes, plans)

    def plans(self, budget_bytes: int) -> list[Recompute]:
        """Plans of several internal budgets around `budget_bytes`; some may exceed it."""
        slots = (budget_bytes - self.fixed_bytes) / self.slot_bytes
        least, most = self._least_slots(), self.table.numbers.slots
        if least is None or slots < 0:
            return []
        peaks: dict[Recompute, int] = {}

        def fits(memory: int) -> bool:
            plan = self.plan(memory)
            if plan not in peaks:
                peaks[plan] = peak_and_time(self.problem, plan)[0]
            return peaks[plan] <= budget_bytes

        tried = sorted({min(int(slots * factor), most) for factor in np.linspace(0.8, 1.3, self.internal)})
        within = [(memory, fits(memory)) for memory in tried if memory >= least]
        low = max((memory for memory, fit in within if fit), default=least)
        high = min((memory for memory, fit in within if not fit and memory > low), default=low)
        while high - low > 1:  # the greatest internal budget between those tried that fits, if peaks only grow
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return list(peaks)

    def plan(self, memory: int) -> Recompute:
        """The plan of the table with `memory` slots."""
        return normalise(self.problem, expand(self.problem, self.blocks, self.sequence(memory)))

    def sequence(self, memory: int) -> list[Operation]:
        """The operations of the table with `memory` slots. Raises `ValueError` if there are none."""
        table = self.table
        if not np.isfinite(table.times[0, -1, memory]):
            raise ValueError(f"the chain does not fit in {memory} slots; ask for more")
        operations: list[Operation] = []
        todo: list[tuple[int, int, int] | Operation] = [(0, len(self.blocks) - 1, memory)]
        while todo:
            entry = todo.pop()
            if isinstance(entry, Operation):
                operations.append(entry)
            else:
                todo.extend(reversed(_step(table, *entry)))
        return operations

    def _least_slots(self) -> int | None:
        finite = np.flatnonzero(np.isfinite(self.table.times[0, -1]))
        return int(finite[0]) if len(finite) else None


def _step(table: ChainTable, first: int, last: int, memory: int) -> list[tuple[int, int, int] | Operation]:
    """One level of the recursion: the operations and the cells that give the value of a cell."""
    numbers, times = table.numbers, table.times
    value = times[first, last, memory]
    for option in np.flatnonzero(numbers.keep[first, last] <= memory):
        left = memory - int(numbers.saved[first, option])
        if first < last:
            total = numbers.own_ms[first, option] + times[first + 1, last, left]
        else:
            total = numbers.alone_ms[first, option]
        if total <= value * (1 + 1e-12):
            inner: list[tuple[int, int, int] | Operation] = [(first + 1, last, left)] if first < last else []
            return [Operation("Fe", first, int(option)), *inner, Operation("B", first, int(option))]
    best, place = np.inf, first + 1
    for after, least in enumerate(least_to_pass(numbers, first, last), first + 1):
        left = memory - int(numbers.input[after])
        if left < 0 or memory < least:
            continue
        total = times[after, last, left] + times[first, after - 1, memory]
        total += float(numbers.forward_ms[first:after].sum())
        if total < best:
            best, place = total, after
    passes = [Operation("Fck" if block == first else "Fng", block) for block in range(first, place)]
    return [*passes, (place, last, memory - int(numbers.input[place])), (first, place - 1, memory)]
