"""Which values of a joint graph to save, for the least time to compute again within a budget of bytes.

Least cuts at many prices of a byte, with none, all, or every so many of the chain's cuts saved whatever the price, are
tried for their peak; then mixtures of the best that fits with faster ones that do not, along the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from rockmate.division.cut import SavingProblem
from rockmate.division.joint import JointGraph, bytes_of, draws, is_tuple, is_view
from rockmate.division.liveness import Liveness, Peaks
from rockmate.division.rates import main_device_of, rates_of

_PRICES = tuple(10.0 ** (step / 3) for step in range(-9, 10))  # of all bytes, in times of all operations
_STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of the chain's cuts that are saved
_NARROW = 0.1  # what else is alive at a cut of the chain, in parts of it


@dataclass(frozen=True, slots=True)
class Choice:
    """What is saved, what is computed again, and what that takes."""

    saved: frozenset[Node]
    repeated: frozenset[Node]
    peaks: Peaks
    repeated_ms: float


class Chooser:
    """Choices for one joint graph."""

    def __init__(self, graph: JointGraph, batch: frozenset[Node]) -> None:
        self._graph = graph
        rates = rates_of(main_device_of(graph.nodes))
        self._time_ms = {node: rates.time_ms(node) for node in graph.nodes}
        self._problem = SavingProblem(graph, self._time_ms)
        self._liveness = Liveness(graph)
        self._cuts = chain_cuts(graph, self._problem.nodes, batch)
        self._choices: dict[frozenset[Node], Choice | None] = {}

    def within(self, budget_bytes: int) -> tuple[Choice | None, int]:
        """The fastest choice found whose peak is within the budget, if there is one, and the least peak found."""
        families = [self._family(kept) for kept in self._kept_cuts()]
        tried = [choice for family in families for choice in family]
        least_bytes = min(choice.peaks.step_bytes for choice in tried)
        fitting = [choice for choice in tried if choice.peaks.step_bytes <= budget_bytes]
        if not fitting:
            return None, least_bytes
        best = min(fitting, key=_by_time)
        for family in families:
            within = [choice for choice in family if choice.peaks.step_bytes <= budget_bytes]
            faster = [c for c in family if c.peaks.step_bytes > budget_bytes and c.repeated_ms < best.repeated_ms]
            if not within:
                continue
            low = min(within, key=_by_time)
            for high in sorted(faster, key=_by_time, reverse=True)[:2]:
                for first, then in ((low, high), (high, low)):
                    best = min(best, self._mixed(first, then, budget_bytes) or best, key=_by_time)
        return best, least_bytes

    def _kept_cuts(self) -> Iterator[tuple[Node, ...]]:
        yield ()
        for stride in _STRIDES:
            if stride == 1 or stride < len(self._cuts):
                yield tuple(self._cuts[stride - 1 :: stride])

    def _family(self, kept: Sequence[Node]) -> list[Choice]:
        """Choices at all prices with these cuts saved."""
        nodes = [node for node in self._problem.nodes if self._problem.may_save(node)]
        all_ms = sum(self._time_ms[node] for node in self._problem.nodes) or 1.0
        all_bytes = sum(bytes_of(node) for node in nodes) or 1
        found = []
        for price in _PRICES:
            choice = self._choice(self._problem.cheapest(price * all_ms / all_bytes, frozenset(kept)).saved)
            if choice is not None:
                found.append(choice)
        return found

    def _mixed(self, first: Choice, then: Choice, budget_bytes: int) -> Choice | None:
        """The fastest that fits of mixtures: as `first` up to a cut of the chain, as `then` after it."""
        best: Choice | None = None
        low, high = 0, len(self._cuts) - 1
        more_of_first_is_faster = first.repeated_ms < then.repeated_ms
        while low <= high:
            middle = (low + high) // 2
            border = self._graph.place[self._cuts[middle]]
            saved = {node for node in first.saved if self._graph.place[node] <= border}
            saved |= {node for node in then.saved if self._graph.place[node] > border} | {self._cuts[middle]}
            choice = self._choice(frozenset(saved))
            fits = choice is not None and choice.peaks.step_bytes <= budget_bytes
            if choice is not None and fits and (best is None or choice.repeated_ms < best.repeated_ms):
                best = choice
            if fits is more_of_first_is_faster:
                low = middle + 1
            else:
                high = middle - 1
        return best

    def _choice(self, saved: frozenset[Node]) -> Choice | None:
        """What saving these takes; None where something would be computed again that must not be."""
        if saved not in self._choices:
            repeated = self._repeated(saved)
            self._choices[saved] = None if repeated is None else self._choice_of(saved, repeated)
        return self._choices[saved]

    def _choice_of(self, saved: frozenset[Node], repeated: frozenset[Node]) -> Choice:
        repeated_ms = math.fsum(self._time_ms[node] for node in repeated)
        return Choice(saved, repeated, self._liveness.peaks(saved), repeated_ms)

    def _repeated(self, saved: frozenset[Node]) -> frozenset[Node] | None:
        found: set[Node] = set()
        waiting = list(self._graph.needed)
        while waiting:
            node = waiting.pop()
            if node in saved or node in self._graph.given or node in found:
                continue
            if not self._graph.may_repeat(node):
                return None
            found.add(node)
            waiting += node.all_input_nodes
        return frozenset(found)


def _by_time(choice: Choice) -> tuple[float, int]:
    return choice.repeated_ms, choice.peaks.step_bytes


def chain_cuts(graph: JointGraph, wanted: Sequence[Node], batch: frozenset[Node]) -> list[Node]:
    """Nodes of the forward after which hardly anything else of the batch is alive for the rest of the forward."""
    moving: set[Node] = set()
    order = [node for node in graph.nodes if node in graph.forward]
    place = {node: number for number, node in enumerate(order)}
    last: dict[Node, int] = {}
    for node in order:
        if node in batch or draws(node) or not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
        for dep in node.all_input_nodes:
            holder = graph.holder(dep)
            last[holder] = max(last.get(holder, -1), place[node])
    candidates = set(wanted)
    alive: dict[Node, int] = {}
    found = []
    for number, node in enumerate(order):
        if node in moving and node not in graph.given and not is_view(node) and not is_tuple(node):
            alive[node] = bytes_of(node)
        for holder in [holder for holder in alive if last.get(holder, -1) <= number]:
            del alive[holder]
        own = alive.get(node, 0)
        if own and node in candidates and sum(alive.values()) - own <= _NARROW * own:
            found.append(node)
    largest = max((bytes_of(node) for node in found), default=0)
    return [node for node in found if bytes_of(node) >= _NARROW * largest]
