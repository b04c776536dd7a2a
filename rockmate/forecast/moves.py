"""Plans that move data to a second memory, over the link that a machine has by its data sheet."""

from __future__ import annotations

from rk_solvers import Chain, Limits, Link, Problem, SecondMemory, Solution, Solver, solver_named
from rk_solvers.liveness import least_bytes
from rk_solvers.transfers.with_moves import WithMoves
from rkgb.shapes.machine import Machine
from rockmate.errors import ArgumentError
from rockmate.offload.option import Offload


def second_memory_of(machine: Machine, offload: Offload) -> SecondMemory:
    """With links as fast as copies of usual sizes are, each way, which cost the computation beside them nothing.

    Raises `OffloadError` where the machine has none like that, and `ArgumentError` where it is not known how fast.
    """
    offload.place_for(machine.name, is_host=not machine.is_accelerator)
    if not machine.link or not machine.has_speed:
        raise ArgumentError(
            f"what moves cost on {machine.name} depends on how fast it is: name a device, such as "
            'device="RTX 4090", or give link= in bytes a second, and flops= and bandwidth='
        )
    link = Link(1 / machine.link_ms(1), machine.start_ms)
    return SecondMemory(link, link, offload.limit_bytes)


def moving_solver(chain: Chain | None, memory: SecondMemory, search_s: float) -> Solver:
    """Looks for recomputations and for moves, `search_s` seconds for each."""

    def quick(seconds: float) -> Solver:
        return solver_named("auto", Limits().without_proofs(seconds), chain)

    return WithMoves(quick(search_s), quick, memory, chain, search_s)


def smallest_with_moves(problem: Problem, chain: Chain | None, memory: SecondMemory, search_s: float) -> Solution:
    """The plan for what one operation holds at once, or that of least peak which was seen in looking for it."""
    return moving_solver(chain, memory, search_s).solve(problem, least_bytes(problem))
