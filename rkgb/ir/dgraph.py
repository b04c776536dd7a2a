"""D graph: the trace as data flow, inspected and without dead code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.ir.bgraph import Leaf, LeafKind, Source, kept_trees, verify_order
from rkgb.ir.call import Call, bind, ref_names
from rkgb.ir.values import ValueInfo
from rkgb.process.autocast import without_autocast
from rkgb.state.attributes import AttributeWrite
from rkgb.state.generators import OwnGenerator


@dataclass(eq=False, slots=True)
class DNode:
    """One operation, with what was seen when it ran on the sample."""

    name: str
    call: Call
    outputs: Any
    grad_enabled: bool
    source: Source
    is_random: bool = False  # it moved a random generator
    written: list[str] = field(default_factory=list)  # values whose storage it writes in place
    is_guard: bool = False  # it checks a value that Python read: no outputs, and never left out or repeated
    # Inputs that did not yet require a gradient, as they do at the end: one came by what was written into them since.
    plain_inputs: list[str] = field(default_factory=list)
    inputs: list[str] = field(init=False, repr=False)  # names of the values that it reads, each once

    def __post_init__(self) -> None:
        self.inputs = self.call.inputs  # every stage after this one asks for them, several times

    @property
    def output_names(self) -> list[str]:
        """Names of the values that it defines."""
        return ref_names(self.outputs)

    def tracks(self, name: str, values: Mapping[str, ValueInfo]) -> bool:
        """Whether its input of that name required a gradient when it ran."""
        return values[name].requires_grad and name not in self.plain_inputs


@dataclass(eq=False, slots=True)
class DGraph:
    """Data flow: every node's values are known by shape, storage and gradient."""

    nodes: list[DNode]
    leaves: dict[str, Leaf]
    output: Any
    values: dict[str, ValueInfo]  # of every leaf and every node's output
    varying: frozenset[str] = frozenset()  # values whose shape depends on data: `values` has the sample's
    trained: frozenset[str] | None = None  # outputs that the loss hands a gradient to; None: all that take one
    assumed: frozenset[str] = frozenset()  # of these, losses in attributes that training may as well leave out
    generators: tuple[OwnGenerator, ...] = ()  # those of the user's own that it draws from
    handed: frozenset[str] = frozenset()  # values whose storage the one operation that reads them takes over
    attributes: tuple[AttributeWrite, ...] = ()  # what forward leaves in attributes: tensors of the graph, plain values

    def __iter__(self) -> Iterator[DNode]:
        return iter(self.nodes)

    @property
    def output_names(self) -> list[str]:
        """Names of the tensors in the output, and of those left in attributes, each once."""
        return ref_names(kept_trees(self))

    @property
    def gradient_outputs(self) -> list[str]:
        """Names of the outputs at which the backward starts."""
        taking = [name for name in self.output_names if self.values[name].requires_grad]
        return taking if self.trained is None else [name for name in taking if name in self.trained]

    def owner(self, name: str) -> str:
        """Name of the value that first held the storage of `name`; of one that is `handed`, of who takes it over."""
        return self.values[name].owner

    @property
    def surely_trained(self) -> list[str]:
        """Names of the outputs at which a backward starts in any case: all, where all are assumed to."""
        return [name for name in self.gradient_outputs if name not in self.assumed] or self.gradient_outputs

    def storages_with_gradient(self, outputs: Iterable[str] | None = None) -> set[str]:
        """Owners of the storages that the backward of the outputs, or of these, reaches.

        What requires a gradient but leads to no output has none.
        """
        values = self.values
        reached = {values[name].owner for name in (self.gradient_outputs if outputs is None else outputs)}
        for node in reversed(self.nodes):
            made = {values[name].owner for name in (*node.output_names, *node.written)}
            if node.grad_enabled and not made.isdisjoint(reached):
                reached.update(values[name].owner for name in node.inputs if values[name].requires_grad)
        return reached

    def verify(self) -> None:
        """Check order and that every value was inspected; raise `GraphError` otherwise."""
        verify_order(self.nodes, self.leaves, self.output_names)


def leaf_tensors(
    leaves: Mapping[str, Leaf], module: torch.nn.Module, inputs: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensor of every leaf, for a run of the graph on `inputs`."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    found: dict[str, torch.Tensor] = {}
    for name, leaf in leaves.items():
        if leaf.kind is LeafKind.INPUT:
            found[name] = inputs[leaf.index]
        elif leaf.constant is not None:
            found[name] = leaf.constant
        else:
            found[name] = parameters[leaf.path] if leaf.kind is LeafKind.PARAMETER else buffers[leaf.path]
    return found


def makers_of(names: Iterable[str], maker: Mapping[str, DNode]) -> dict[DNode, None]:
    """The operations among `maker`, by what they give, that gave these `names`, what they read, and so on."""
    found: dict[DNode, None] = {}
    waiting = list(names)
    while waiting:
        op = maker.get(waiting.pop())
        if op is not None and op not in found:
            found[op] = None
            waiting += op.inputs
    return found


def last_uses(nodes: list[Any], kept: list[str]) -> list[list[str]]:
    """For each node, the values that nothing after it reads: what may be dropped once it has run."""
    seen = set(kept)
    dropped: list[list[str]] = []
    for node in reversed(nodes):
        names = [name for name in dict.fromkeys((*node.call.inputs, *node.output_names)) if name not in seen]
        seen.update(names)
        dropped.append(names)
    return dropped[::-1]


def forward_peak_bytes(graph: DGraph) -> int:
    """Most bytes that the graph's values take at once in a run that saves nothing, beside what it is given."""
    owners = {name: graph.owner(name) for name in graph.values}
    held = dict.fromkeys(owners.values(), 0)  # values that are left, by the first of their storage
    given = {owners[name] for name in graph.leaves if name in owners}
    now_bytes = peak_bytes = 0
    for node, dropped in zip(graph.nodes, last_uses(graph.nodes, graph.output_names), strict=True):
        for name in node.output_names:
            owner = owners.get(name)
            if owner is None or owner in given:
                continue
            now_bytes += graph.values[owner].storage_bytes if not held[owner] else 0
            held[owner] += 1
        peak_bytes = max(peak_bytes, now_bytes)
        for name in dropped:
            owner = owners.get(name)
            if owner is None or not held[owner]:
                continue
            held[owner] -= 1
            now_bytes -= 0 if held[owner] else graph.values[owner].storage_bytes
    return peak_bytes


def run_nodes(
    nodes: list[Any],
    values: dict[str, Any],
    kept: list[str],
    observe: Callable[[Any, dict[str, Any]], None] | None = None,
) -> None:
    """Interpret `nodes` in the environment `values`, dropping every value after its last use.

    What the environment holds at entry stays; `kept` names the results to leave in it.
    `observe` is called after each node, before anything is dropped.
    """
    given = set(values)
    with without_autocast():
        for node, dropped in zip(nodes, last_uses(nodes, kept), strict=True):
            with torch.set_grad_enabled(node.grad_enabled and torch.is_grad_enabled()):
                bind(node.outputs, node.call.evaluate(values), values)
            if observe is not None:
                observe(node, values)
            for name in dropped:
                if name not in given:
                    values.pop(name, None)
