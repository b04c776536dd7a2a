"""A cut of the S graph: blocks in a row, and what they may read from farther back than the block before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rkgb.errors import GraphError
from rkgb.ir.dgraph import DNode
from rkgb.ir.sgraph import SGraph, SNode


@dataclass(eq=False, slots=True)
class Block:
    """A part of the S graph, runnable alone from `inputs`. In a cut, it is a contiguous range."""

    nodes: list[SNode]
    ops: list[DNode]  # in traced order: its nodes' and the leaf views that they use
    leaves: list[str]  # parameters, buffers, inputs, constants read, in order of first use
    inputs: list[str]  # values of earlier blocks read, in order of first use
    outputs: list[str]  # values that later blocks or the model's output read
    shared_inputs: list[str] = field(default_factory=list)  # of `inputs`: their gradients exist before its backward
    dead_outputs: list[str] = field(default_factory=list)  # of `outputs`: no gradient comes to them from outside


@dataclass(eq=False, slots=True)
class Chain:
    """Blocks in order, and what they may read from farther back than the block before them."""

    prologue: Block | None  # what no gradient reaches and several blocks read: masks, rotary tables
    blocks: list[Block]
    skip_values: list[SNode]  # differentiable values read from several blocks

    def __iter__(self) -> Iterator[Block]:
        """Every block, the prologue first: each node once, after what it needs."""
        return iter(([self.prologue] if self.prologue is not None else []) + self.blocks)

    def verify(self, graph: SGraph) -> None:
        """Check that the nodes of `graph` are in one block each, in an order in which they can run.

        Raises `GraphError` naming the node otherwise.
        """
        done: set[SNode] = set()
        for block in self:
            for node in block.nodes:
                if node in done:
                    raise GraphError(f"S node {node.name} is in two blocks. Put each node into one.")
                for dep in node.deps:
                    if dep not in done:
                        raise GraphError(f"S node {node.name} comes before {dep.name}, which it needs. Reorder blocks.")
                done.add(node)
        for node in graph:
            if node not in done:
                raise GraphError(f"S node {node.name} is in no block. Put each node into one.")
