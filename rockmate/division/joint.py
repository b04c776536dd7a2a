"""A joint graph of forward and backward, as the compiler hands it over: which nodes are what, and how large.

Nodes of the forward are those from which its outputs are computed, and those that write into its inputs. All others are
of the backward, whatever they read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rkgb.devices.registry import device_of
from rkgb.torch_private.operations import OpOverload

_FUSED_BESIDE = frozenset(
    "clone _to_copy convert_element_type embedding gather index where full scalar_tensor iota constant_pad_nd "
    "inductor_random inductor_lookup_seed inductor_randint arange _low_memory_max_pool_offsets_to_indices".split()
)
"""Operations beside those tagged as pointwise whose loops the compiler joins with their readers'."""
_ADDING = frozenset({"scatter_add", "scatter_reduce"})  # as those of `_JOINING`, on devices that do so
_JOINING = frozenset("sum mean prod amax amin any all argmax argmin var var_mean scatter index_put cat".split())
"""Operations that make few numbers of many, or write them elsewhere, and compute what they read in their own loops."""


@dataclass(eq=False)
class JointGraph:
    """A joint graph in its order, with what is known of its nodes."""

    nodes: list[Node]  # without the output node
    forward: frozenset[Node]  # what the forward computes, its inputs among them
    outputs: tuple[Node, ...]  # of the forward
    gradients: tuple[Node, ...]  # what the backward returns
    given: frozenset[Node]  # what the caller holds: parameters, buffers, the user's inputs
    tangents: tuple[Node, ...]  # gradients of outputs, which the backward is given
    written: frozenset[Node]  # of those given: what the forward writes, so that the backward finds other values there
    late: frozenset[Node]  # what cannot run before gradients are given
    place: dict[Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {node: place for place, node in enumerate(self.nodes)}

    @classmethod
    def of(cls, module: GraphModule, num_fwd_outputs: int) -> JointGraph:
        """What `module` holds, the first of whose outputs are the forward's."""
        nodes = [node for node in module.graph.nodes if node.op != "output"]
        constants = [node for node in nodes if node.op == "get_attr"]
        (returned,) = next(node for node in module.graph.nodes if node.op == "output").args
        flat = [item if isinstance(item, Node) else None for item in returned]
        outputs = tuple(dict.fromkeys(node for node in flat[:num_fwd_outputs] if node is not None))
        gradients = tuple(dict.fromkeys(node for node in flat[num_fwd_outputs:] if node is not None))
        inputs = [node for node in nodes if node.op == "placeholder"]
        tangents = tuple(node for node in inputs if node.name.startswith("tangents"))
        after: set[Node] = set(tangents)  # what cannot run before the backward
        for node in nodes:
            if not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        # What forward writes into its inputs, no output tells.
        forward = with_inputs([*outputs, *(node for node in nodes if node not in after and has_effects(node))])
        # What an operation gives beside its result, such as a mask, is there with it, whoever reads it.
        forward.update(node for node in nodes if node.target is operator.getitem and node.all_input_nodes[0] in forward)
        given = frozenset([*inputs, *constants]).difference(tangents)
        written = given & _written(module, nodes)
        return cls(nodes, frozenset(forward) | given, outputs, gradients, given, tangents, written, frozenset(after))

    @cached_property
    def needed(self) -> tuple[Node, ...]:
        """Nodes of the forward that the backward reads, in order."""
        read = {dep for node in self.nodes if node not in self.forward for dep in node.all_input_nodes}
        read.update(self.gradients)
        return tuple(node for node in self.nodes if node in self.forward and node in read)

    @cached_property
    def apart(self) -> frozenset[Node]:
        """What the backward alone reads though no gradient is needed for it, such as masks, and may compute."""
        own = (node for node in self.nodes if node not in self.forward and node not in self.late)
        return frozenset(node for node in own if not draws(node) and not has_effects(node))

    @cached_property
    def readers(self) -> dict[Node, tuple[Node, ...]]:
        """Who reads each node, or a view of it, and is no view."""
        found: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in reversed(self.nodes):
            for dep in dict.fromkeys(node.all_input_nodes):
                found[dep] += found[node] if is_view(node) else [node]
        return {node: tuple(dict.fromkeys(reading)) for node, reading in found.items()}

    def holder(self, node: Node) -> Node:
        """The node whose memory `node` is a view of: itself, where it has its own."""
        while is_view(node):
            node = node.all_input_nodes[0]
        return node

    def may_repeat(self, node: Node) -> bool:
        """Whether computing it in the backward again gives the same, and does nothing besides."""
        if node in self.given:
            return True
        return not (draws(node) or has_effects(node)) and self.written.isdisjoint(node.all_input_nodes)

    def backward_order(self, saved: frozenset[Node]) -> list[Node]:
        """What the backward computes, in order: what needs no gradient, and is not `saved`, just before it is read."""
        order: list[Node] = []
        done: set[Node] = set(saved) | self.given | set(self.tangents)
        wanted = self.late | set(self.gradients)
        for target in self.nodes:
            if target in done or target not in wanted:
                continue
            waiting = [target]
            while waiting:
                node = waiting[-1]
                missing = [] if node in done else [dep for dep in node.all_input_nodes if dep not in done]
                if missing:
                    waiting += sorted(missing, key=self.place.__getitem__, reverse=True)
                    continue
                waiting.pop()
                if node not in done:
                    done.add(node)
                    order.append(node)
        return order


def _written(module: GraphModule, nodes: list[Node]) -> set[Node]:
    """Nodes into which something is written: at the end of the forward, by the compiler, or by an operation."""
    found = set()
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node):
                    found.add(value)
    returned = next(node for node in module.graph.nodes if node.op == "output")
    inputs = {node.meta["desc"]: node for node in nodes if node.op == "placeholder" and "desc" in node.meta}
    for told in returned.meta.get("desc", ()):
        of = getattr(told, "mutated_input", None)
        if of in inputs:
            found.add(inputs[of])
    return found


