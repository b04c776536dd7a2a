"""Bytes that a divided joint graph takes, forward and backward, as the compiler will allocate them, nearly.

A loop that is joined with the one loop that reads it fills no memory. What loops compute for a concatenation they write
into its memory, which is there as long as any of it is read. Convolutions run in channels_last: what they are
given that lies otherwise is copied as the forward begins, until its backward has read it. What else the compiler does,
such as taking the memory of an input for an output or another order, mostly takes less.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from rockmate.division.joint import (
    JointGraph,
    bytes_of,
    is_concatenation,
    is_fused,
    is_tuple,
    is_view,
    joins_inputs,
    tensors_of,
)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Most bytes above what the caller holds before the step."""

    forward_bytes: int
    backward_bytes: int
    saved_bytes: int  # handed from the one to the other

    @property
    def step_bytes(self) -> int:
        """Of the whole step, the loss left out that is computed outside."""
        return max(self.forward_bytes, self.backward_bytes)


class Liveness:
    """Of one joint graph, for any choice of what is saved."""

    def __init__(self, graph: JointGraph) -> None:
        self._graph = graph
        self._holder = {node: graph.holder(node) for node in graph.nodes}
        self._bytes = {
            node: 0 if node in graph.given or is_tuple(node) or is_view(node) else bytes_of(node)
            for node in graph.nodes
        }
        self._is_fused = {node: is_fused(node) for node in graph.nodes}
        self._joins_inputs = {node: joins_inputs(node) for node in graph.nodes}
        converted = [dep for node in graph.nodes if _is_convolution(node) for dep in node.all_input_nodes]
        self._converted = {dep for dep in converted if dep in graph.given and _is_converted(dep)}
        self._bytes.update({node: bytes_of(node) for node in self._converted})
        self._scratch_bytes = {node: self._scratch_bytes_of(node) for node in graph.nodes if _is_convolution(node)}
        self._forward = [node for node in graph.nodes if node in graph.forward and node not in graph.given]

    def peaks(self, saved: frozenset[Node]) -> Peaks:
        """Where these are saved, and all else that the backward needs is computed again."""
        graph = self._graph
        kept = {self._holder[node] for node in saved} - graph.given
        returned = {self._holder[node] for node in graph.outputs} - graph.given
        forward_bytes = self._pass(self._forward, self._converted, kept | returned | self._converted)
        held = dict.fromkeys([*kept, *returned, *self._converted, *graph.tangents])
        gradients = {self._holder[node] for node in graph.gradients}
        backward_bytes = self._pass(graph.backward_order(saved), held, returned | gradients)
        return Peaks(forward_bytes, backward_bytes, sum(self._bytes[node] for node in kept))

    def _written_into(self, order: Sequence[Node], place: dict[Node, int], kept: set[Node]) -> dict[Node, Node]:
        """By what is computed in `order`: the concatenation whose memory it is written into, if there is one.

        That is so of what loops compute and loops alone read. All else is copied.
        """
        found: dict[Node, Node] = {}
        for node in order:
            for dep in node.all_input_nodes if is_concatenation(node) else ():
                reading = [reader for reader in self._graph.readers[dep] if reader in place]
                is_loop = dep in place and self._is_fused[dep] and not is_view(dep)
                if is_loop and dep not in kept and all(self._joins_inputs[reader] for reader in reading):
                    found.setdefault(dep, node)
        return found

    def _pass(self, order: Sequence[Node], held: Iterable[Node], kept: set[Node]) -> int:
        """Most bytes while `order` runs, where `held` is there before, and `kept` afterwards."""
        order = _with_parts(order)
        place = {node: number for number, node in enumerate(order)}
        into = self._written_into(order, place, kept)
        runs_at: dict[Node, int] = {}
        last: dict[Node, int] = {}
        joined: set[Node] = set()
        for node in reversed(order):
            reading = [reader for reader in self._graph.readers[node] if reader in place]
            runs_at[node] = place[node]
            if (
                self._is_fused[node]
                and not is_view(node)
                and self._holder[node] not in kept
                and len(reading) == 1
                and self._joins_inputs[reading[0]]
            ):
                joined.add(node)
                runs_at[node] = runs_at[reading[0]]
            for dep in node.all_input_nodes:
                holder = into.get(self._holder[dep], self._holder[dep])
                last[holder] = max(last.get(holder, -1), runs_at[node])
        freed: dict[int, list[Node]] = {}
        for holder, at in last.items():
            if holder not in kept and holder not in joined:
                freed.setdefault(at, []).append(holder)
        alive = {holder for holder in held if holder in kept or holder in last}
        level = highest = sum(self._bytes[holder] for holder in alive)
        for number, node in enumerate(order):
            holder = into.get(node, node)
            if node not in joined and self._bytes[holder] and holder not in alive:
                alive.add(holder)
                level += self._bytes[holder]
            highest = max(highest, level + self._scratch_bytes.get(node, 0))
            for holder in freed.get(number, ()):
                if holder in alive:
                    alive.discard(holder)
                    level -= self._bytes[holder]
            if node in alive and node not in kept and node not in last:
                alive.discard(node)  # nobody reads it
                level -= self._bytes[node]
        return highest

    def _scratch_bytes_of(self, node: Node) -> int:
        """What libraries convert of weights, once more, in a convolution; its backward has gradients twice, too."""
        is_backward = "backward" in str(node.target)
        weight = node.args[2 if is_backward else 1]
        assert isinstance(weight, Node)
        return (3 if is_backward else 1) * bytes_of(weight) if weight in self._graph.given else 0


def _is_convolution(node: Node) -> bool:
    return "convolution" in str(node.target)


def _is_converted(node: Node) -> bool:
    """Whether the compiler makes a copy in channels_last of what a convolution is given, and keeps it for the step."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return any(
        one.dim() in formats and not one.is_contiguous(memory_format=formats[one.dim()]) for one in tensors_of(node)
    )


def _with_parts(order: Sequence[Node]) -> list[Node]:
    """What takes one of several values that an operation gives stands behind it: all are there at once."""
    parts: dict[Node, list[Node]] = {}
    for node in order:
        if node.target is operator.getitem:
            parts.setdefault(node.all_input_nodes[0], []).append(node)
    found: list[Node] = []

    def add(node: Node) -> None:
        found.append(node)
        for part in parts.get(node, ()):
            add(part)

    own = set(order)
    for node in order:
        if node.target is not operator.getitem or node.all_input_nodes[0] not in own:
            add(node)
    return found
