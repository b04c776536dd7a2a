"""Large blocks to trees of sub-graphs, for solvers that cannot take them whole.

A block's nodes run in their order, so that its parts are ranges of them: between two parts passes
what the first has made and the second, or a later one, still reads. The fewer bytes pass, the
less the parts have to know of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rkgb.errors import GraphError
from rkgb.ir.blocks import Block
from rkgb.ir.sgraph import SGraph, SNode
from rkgb.passes.cut import BlockMaker

MAX_NODES = 40  # what solvers of single blocks still take in seconds


@dataclass(eq=False, slots=True)
class SubGraph:
    """A block, or a part of one: its children are the parts that it is made of, in order."""

    block: Block  # runnable alone, as every block
    children: list[SubGraph] = field(default_factory=list)  # empty: small enough to be solved whole

    @property
    def leaves(self) -> list[SubGraph]:
        """The parts without parts, in order."""
        return [leaf for child in self.children for leaf in child.leaves] if self.children else [self]

    @property
    def depth(self) -> int:
        """Levels below this one."""
        return 1 + max(child.depth for child in self.children) if self.children else 0

    def __iter__(self) -> Iterator[SubGraph]:
        """This part and all parts of it, parents first."""
        yield self
        for child in self.children:
            yield from child

    def verify(self) -> None:
        """Check that children are the block, in order, and that what they read was handed to them.

        Raises `GraphError` naming the node or value otherwise.
        """
        for part in self:
            if not part.children:
                continue
            name = part.block.nodes[0].name
            if [node for child in part.children for node in child.block.nodes] != part.block.nodes:
                raise GraphError(f"the parts of the sub-graph that begins with {name} are not its nodes, in order.")
            known = set(part.block.inputs)
            for child in part.children:
                for value in child.block.inputs:
                    if value not in known:
                        raise GraphError(f"a part reads {value}, which neither its parent nor a part before has.")
                known.update(child.block.outputs)
            for value in part.block.outputs:
                if value not in known:
                    raise GraphError(f"the sub-graph that begins with {name} has no part that hands on {value}.")


def partition(graph: SGraph, block: Block, max_nodes: int = MAX_NODES) -> SubGraph:
    """The tree of sub-graphs of `block`: leaves have at most `max_nodes` nodes, other parts as many children.

    Among all ways to split a level into ranges, the one over whose ends the fewest bytes pass is
    taken. Raises `ValueError` if `max_nodes` is less than 2.
    """
    if max_nodes < 2:
        raise ValueError(f"max_nodes is {max_nodes}; parts of less than 2 make no tree")
    passing = _passing_bytes(graph, block.nodes)
    make = BlockMaker(graph)
    ends = list(range(1, len(block.nodes) + 1))  # of the parts of this level
    level: list[SubGraph] = []
    while len(ends) > max_nodes:
        groups = _group([passing[end] for end in ends], max_nodes)
        parts: list[SubGraph] = []
        for first, stop in groups:
            nodes = block.nodes[ends[first - 1] if first else 0 : ends[stop - 1]]
            if stop - first == 1 and level:
                parts.append(level[first])
            else:
                parts.append(SubGraph(make.block(nodes), level[first:stop]))
        level, ends = parts, [ends[stop - 1] for _, stop in groups]
    result = SubGraph(block, level)
    result.verify()
    return result


def _passing_bytes(graph: SGraph, nodes: Sequence[SNode]) -> list[int]:
    """For each place between nodes, bytes that nodes before it fill and nodes from it on read."""
    values = graph.dgraph.values
    place = {node: index for index, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for node, start in place.items():
        last = max((place[user] for user in node.users if user in place), default=start)
        size_bytes = sum(values[owner].storage_bytes for owner in node.data)
        change[start + 1] += size_bytes
        change[last + 1] -= size_bytes
    passing, total = [], 0
    for size_bytes in change:
        total += size_bytes
        passing.append(total)
    return passing


def _group(costs: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Split units into ranges of at most `most`, such that the costs at their ends are least.

    ``costs[k]`` is what it costs to end a range after unit k. Of equal ways, one of fewest ranges.
    """
    best: list[tuple[int, int]] = [(0, 0)]  # for each number of units: cost, ranges
    start_of = [0]
    for stop in range(1, len(costs) + 1):
        candidates = range(max(0, stop - most), stop)
        # Of equal ones the latest, so that equal stretches are split alike wherever they stand.
        start = min(reversed(candidates), key=lambda start: best[start])
        best.append((best[start][0] + costs[stop - 1], best[start][1] + 1))
        start_of.append(start)
    groups: list[tuple[int, int]] = []
    stop = len(costs)
    while stop:
        groups.append((start_of[stop], stop))
        stop = start_of[stop]
    return groups[::-1]
