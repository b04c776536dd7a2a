"""The operations of the chain's dynamic program, and their expansion into a plan for the whole problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rk_solvers.chain.blocks import Block
from rk_solvers.problem import Problem, Recompute


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on a block.

    `Fck`: forward, keeping the block's input; `Fng`: forward, keeping nothing; `Fe`: forward, keeping what an
    option saves; `B`: backward, after `Fe` of the same option.
    """

    kind: str
    block: int
    option: int = -1  # for Fe and B
    given: bool = False  # Fe only: what the block hands on is still stored, and spares a part of the forward

    def __str__(self) -> str:
        option = f".{self.option}" if self.option >= 0 else ""
        return f"{self.kind} {self.block}{option}{' (in part)' if self.given else ''}"


@dataclass(frozen=True, slots=True)
class Sequence:
    """What a table plans for a step. As text one line, such as `Fck 0; Fng 1; Fe 2.0; B 2.0; ...`."""

    operations: tuple[Operation, ...]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def __str__(self) -> str:
        return "; ".join(str(operation) for operation in self.operations)


def expand(problem: Problem, blocks: tuple[Block, ...], operations: Iterable[Operation]) -> Recompute:
    """The recomputations that the sequence asks for; not in normal form.

    The first forward of a block is the step's own; later ones run just before the next backward operation.
    """
    groups: list[set[int]] = [set() for _ in problem.backward]
    started: set[int] = set()
    pending: set[int] = set()
    for operation in operations:
        block = blocks[operation.block]
        if operation.kind != "B":
            if operation.block in started:
                spared = {block.forward.start + index for index in block.spared} if operation.given else set()
                pending.update(index for index in block.forward if problem.forward[index].recomputable)
                pending -= spared
            started.add(operation.block)
            continue
        if block.stages:
            groups[block.stages[0]] |= pending
            pending = set()
        inside = block.options[operation.option].recompute
        for stage, group in zip(block.stages, inside, strict=True):
            groups[stage].update(block.forward.start + index for index in group)
    return tuple(tuple(sorted(group)) for group in groups)
