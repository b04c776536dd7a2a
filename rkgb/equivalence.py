"""Equal blocks are measured once: canonical forms, in which names no longer matter."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.bgraph import LeafKind
from rkgb.call import Ref
from rkgb.cut import Block
from rkgb.dgraph import DGraph


@dataclass(frozen=True, slots=True)
class CanonicalForm:
    """A block with its values renamed by first use: equal digests mean equal blocks."""

    digest: str
    names: tuple[str, ...]  # the block's own names, in canonical order


def canonical_form(graph: DGraph, block: Block) -> CanonicalForm:
    """Write down everything that decides what `block` computes and costs, without its names."""
    writer = _Writer(graph)
    lines = []
    for op in block.ops:
        arguments = writer.write((op.call.args, op.call.kwargs))
        outputs = writer.write(op.outputs)
        writer.number(op.name)  # an operation of several outputs has a name beside theirs
        lines.append(f"{op.call.function} {arguments} -> {outputs} {op.grad_enabled} {op.is_random}")
    lines.append("outputs " + " ".join(writer.number(name) for name in block.outputs))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return CanonicalForm(digest, tuple(writer.numbers))


def equivalent_classes(graph: DGraph, blocks: list[Block]) -> list[list[int]]:
    """Indices of equivalent blocks, grouped, in order of first appearance."""
    classes: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        classes.setdefault(canonical_form(graph, block).digest, []).append(index)
    return list(classes.values())


class _Writer:
    def __init__(self, graph: DGraph) -> None:
        self._graph = graph
        self.numbers: dict[str, int] = {}
        self._described: set[str] = set()

    def number(self, name: str) -> str:
        return str(self.numbers.setdefault(name, len(self.numbers)))

    def write(self, tree: Any) -> str:
        if isinstance(tree, Ref):
            return self._describe(tree.name)
        if isinstance(tree, (tuple, list)):
            return "[" + ",".join(self.write(item) for item in tree) + "]"
        if isinstance(tree, dict):
            return "{" + ",".join(f"{key}={self.write(value)}" for key, value in sorted(tree.items())) + "}"
        return repr(tree)

    def _describe(self, name: str) -> str:
        number = self.number(name)
        if name in self._described:
            return number
        self._described.add(name)
        info = self._graph.values[name]
        leaf = self._graph.leaves.get(name)
        kind = "value" if leaf is None else leaf.kind.value
        # Which values share a storage decides bytes; so do small constants' values, as numbers do.
        owner = self.number(info.owner)
        held = ""
        if leaf is not None and leaf.kind is LeafKind.CONSTANT and isinstance(leaf.constant, torch.Tensor):
            held = repr(leaf.constant.flatten()[:16].tolist()) if leaf.constant.device.type == "cpu" else ""
        return (
            f"{number}:{kind}:{info.dtype}:{info.shape}:{info.stride}:{info.offset}:{info.device}:"
            f"{info.requires_grad}:in {owner}:{info.storage_bytes}:{held}"
        )
