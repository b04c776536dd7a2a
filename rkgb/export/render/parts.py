"""Cuts a large graph into parts that fit a page: its distinct blocks, or runs of its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rkgb.export.render.structure import Element, Structure
from rkgb.ir.blocks import Block

MOST_COMPUTATIONS = 45  # on a page that can be read without searching


@dataclass(frozen=True, slots=True)
class Part:
    """Computations that belong together: a block, or a run of nodes."""

    word: str  # "block" or "part"
    index: int
    names: tuple[str, ...]  # of its computations, in the structure's order
    twins: tuple[int, ...]  # indices of all parts that are equivalent to it, its own included
    class_number: int  # equal for equivalent parts

    @property
    def label(self) -> str:
        """``block 3``."""
        return f"{self.word} {self.index}"

    @property
    def is_representative(self) -> bool:
        """Whether it is the first of its class: the one to draw."""
        return self.index == self.twins[0]


def parts_of(structure: Structure, blocks: Sequence[Block] = (), classes: Sequence[Sequence[int]] = ()) -> list[Part]:
    """Parts of a graph: its `blocks` where they are known, otherwise runs of `MOST_COMPUTATIONS` nodes.

    `classes` are indices of equivalent blocks. Every computation is in some part; a view of a parameter is in every
    block that uses it.
    """
    if not blocks:
        names = [element.name for element in structure.computations]
        runs = chunks(names, MOST_COMPUTATIONS)
        return [Part("part", index, tuple(run), (index,), index) for index, run in enumerate(runs)]
    twins = {index: tuple(members) for members in classes for index in members}
    numbers = {index: number for number, members in enumerate(classes) for index in members}
    return [
        Part("block", index, tuple(names), twins.get(index, (index,)), numbers.get(index, index))
        for index, names in enumerate(_names_by_block(structure, blocks))
    ]


def _names_by_block(structure: Structure, blocks: Sequence[Block]) -> list[list[str]]:
    blocks_of_op: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        for op in block.ops:
            blocks_of_op.setdefault(op.name, []).append(index)
    names: list[list[str]] = [[] for _ in blocks]
    previous = 0
    for element in structure.computations:
        found = dict.fromkeys(index for op in element.ops for index in blocks_of_op.get(op, ()))
        # What no block needs, such as a counter's update or dead code, stays with what ran before it.
        for index in found or [previous]:
            names[index].append(element.name)
            previous = index
    return names


def chunks(names: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """`names` in as few runs of at most `most` as there can be, about equally long."""
    count = max(1, -(-len(names) // most))
    ends = [len(names) * part // count for part in range(count + 1)]
    for start, end in itertools.pairwise(ends):
        yield names[start:end]


def modules_of(elements: Sequence[Element]) -> str:
    """Where in the module these elements come from: what their paths share, or the first and the last path."""
    paths = list(dict.fromkeys(element.source.module_path for element in elements if element.source.module_path))
    if not paths:
        return ""
    shared = []
    for names in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    if shared:
        return ".".join(shared)
    return " … ".join(dict.fromkeys((paths[0], paths[-1])))
