"""Which values may be read from anywhere, so that blocks beneath long jumps become smaller."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rkgb.ir.sgraph import SNode

# A skip value stays in memory while all that it jumps over runs. It must take off the sum of
# the squares of the blocks' sizes at least this part of the square of the largest size wanted.
_PRICE = 0.1
# Values that jump over less than this part of a block are its own inner matter, such as the
# residual branch of one layer of many.
_SHORTEST = 0.2
_TRIED_ONE_BY_ONE = 16  # more than these are tried in doubling numbers, so that time grows as n log n


@dataclass(eq=False, slots=True)
class Line:
    """Neighbouring nodes in order, and the places over which differentiable values jump."""

    nodes: list[SNode]
    jumps: dict[SNode, tuple[int, int]]  # by producer, from which of these places to which
    unbroken: frozenset[SNode] = frozenset()  # after these the line is not split

    @staticmethod
    def of(
        nodes: Sequence[SNode], on_chain: Collection[SNode], taken_over: Mapping[SNode, SNode] | None = None
    ) -> Line:
        """The line of `nodes`, of which those `on_chain` make differentiable values or depend on them.

        It is not split between a node and the one from which it has `taken_over` a storage.
        """
        place = {node: index for index, node in enumerate(nodes)}
        jumps: dict[SNode, tuple[int, int]] = {}
        for node, start in place.items():
            end = max((place[user] for user in node.users), default=start)
            if node in on_chain and end > start:
                jumps[node] = (start, end)
        ties = [(place[giver], place[taker]) for taker, giver in (taken_over or {}).items()]
        return Line(list(nodes), jumps, frozenset(node for start, end in ties for node in nodes[start:end]))

    def __len__(self) -> int:
        return len(self.nodes)

    def sizes(self, skips: Collection[SNode]) -> list[int]:
        """How many nodes the parts have when split wherever at most one value passes, `skips` not counted."""
        change = [0] * (len(self.nodes) + 1)
        for node, (start, end) in self.jumps.items():
            if node not in skips:
                change[start] += 1
                change[end] -= 1
        sizes: list[int] = []
        begun = passing = 0
        for place in range(len(self.nodes)):
            passing += change[place]
            may_end = passing <= 1 and self.nodes[place] not in self.unbroken
            if may_end or place + 1 == len(self.nodes):
                sizes.append(place + 1 - begun)
                begun = place + 1
        return sizes

    def split(self, skips: Collection[SNode]) -> list[Line]:
        """The parts; each has the jumps over it that are left."""
        parts: list[Line] = []
        starts: list[int] = []
        begun = 0
        for size in self.sizes(skips):
            parts.append(Line(self.nodes[begun : begun + size], {}, self.unbroken))
            starts.append(begun)
            begun += size
        for node, (start, end) in self.jumps.items():
            if node in skips:
                continue
            # From part to part passes at most one value: these walks are short, taken together.
            index = bisect_right(starts, start) - 1
            while index < len(parts) and starts[index] < end:
                first, last = start - starts[index], end - starts[index]
                parts[index].jumps[node] = (max(first, 0), min(last, len(parts[index])))
                index += 1
        return parts


def choose_skip_values(line: Line, max_nodes: int) -> list[SNode]:
    """Producers of values that may be read from anywhere: those that make blocks of over `max_nodes` nodes smaller.

    In each such block the values that jump farthest are tried together, the farthest one alone, the
    two farthest, and so on: two values that jump side by side give room only together.
    """
    skips: dict[SNode, None] = {}
    large = [part for part in line.split(skips) if len(part) > max_nodes]
    while large:
        part = large.pop()
        found = _best_skips(part, skips, max_nodes)
        skips.update(dict.fromkeys(found))
        if found:
            large += [smaller for smaller in part.split(skips) if max_nodes < len(smaller) < len(part)]
    return [node for node in line.nodes if node in skips]


def _best_skips(part: Line, skips: Collection[SNode], max_nodes: int) -> list[SNode]:
    """Skip values that `part` is worth, on top of those there are."""
    price = _PRICE * max_nodes**2

    def cost(extra: Sequence[SNode]) -> float:
        return sum(size**2 for size in part.sizes({*skips, *extra})) + price * len(extra)

    candidates = _longest_jumps(part, skips)
    best, least = list[SNode](), cost([])
    for count in _counts(len(candidates)):
        reached = cost(candidates[:count])
        if reached < least:
            best, least = candidates[:count], reached
    for node in list(best) if len(best) <= _TRIED_ONE_BY_ONE else ():
        without = [other for other in best if other is not node]
        reached = cost(without)
        if reached < least:
            best, least = without, reached
    return best


def _counts(most: int) -> list[int]:
    """How many values to try together: 1, 2, 3, ..., then each time twice as many, up to `most`."""
    counts = list(range(1, min(most, _TRIED_ONE_BY_ONE) + 1))
    while counts and counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def _longest_jumps(part: Line, skips: Collection[SNode]) -> list[SNode]:
    """Values that jump over much of `part`, the farthest first."""
    shortest = max(2.0, _SHORTEST * len(part))
    lengths = {node: end - start for node, (start, end) in part.jumps.items() if node not in skips}
    return sorted((node for node in lengths if lengths[node] >= shortest), key=lambda node: -lengths[node])
