"""The best of several plans together: the exact program, over what any of them recomputes.

Plans found by chance differ in many places, and each is good in some. With a recomputation allowed only where one of
them has it, the program of `checkmate` is small enough to be solved for whole graphs. The idea is that of solution
merging, as in C. Aggarwal, J. Orlin, R. Tai, "Optimized crossover for the independent set problem", Operations Research
45(2), 1997.
"""

from __future__ import annotations

from collections.abc import Sequence

from rk_solvers.exact.checkmate import Program, build, require_faster
from rk_solvers.liveness import recompute_time_ms
from rk_solvers.problem import Problem, Recompute

MOST_BINARIES = 1500


def combination(
    problem: Problem, budget_bytes: int, plans: Sequence[Recompute], most_binaries: int = MOST_BINARIES
) -> Program | None:
    """The program over the first of `plans`, which are sorted by time, for a plan faster than the first.

    None where it has nothing to choose. Later plans are left out where the program had more than `most_binaries`.
    """
    allowed = [set(group) for group in plans[0]]
    for plan in plans[1:]:
        more = [mine.union(others) for mine, others in zip(allowed, plan, strict=True)]
        if sum(map(len, more)) <= most_binaries:
            allowed = more
    if recompute_time_ms(problem, plans[0]) <= 0 or all(
        set(group) == mine for group, mine in zip(plans[0], allowed, strict=True)
    ):
        return None
    program = build(problem, budget_bytes, allowed=allowed)
    require_faster(program, plans[0], gap=0.0)
    return program
