"""Equal blocks are measured once: canonical forms, in which names no longer matter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from rkgb.ir.bgraph import Leaf, LeafKind
from rkgb.ir.blocks import Block
from rkgb.ir.call import Ref
from rkgb.ir.compiled import CompiledCall
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.opaque import OpaqueCall
from rkgb.ir.values import ValueInfo
from rkgb.state.generators import OwnGenerator

# Facts of an operation that decide nothing, or that are written down in their own way.
_WRITTEN_APART = frozenset({"name", "call", "outputs", "source", "written", "plain_inputs", "inputs"})


@dataclass(frozen=True, slots=True)
class CanonicalForm:
    """A block with its values renamed by first use: equal digests mean equal blocks."""

    digest: str
    names: tuple[str, ...]  # the block's own names, in canonical order


def canonical_form(graph: DGraph, block: Block) -> CanonicalForm:
    """Write down everything that decides what `block` computes and costs, without its names.

    Constants count with all their elements. Takes time that grows with the block and its constants.
    """
    return _form(_Writer(graph), block)


def form_of_any_size(graph: DGraph, block: Block) -> str:
    """Equal for blocks that differ in sizes, strides and other whole numbers alone: as `canonical_form` without them.

    0 and 1 count: sizes of them are broadcast, and many an argument of them is no size.
    """
    return _form(_WriterOfAnySize(graph), block).digest


def is_some_size(number: object) -> bool:
    """Whether it is a number that `form_of_any_size` leaves out."""
    return type(number) is int and number > 1


def _form(writer: _Writer, block: Block) -> CanonicalForm:
    digest = hashlib.sha256()
    for op in block.ops:
        digest.update(f"{writer.operation(op)}\n".encode())
    for names in (block.outputs, block.shared_inputs, block.dead_outputs):
        digest.update(f"{writer.numbers_of(names)};".encode())
    return CanonicalForm(digest.hexdigest(), tuple(writer.numbers))


def equivalent_classes(graph: DGraph, blocks: Sequence[Block]) -> list[list[int]]:
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

    def number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def numbers_of(self, names: Sequence[str]) -> list[int]:
        return [self.number(name) for name in names]

    def operation(self, op: DNode) -> str:
        """What is called on what and makes what, and under which modes: grad mode, autocast and the like."""
        arguments = self.write((op.call.args, op.call.kwargs))
        outputs = self.write(op.outputs)
        name = self.number(op.name)  # an operation of several outputs has a name beside theirs
        modes = [(fact.name, getattr(op, fact.name)) for fact in fields(op) if fact.name not in _WRITTEN_APART]
        function = op.call.function
        # Two submodules called whole are alike where all that was seen of their calls is.
        text = f"opaque {function.traits.fingerprint}" if isinstance(function, OpaqueCall) else repr(function)
        text = f"compiled {function.fingerprint}" if isinstance(function, CompiledCall) else text
        written, plain = self.numbers_of(op.written), self.numbers_of(op.plain_inputs)
        return f"{name} {text} {arguments} -> {outputs} writes {written} without gradient {plain} {modes}"

    def write(self, tree: Any) -> str:
        if isinstance(tree, Ref):
            return self._describe(tree.name)
        if isinstance(tree, (tuple, list)):
            return f"{type(tree).__name__}[{','.join(self.write(item) for item in tree)}]"
        if isinstance(tree, dict):
            return "{" + ",".join(f"{key!r}={self.write(tree[key])}" for key in sorted(tree, key=repr)) + "}"
        if isinstance(tree, torch.Tensor):
            return f"tensor {tree.dtype} {tuple(tree.shape)} {_digest(tree)}"  # its repr leaves out elements
        if isinstance(tree, OwnGenerator):
            return f"generator on {tree.generator.device}"  # which one it is decides no cost
        return repr(tree)

    def _describe(self, name: str) -> str:
        number = self.number(name)
        if name in self._described:
            return str(number)
        self._described.add(name)
        return f"{number}:{self._facts(self._graph.values[name], self._graph.leaves.get(name))}"

    def _facts(self, info: ValueInfo, leaf: Leaf | None) -> str:
        kind = "value" if leaf is None else leaf.kind.value
        # Which values share a storage decides bytes; so do constants' values, as numbers do.
        owner = self.number(info.owner)
        held = ""
        if leaf is not None and leaf.kind is LeafKind.CONSTANT and leaf.constant is not None:
            held = _digest(leaf.constant)
        return (
            f"{kind}:{info.dtype}:{info.shape}:{info.stride}:{info.offset}:{info.device}:"
            f"{info.requires_grad}:in {owner}:{info.storage_bytes}:{held}"
        )


class _WriterOfAnySize(_Writer):
    def write(self, tree: Any) -> str:
        return "size" if is_some_size(tree) else super().write(tree)

    def _facts(self, info: ValueInfo, leaf: Leaf | None) -> str:
        lies = [self.write(tuple(numbers)) for numbers in (info.shape, info.stride)]
        return f"{leaf is None}:{info.dtype}:{lies}:{info.device}:{info.requires_grad}:in {self.number(info.owner)}"


def _digest(tensor: torch.Tensor) -> str:
    """Of all elements of `tensor`, wherever they are; without data, nothing more than its shape is known."""
    if tensor.is_meta:
        return ""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
