"""Recomputation and moves in one plan, by a dynamic program over a chain of blocks.

Reference: O. Beaumont, L. Eyraud-Dubois, A. Shilova, "Efficient combination of rematerialization and offloading for
training DNNs", NeurIPS 2021.

A plan goes along the chain once, from its start to the loss, and back. On the way each block either runs once, with one
of its options, or is one of several in a row that run again: of those the input is kept, and on the way back rotor's
table (`chain.rotor`) has the least time to solve them in the bytes that there are then. What a block saves, or the
input of what runs again, is kept or moved: it leaves during the forward and is back during the backward. Both ways are
planned at once, outermost blocks first, for the backward seen from its end is a forward: see `chain_labels`.

Class. Where each block is one operation whose backward needs the block's input and at most two data that are saved for
it alone, no bound on labels is reached, and sizes are whole slots, none of these plans is faster by prediction:
* schedules are persistent (see `chain.rotor`), and what a block saves for itself is computed again where its input is;
* data move between their last use in the forward and their first after it, from the first time that they are computed;
* what leaves has left by the end of the forward, and bytes for returns are taken from then on, in the order of need;
  none are taken from the first recomputation of blocks that run again together to the end of their backward;
* all of a data moves or none of it, and what blocks farther on than the next one read stays.
Of two partial plans that cover the same blocks, one that is behind in no clock, no byte and no queue can be followed by
all that can follow the other; and waiting before memory asks for it serves nothing, since a link runs on meanwhile.
`transfers.oracle` tries all of this class. Plans of the program are placed without these bounds on when data leave and
return, and can thus be faster than the class's.

Elsewhere the numbers of a block are on the safe side of what its operations hold, or a little off it (as in rotor), so
several budgets are tried. What counts is what `Base.costs` says of a plan, and nothing is proven of it. Plans that move
nothing, or move all and recompute nothing, are among those compared.

Complexity: for each of L places and each of the `labels` kept there, L steps for what runs again and one for each
option and each share of it that is moved, of some microseconds. Of more labels, those stay that would end earliest if
what is yet to come were recomputed, or moved where the links have time for it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from rk_solvers.chain.rotor import Rotor, RotorTable
from rk_solvers.links import SecondMemory
from rk_solvers.liveness import peak_and_time, recompute_of
from rk_solvers.problem import Chain, Problem, Recompute
from rk_solvers.transfers.chain_spine import Spine
from rk_solvers.transfers.moves import Base, Gap, Move
from rk_solvers.transfers.placing import placed

# Of the budget, as the numbers of blocks have it: those are on the safe side mostly.
_INTERNAL = (1.0, 1.05, 0.95)
_FOUND = 3  # plans of each of them that are compared


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """What to recompute, the gaps of what is away at the turn, and the moves in these."""

    base: Base
    gaps: tuple[Gap, ...]
    moves: tuple[Move, ...]
    time_ms: float


@dataclass(slots=True)
class ChainProgram:
    """The program along `chain`, for any budget. Makes a table of rotor when first asked.

    Raises `ValueError` on a chain of another problem.
    """

    problem: Problem
    chain: Chain
    memory: SecondMemory
    slots: int = 800  # of what the step takes with everything kept
    labels: int = 25  # at each place
    over_the_turn: bool = True  # whether the bases of its plans have these gaps alone; it uses no others
    _table: RotorTable | None = field(default=None, init=False)

    def prepare(self, deadline: float = math.inf) -> RotorTable:
        """Rotor's table, made when first asked for. Raises `TimeoutError` where it is not ready at `deadline`."""
        if self._table is None:
            most_bytes, _ = peak_and_time(self.problem, self.problem.no_recompute)
            rotor = Rotor(self.chain, self.slots, time_limit_s=deadline - time.monotonic())
            self._table = rotor.prepare(self.problem, most_bytes)
        return self._table

    def recompute(self, budget_bytes: int) -> Recompute:
        """What the table recomputes where nothing moves."""
        return recompute_of(self.problem, self.prepare().solve(budget_bytes).schedule)

    def plans(self, budget_bytes: int, deadline: float = math.inf) -> list[ChainPlan]:
        """Different plans within `budget_bytes`, the fastest first; of what was begun before `deadline`."""
        table = self.prepare(deadline)
        found: dict[tuple[Recompute, frozenset[int]], ChainPlan | None] = {}
        keep_all, alone = self.problem.no_recompute, self.recompute(budget_bytes)
        for key in (
            (keep_all, frozenset()),
            (keep_all, frozenset(range(len(self.problem.data)))),
            (alone, frozenset()),
        ):
            found[key] = self._plan(*key, budget_bytes)
        for once in (True, False):
            for share in _INTERNAL:
                room_bytes = int(share * (budget_bytes - table.fixed_bytes - self.memory.staging_bytes))
                if room_bytes <= 0 or time.monotonic() >= deadline:
                    continue
                spine = Spine(self.problem, table, self.memory, room_bytes, self.labels, once)
                for label in spine.ended(deadline)[-_FOUND:]:
                    key = spine.recompute(label), label.moved
                    if key not in found:
                        found[key] = self._plan(*key, budget_bytes)
        return sorted((plan for plan in found.values() if plan is not None), key=lambda plan: plan.time_ms)

    def _plan(self, recompute: Recompute, moved: frozenset[int], budget_bytes: int) -> ChainPlan | None:
        base = Base(self.problem, recompute, self.memory, over_the_turn=self.over_the_turn)
        turn = len(self.problem.forward)
        gaps = [gap for gap in base.gaps if gap.data in moved and gap.before < turn <= gap.after]
        moves = placed(base, gaps, budget_bytes)
        if moves is None:
            return None
        costs = base.costs(moves)
        if not self.memory.has_room_for(costs.stored_bytes):
            return None
        return ChainPlan(base, tuple(gaps), tuple(moves), costs.time_ms)
