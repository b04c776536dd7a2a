"""What a user is told whose budget no plan fits."""

from __future__ import annotations

from rk_solvers import Solution
from rockmate.errors import BudgetTooSmall
from rockmate.measured import Measured
from rockmate.memory_split import MemorySplit
from rockmate.simulator import simulate
from rockmate.units import format_bytes

_SPARE = 1.02  # on the smallest budget named: measured anew, times differ, and with them the plan that is found


def too_small(
    measured: Measured, solution: Solution, budget_bytes: int, lowest_bytes: int, split: MemorySplit | None
) -> BudgetTooSmall:
    """`lowest_bytes` was measured: a step of the plan of lowest peak really takes that much."""
    op = solution.binding_op or simulate(measured.problem, solution.schedule).peak_op
    smallest = max(round(lowest_bytes * _SPARE), budget_bytes + 1)
    divided = ""
    if split is not None:
        divided = f": {split}, and at least {format_bytes(smallest)} are needed"
        budget_bytes, smallest = split.total_bytes, smallest + split.residents.total_bytes
    return BudgetTooSmall(
        f"budget {format_bytes(budget_bytes)} < {format_bytes(smallest)}, the smallest for which a schedule was found "
        f"(bound at {op}{_where(measured, op)}){divided}. Raise the budget to at least {smallest} bytes, reduce the "
        "batch, or split that operation.",
        smallest,
        op,
    )


def _where(measured: Measured, binding_op: str) -> str:
    """The user's own words for an operation: submodule and source line."""
    name = binding_op.split()[-1].split(".backward")[0]
    for op in measured.graphs.D_graph:
        if op.name == name:
            return f", {op.source}"
    return ""
