"""D graph: the trace as data flow, inspected and without dead code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.bgraph import BGraph, BNode, Leaf, LeafKind, Source, verify_order
from rkgb.call import Call, bind, ref_names
from rkgb.sample import Sample
from rkgb.state import borrowed, module_devices, nothing_packed, random_states, without_autocast
from rkgb.tracing.generators import OwnGenerator, generators_for
from rkgb.values import ValueInfo, info_of


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
    inputs: list[str] = field(init=False, repr=False)  # names of the values that it reads, each once

    def __post_init__(self) -> None:
        self.inputs = self.call.inputs  # every stage after this one asks for them, several times

    @property
    def output_names(self) -> list[str]:
        """Names of the values that it defines."""
        return ref_names(self.outputs)


@dataclass(eq=False, slots=True)
class DGraph:
    """Data flow: every node's values are known by shape, storage and gradient."""

    nodes: list[DNode]
    leaves: dict[str, Leaf]
    output: Any
    values: dict[str, ValueInfo]  # of every leaf and every node's output
    varying: frozenset[str] = frozenset()  # values whose shape depends on data: `values` has the sample's
    trained: frozenset[str] | None = None  # outputs that the loss hands a gradient to; None: all that take one
    generators: tuple[OwnGenerator, ...] = ()  # those of the user's own that it draws from

    def __iter__(self) -> Iterator[DNode]:
        return iter(self.nodes)

    @property
    def output_names(self) -> list[str]:
        """Names of the tensors in the output, each once."""
        return ref_names(self.output)

    @property
    def gradient_outputs(self) -> list[str]:
        """Names of the outputs at which the backward starts."""
        taking = [name for name in self.output_names if self.values[name].requires_grad]
        return taking if self.trained is None else [name for name in taking if name in self.trained]

    def owner(self, name: str) -> str:
        """Name of the value that first held the storage of `name`."""
        return self.values[name].owner

    def storages_with_gradient(self) -> set[str]:
        """Owners of the storages that the backward of the outputs reaches.

        What requires a gradient but leads to no output has none.
        """
        values = self.values
        reached = {values[name].owner for name in self.gradient_outputs}
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


def last_uses(nodes: list[Any], kept: list[str]) -> list[list[str]]:
    """For each node, the values that nothing after it reads: what may be dropped once it has run."""
    seen = set(kept)
    dropped: list[list[str]] = []
    for node in reversed(nodes):
        names = [name for name in dict.fromkeys((*node.call.inputs, *node.output_names)) if name not in seen]
        seen.update(names)
        dropped.append(names)
    return dropped[::-1]


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


def b_to_d(graph: BGraph, module: torch.nn.Module, sample: Sample) -> DGraph:
    """Run the trace once on the sample to inspect every value, then remove dead code.

    Autograd's saved tensors are dropped while inspecting, so this takes no more memory than inference.
    """
    inspector = _Inspector(module, graph.generators)
    with borrowed(module, own=graph.generators):
        values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, sample.tensors))
        for name, tensor in values.items():
            inspector.note(name, tensor)
        inspector.refresh_random_states()
        nothing_saved = nothing_packed()
        with torch.enable_grad(), nothing_saved:
            run_nodes(graph.nodes, values, [], inspector.observe)
    nodes = _live(inspector.nodes, inspector.values, set(graph.leaves), graph.output_names)
    used = {name for node in nodes for name in node.inputs} | set(graph.output_names)
    result = DGraph(
        nodes=nodes,
        leaves={name: leaf for name, leaf in graph.leaves.items() if name in used or leaf.kind is LeafKind.INPUT},
        output=graph.output,
        values=inspector.values,
        varying=graph.varying,
        generators=graph.generators,
    )
    result.verify()
    return result


class _Inspector:
    """Notes the facts of values while the trace runs."""

    def __init__(self, module: torch.nn.Module, own: tuple[OwnGenerator, ...]) -> None:
        self.nodes: list[DNode] = []
        self.values: dict[str, ValueInfo] = {}
        self._devices = module_devices(module)
        self._generators = generators_for(module, own)
        # Weak references keep the storages' identities unique after the storages themselves are gone.
        self._owners: dict[int, tuple[StorageWeakRef, str]] = {}
        self._held: dict[str, list[str]] = {}  # by owner: the values in its storage
        self._random: list[torch.Tensor] = []

    def note(self, name: str, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        _, owner = self._owners.setdefault(reference.cdata, (reference, name))
        if name not in self.values:
            self._held.setdefault(owner, []).append(name)
        self.values[name] = info_of(tensor, owner)

    def refresh_random_states(self) -> bool:
        """Whether a generator has moved since the last call."""
        states = [state for _, state in random_states(self._devices)]
        states += [generator.get_state() for generator in self._generators]
        moved = len(states) != len(self._random) or not all(
            torch.equal(new, old) for new, old in zip(states, self._random, strict=True)
        )
        self._random = states
        return moved

    def observe(self, node: BNode, values: dict[str, Any]) -> None:
        for name in node.output_names:
            self.note(name, values[name])
        written = _written(node, self.values)
        for owner in {self.values[name].owner for name in written}:
            # What is written in place may come to require a gradient.
            for name in self._held[owner]:
                if name in values:
                    self.note(name, values[name])
        self.nodes.append(
            DNode(
                node.name,
                node.call,
                node.outputs,
                node.grad_enabled,
                node.source,
                is_random=self.refresh_random_states(),
                written=written,
                is_guard=bool(getattr(node.call.function, "is_guard", False)),
            )
        )


# Their schemas do not say that, in training, they update the running statistics given to them.
RUNNING_STATISTICS: dict[str, tuple[int, int, int]] = {
    # operation: positions of running_mean, running_var, and of the flag that makes it write them
    "aten::batch_norm": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::native_batch_norm": (3, 4, 5),
    "aten::instance_norm": (3, 4, 5),
}


def _written(node: BNode, values: Mapping[str, ValueInfo]) -> list[str]:
    written = list(node.call.written)
    function = node.call.function
    if isinstance(function, torch._ops.OpOverload) and function._schema.name in RUNNING_STATISTICS:
        mean, variance, flag = RUNNING_STATISTICS[function._schema.name]
        if node.call.args[flag]:
            written += ref_names((node.call.args[mean], node.call.args[variance]))
    return [name for name in written if name in values]


def _live(nodes: list[DNode], values: Mapping[str, ValueInfo], leaves: set[str], outputs: list[str]) -> list[DNode]:
    """Nodes that reach an output, write into something that does, move a random generator, or are guards."""
    needed = set(outputs)
    needed_storages = {values[name].owner for name in outputs}
    kept: list[DNode] = []
    for node in reversed(nodes):
        storages_written = {values[name].owner for name in node.written}
        live = (
            node.is_random
            or node.is_guard
            or not needed.isdisjoint(node.output_names)
            or not storages_written.isdisjoint(needed_storages)
            or not storages_written.isdisjoint(leaves)
        )
        if live:
            kept.append(node)
            needed.update(node.inputs)
            needed_storages.update(values[name].owner for name in node.inputs)
    return kept[::-1]
