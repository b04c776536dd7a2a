"""A run of the trace on the sample: what it shows of each value makes the B graph a D graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.ir.bgraph import BGraph, BNode, LeafKind
from rkgb.ir.call import Call, ref_names
from rkgb.ir.dgraph import DGraph, DNode, leaf_tensors, run_nodes
from rkgb.ir.sample import Sample
from rkgb.ir.values import ValueInfo, info_of
from rkgb.restore import prepared
from rkgb.state.generators import OwnGenerator, generators_for
from rkgb.state.module_state import module_devices, module_state_kept, nothing_packed, random_states
from rkgb.torch_private.modes import without_dispatch_modes
from rkgb.torch_private.operations import OpOverload, is_composite


def b_to_d(graph: BGraph, module: torch.nn.Module, sample: Sample) -> DGraph:
    """Run the trace once to inspect every value, remove dead code, and set apart what comes back alone.

    It runs on a copy of the sample, into which forward may write.
    Autograd's saved tensors are dropped while inspecting, so this takes no more memory than inference.
    """
    inspector = _inspected(graph, module, sample.copy())
    if any(node.is_random and not _is_known_to_draw(node) for node in inspector.nodes):
        # Or another thread has drawn just then: the stream is the process's.
        again = _inspected(graph, module, sample.copy())
        for node, other in zip(inspector.nodes, again.nodes, strict=True):
            node.is_random &= other.is_random or _is_known_to_draw(node)
    for node in inspector.nodes:
        node.plain_inputs = [name for name in node.plain_inputs if inspector.values[name].requires_grad]
    nodes = _live(inspector.nodes, inspector.values, set(graph.leaves), graph.output_names)
    used = {name for node in nodes for name in node.inputs} | set(graph.output_names)
    result = DGraph(
        nodes=nodes,
        leaves={name: leaf for name, leaf in graph.leaves.items() if name in used or leaf.kind is LeafKind.INPUT},
        output=graph.output,
        values=inspector.values,
        varying=graph.varying,
        generators=graph.generators,
        attributes=graph.attributes,
    )
    result = prepared(result)
    result.verify()
    return result


def _inspected(graph: BGraph, module: torch.nn.Module, sample: Sample) -> _Inspector:
    inspector = _Inspector(module, graph.generators)
    with module_state_kept(module, own=graph.generators):
        values: dict[str, Any] = dict(leaf_tensors(graph.leaves, module, sample.tensors))
        for name, tensor in values.items():
            inspector.note(name, tensor)
        inspector.refresh_random_states()
        nothing_saved = nothing_packed()
        with torch.enable_grad(), nothing_saved:
            run_nodes(graph.nodes, values, [], inspector.observe)
    return inspector


def _is_known_to_draw(node: DNode) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.call.function, "tags", ())


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

    def _would_draw(self, node: BNode, values: dict[str, Any]) -> bool:
        """Whether it would draw if there were data: the stream stands still where there are none."""
        function = node.call.function
        if not isinstance(function, OpOverload) or torch.Tag.nondeterministic_seeded not in function.tags:
            return False
        # What is made of other operations and was not taken apart draws nothing: dropout of nothing.
        return not is_composite(function) and any(values[name].is_meta for name in node.output_names)

    def observe(self, node: BNode, values: dict[str, Any]) -> None:
        plain = [name for name in node.call.inputs if not self.values[name].requires_grad]
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
                is_random=self.refresh_random_states() or self._would_draw(node, values),
                written=written,
                is_guard=bool(getattr(node.call.function, "is_guard", False)),
                plain_inputs=plain,
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


def statistics_written(call: Call) -> tuple[int, int] | None:
    """Where `call` takes running statistics that it updates, if it does."""
    name = call.function._schema.name if isinstance(call.function, OpOverload) else ""
    if name not in RUNNING_STATISTICS:
        return None
    mean, variance, flag = RUNNING_STATISTICS[name]
    always = name == "aten::instance_norm" and _instance_norm_always_writes()
    return (mean, variance) if always or call.args[flag] else None


@cache
def _instance_norm_always_writes() -> bool:
    """Whether it does in eval mode, too, as in PyTorch 2.9: what it writes is rounded, and drifts with every call."""
    with torch.inference_mode(False), torch.no_grad(), without_dispatch_modes():
        given, mean, variance = (torch.ones(shape, device="cpu") for shape in ((1, 1, 1), (1,), (1,)))
        torch.instance_norm(given, None, None, mean, variance, False, 0.0, 1.0, False)
        return mean._version > 0


def _written(node: BNode, values: Mapping[str, ValueInfo]) -> list[str]:
    written = [*node.call.written, *ref_names([node.call.args[place] for place in statistics_written(node.call) or ()])]
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
