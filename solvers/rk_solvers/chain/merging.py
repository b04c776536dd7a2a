"""A chain with neighbouring blocks taken together, so that what a dynamic program over it takes is bounded.

The table of `rotor` grows with the square of the number of blocks in bytes, and with the cube in time. Within
`TableLimits` of both, its slots become fewer first, then its blocks: several in a row are one, solved within like any
block of several operations. All have the same number of blocks, so that a model of repeated layers has few classes of
them: that number and the first border are chosen for few classes, and for few bytes across the borders that nobody
before them has kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from rk_solvers.liveness import last_forward_uses
from rk_solvers.problem import Chain, Problem

LEAST_SLOTS = 250  # of a table with fewer of them, plans are rounded too coarsely
TRIED = 12  # numbers of blocks taken together beyond the least one that does
SHARE_FREE = 0.25  # of the memory that is free
SHARE_MERGED = 0.2  # of the sums, for a chain that is merged anyway: fewer, larger blocks lose little


@dataclass(frozen=True, slots=True)
class TableLimits:
    """What a table may take."""

    table_bytes: int = 512 << 20
    sums: int = 2_000_000_000  # of two cells: five seconds with numba, ten without

    @staticmethod
    def here() -> TableLimits:
        """Those of this machine: no more than a share of what is free now."""
        usual = TableLimits()
        free_bytes = _free_bytes()
        return (
            usual
            if free_bytes is None
            else TableLimits(min(usual.table_bytes, int(SHARE_FREE * free_bytes)), usual.sums)
        )

    def slots(self, blocks: int, slots: int) -> int:
        """At most `slots` of them, of which a table of so many blocks may consist; 0 where it may not be at all.

        It is as if every block had a column in the second table.
        """
        cells = 2 * (blocks + 1) ** 2  # the loss is a block, too
        most = min(self.table_bytes // (8 * cells), self.sums * 6 // (2 * (blocks + 1) ** 3)) - 1
        return max(0, min(slots, most))

    def merged(self) -> TableLimits:
        """Those of a chain of which blocks are taken together."""
        return TableLimits(self.table_bytes, int(SHARE_MERGED * self.sums))


def fitted(problem: Problem, chain: Chain, slots: int, limits: TableLimits) -> tuple[Chain, int]:
    """The chain, with so many blocks taken together that its table is within `limits`, and the slots of that table.

    `slots`, and each block by itself, where that is. One block is always within them, of at least two slots.
    """
    count, enough = len(chain.blocks), min(slots, LEAST_SLOTS)
    if limits.slots(count, slots) < enough:
        limits, together = limits.merged(), 2
        while together < count and limits.slots(-(-count // together), slots) < enough:
            together += 1
        chain = joined(problem, chain, together)
    return chain, max(2, limits.slots(len(chain.blocks), slots))


def effort(chain: Chain, given: Chain, grid: int, rounds: int) -> tuple[int, int]:
    """`grid` and `rounds` of greedy (see `Rotor`) for the blocks of `chain`, which `fitted` has made of `given`.

    What is merged has many operations, of which a plan takes tenths of a second: fewer plans of them.
    """
    return (grid, rounds) if chain is given else (min(2, grid), min(2, rounds))


def joined(problem: Problem, chain: Chain, least: int) -> Chain:
    """The chain with at least `least` blocks taken together, but for those at its ends."""
    count = len(chain.blocks)
    if least >= count:
        return _with_borders(chain, [0, count])
    kinds, across = _kinds(problem, chain), _bytes_across(problem, chain)
    best: tuple[int, int, int, list[int]] | None = None
    for together in range(least, min(count - 1, least + TRIED) + 1):
        for offset in range(min(together, TRIED)):
            borders = sorted({0, count, *range(offset or together, count, together)})
            if len(borders) > -(-count // least) + 1:  # the remainders at both ends are a block too many
                borders = [0, *borders[2:]]
            classes = len({tuple(kinds[first:stop]) for first, stop in itertools.pairwise(borders)})
            cost = classes, sum(across[border] for border in borders[1:-1]), together, borders
            best = cost if best is None or cost < best else best
    assert best is not None
    return _with_borders(chain, best[-1])


def _with_borders(chain: Chain, borders: list[int]) -> Chain:
    """The chain of which each block has those between two borders."""
    pieces = list(itertools.pairwise(borders))
    blocks = tuple(range(chain.blocks[first].start, chain.blocks[stop - 1].stop) for first, stop in pieces)
    of = [piece for piece, (first, stop) in enumerate(pieces) for _ in range(first, stop)] + [len(pieces)]
    return Chain(blocks, tuple(of[block] for block in chain.backward_block))


def _kinds(problem: Problem, chain: Chain) -> list[int]:
    """A number for each block; blocks whose forwards take the same have the same."""
    numbers: dict[tuple[tuple[float, tuple[int, ...], int], ...], int] = {}
    found: list[int] = []
    for block in chain.blocks:
        ops = [problem.forward[index] for index in block]
        kind = tuple(
            (op.recompute_ms, tuple(problem.data[item].size_bytes for item in op.outputs), op.workspace_bytes)
            for op in ops
        )
        found.append(numbers.setdefault(kind, len(numbers)))
    return found


def _bytes_across(problem: Problem, chain: Chain) -> list[int]:
    """For each border before a block: bytes that the forward after it reads; those not kept before it count twice."""
    home = [number for number, block in enumerate(chain.blocks) for _ in block]
    last = [home[index] for index in last_forward_uses(problem)]
    own = [False] * len(problem.data)  # whether its block's own backward needs it
    for stage, backward in enumerate(problem.backward):
        for item in backward.needs:
            own[item] |= chain.backward_block[stage] == home[problem.data[item].producer]
    change = [0] * (len(chain.blocks) + 2)
    for number, data in enumerate(problem.data):
        if number not in problem.held:
            size = data.size_bytes if own[number] else 2 * data.size_bytes
            change[home[data.producer] + 1] += size
            change[last[number] + 1] -= size
    return list(itertools.accumulate(change))


def _free_bytes() -> int | None:
    """What the system says is available; None where it does not."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
