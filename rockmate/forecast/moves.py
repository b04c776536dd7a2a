"""Plans that move data to a second memory, over the link that a machine has by its data sheet."""

from __future__ import annotations

from rk_solvers import Chain, Link, Problem, SecondMemory, Solution
from rk_solvers.liveness import least_bytes
from rkgb.shapes.machine import Machine
from rockmate.errors import ArgumentError
from rockmate.offload.option import Offload
from rockmate.planning.graph_solver import moving_solver


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


def smallest_with_moves(problem: Problem, chain: Chain | None, memory: SecondMemory, search_s: float) -> Solution:
    """The plan for what one operation holds at once, or that of least peak which was seen in looking for it."""
    return moving_solver(chain, memory, search_s).solve(problem, least_bytes(problem))
