"""What to save of a forward, for the least sum of time to compute again and of bytes at a price: a least cut.

The problem of choosing projects: that a value is computed again costs time, that it is saved costs bytes, and what is
computed again needs its inputs (J.-C. Picard, "Maximal closure of a graph and applications to combinatorial problems",
Management Science 22, 1976). Over all prices these are the cheapest choices for so many bytes in all, on their convex
hull. Where the peak is, and what repeated values take there, no sum of bytes says: `choose` tries it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch.fx import Node

from rockmate.division.joint import JointGraph, bytes_of, is_tensor_valued, is_tuple, is_view, with_inputs

_NEVER = 10**9  # a capacity above all sums of others, which fit whole numbers of 32 bits
_ALL = 5 * 10**8  # all others together
_OF_INPUTS = 0.5  # of a price: what is read again from an input, the forward can be repeated from, too


@dataclass(frozen=True, slots=True)
class Saved:
    """What a forward hands to the backward, and what that computes again."""

    saved: frozenset[Node]
    repeated: frozenset[Node]


class SavingProblem:
    """The forward of one joint graph, and what its nodes cost to be computed again."""

    def __init__(self, graph: JointGraph, time_ms: Mapping[Node, float], charged: Collection[Node] = ()) -> None:
        """What the caller holds anyway costs nothing to be saved, but for what is `charged`."""
        self._graph = graph
        self._charged = frozenset(charged)
        wanted = with_inputs(graph.needed)
        self.nodes = [node for node in graph.nodes if node in wanted]  # all that may be saved or repeated
        self._time_ms = time_ms

    def may_save(self, node: Node) -> bool:
        """Whether it is a value of its own: a view is had again from what it looks at."""
        return node in self._graph.given or not (is_view(node) or is_tuple(node))

    def cheapest(self, ms_per_byte: float, kept: Collection[Node] = ()) -> Saved:
        """The least sum of times and of bytes at that price, where those `kept` are saved if they are needed."""
        if not self.nodes:
            return Saved(frozenset(), frozenset())
        number = {node: place for place, node in enumerate(self.nodes)}
        count = len(self.nodes)
        source, sink = 2 * count, 2 * count + 1
        repeat = np.array([self._repeat_ms(node, kept) for node in self.nodes])
        save = np.array([self._save_ms(node, kept, ms_per_byte) for node in self.nodes])
        costs = np.concatenate([repeat, save])
        scale = _ALL / max(float(costs[np.isfinite(costs)].sum()), 1e-30)
        capacity = np.where(np.isfinite(costs), np.round(np.where(np.isfinite(costs), costs, 0) * scale), _NEVER)
        tails = [source] * count + [2 * place for place in range(count)]
        heads = [2 * place for place in range(count)] + [2 * place + 1 for place in range(count)]
        capacities = capacity.tolist()
        for node in self.nodes:
            for dep in node.all_input_nodes:
                tails.append(2 * number[dep] + 1)
                heads.append(2 * number[node])
                capacities.append(_NEVER)
        for node in self._graph.needed:
            tails.append(2 * number[node] + 1)
            heads.append(sink)
            capacities.append(_NEVER)
        edges = csr_matrix((np.array(capacities, dtype=np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
        flow = maximum_flow(edges, source, sink).flow
        left = edges - flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
        saved = {node for node, at in number.items() if 2 * at in reached and 2 * at + 1 not in reached}
        repeated = {node for node, at in number.items() if 2 * at not in reached}
        return Saved(frozenset(saved - self._graph.given), frozenset(repeated))

    def _repeat_ms(self, node: Node, kept: Collection[Node]) -> float:
        if node in self._graph.given:
            return float("inf")  # it is there: whoever needs it has it as it is
        if node in kept or not self._graph.may_repeat(node):
            return float("inf")
        return self._time_ms[node]

    def _save_ms(self, node: Node, kept: Collection[Node], ms_per_byte: float) -> float:
        if node in self._charged:
            return _OF_INPUTS * ms_per_byte * bytes_of(node)
        if node in self._graph.given or node in self._graph.outputs or node in kept or not is_tensor_valued(node):
            return 0.0 if self.may_save(node) else float("inf")
        return ms_per_byte * bytes_of(node) if self.may_save(node) else float("inf")
