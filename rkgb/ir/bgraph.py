"""Basic graph: what a module ran on the sample, as a flat list of calls."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.errors import GraphError
from rkgb.ir.call import Call, ref_names
from rkgb.sizes import SizeQuestion
from rkgb.state.attributes import AttributeWrite
from rkgb.state.generators import OwnGenerator


class LeafKind(enum.Enum):
    """Where a value that no operation computes comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value given from outside the graph."""

    name: str
    kind: LeafKind
    path: str = ""  # of a parameter or buffer: its qualified name in the module
    index: int = -1  # of an input: its place among the sample's tensors
    constant: torch.Tensor | None = None  # of a constant: the tensor itself


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's model an operation was called."""

    module_path: str = ""
    location: str = ""  # "file.py:12"
    modules: tuple[str, ...] = ()  # paths of the submodules being called, outermost first, each once

    def __str__(self) -> str:
        return " ".join(part for part in (self.module_path or "(root)", self.location) if part)


@dataclass(eq=False, slots=True)
class BNode:
    """One call as it ran."""

    name: str  # unique; also the stem of its variables in generated code
    call: Call
    outputs: Any  # a Ref, or nested sequences of Refs, in the shape of the call's result
    grad_enabled: bool = True  # the grad mode under which the module ran it
    source: Source = field(default_factory=Source)

    @property
    def output_names(self) -> list[str]:
        """Names of the values that it defines."""
        return ref_names(self.outputs)


@dataclass(eq=False, slots=True)
class BGraph:
    """The trace: calls in the order in which they ran, and the values that enter and leave."""

    nodes: list[BNode]
    leaves: dict[str, Leaf]
    output: Any  # the module's output, with a Ref in place of each tensor
    warnings: list[str] = field(default_factory=list)  # torch's own, of Python values that it took for fixed
    tracer: str = ""  # the front end that made it
    varying: frozenset[str] = frozenset()  # values that had another shape on other data
    side_effects: list[str] = field(default_factory=list)  # what forward does that no run of the graph repeats
    generators: tuple[OwnGenerator, ...] = ()  # those of the user's own that it draws from
    attributes: tuple[AttributeWrite, ...] = ()  # what forward leaves in attributes: tensors of the graph, plain values
    # What Python asked of sizes, with the answers; None where the front end does not follow sizes.
    questions: tuple[SizeQuestion, ...] | None = None

    def __iter__(self) -> Iterator[BNode]:
        return iter(self.nodes)

    @property
    def output_names(self) -> list[str]:
        """Names of the tensors in the output, and of those left in attributes, each once."""
        return ref_names(kept_trees(self))

    def verify(self) -> None:
        """Check that names are unique and defined before use; raise `GraphError` otherwise."""
        verify_order(self.nodes, self.leaves, self.output_names)


def kept_trees(graph: Any) -> list[Any]:
    """Of B and D: what is alive when the forward is over. The output, and what is left in attributes."""
    return [graph.output, *(write.value for write in graph.attributes)]


def verify_order(nodes: list[Any], leaves: dict[str, Leaf], output_names: list[str]) -> None:
    """The rule of B and D: every value is defined once, before its uses."""
    defined = set(leaves)
    for node in nodes:
        for name in node.call.inputs:
            if name not in defined:
                raise GraphError(
                    f"%{node.name} reads %{name}, which nothing before it defines. "
                    "A stage dropped or moved the producer: keep nodes in traced order."
                )
        for name in node.output_names:
            if name in defined:
                raise GraphError(f"%{node.name} defines %{name} a second time. Give each value a fresh name.")
            defined.add(name)
    for name in output_names:
        if name not in defined:
            raise GraphError(f"the output reads %{name}, which nothing defines. Dead-code removal went too far.")