def with_inputs(nodes: Iterable[Node], given: Iterable[Node] = ()) -> set[Node]:
    """These nodes, what they read, what that reads, and so on, back to what is `given`."""
    found, known, waiting = set[Node](), frozenset(given), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in known else node.all_input_nodes
    return found


# ---- single nodes ------------------------------------------------------------------------------------------


def tensors_of(node: Node) -> Iterator[torch.Tensor]:
    """The tensors that a node gives, which hold no data."""
    value = node.meta.get("val")
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def bytes_of(node: Node) -> int:
    """Bytes of what a node gives; of sizes that vary, those of the sample."""
    return sum(count_of(tensor.shape) * tensor.element_size() for tensor in tensors_of(node))


def count_of(shape: Sequence[Any]) -> int:
    """How many numbers a tensor of this shape holds; where sizes vary, that of the sample."""
    return math.prod(map(size_of, shape))


def size_of(size: Any) -> int:
    """A size as a number; of one that varies, that of the sample, which does not bind it to that."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_tuple(node: Node) -> bool:
    """Whether it gives several values, of which others take theirs."""
    return isinstance(node.meta.get("val"), (tuple, list))


def is_view(node: Node) -> bool:
    """Whether what it gives lies in the memory of its first input."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return isinstance(node.target, OpOverload) and node.target.is_view


def draws(node: Node) -> bool:
    """Whether it moves a random generator. What is computed from a seed that was drawn does not."""
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target._schema.name
    return torch.Tag.nondeterministic_seeded in node.target.tags or name in {
        "prims::inductor_seed",
        "prims::inductor_seeds",
    }


def is_fused(node: Node) -> bool:
    """Whether the compiler joins its loop with that of who reads it."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return is_view(node)
    return torch.Tag.pointwise in node.target.tags or node.target.is_view or _name_of(node) in _FUSED_BESIDE


def is_concatenation(node: Node) -> bool:
    """Whether it joins tensors: what computes those writes into its memory, and nobody computes it in another loop."""
    return _name_of(node) == "cat"


def joins_inputs(node: Node) -> bool:
    """Whether the compiler joins the loops of what it reads with its own."""
    if _name_of(node) in _ADDING:
        return all(device_of(tensor.device).adds_by_index for tensor in tensors_of(node))
    return is_fused(node) or _name_of(node) in _JOINING


def _name_of(node: Node) -> str:
    """The operation's, without its library; none of what is no operation."""
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else ""


def has_effects(node: Node) -> bool:
    """Whether it does more than to give what it gives."""
    if node.op != "call_function":
        return node.op not in ("placeholder", "get_attr")
    if not isinstance(node.target, OpOverload):
        return node.target is not operator.getitem and is_tensor_valued(node)
    return node.target._schema.is_mutable


def is_tensor_valued(node: Node) -> bool:
    """Whether it gives tensors, and no mere numbers."""
    return next(tensors_of(node), None) is not None
