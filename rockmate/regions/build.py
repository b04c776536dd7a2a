"""From a region to compiled code: its joint graph is divided by least cuts, and each half compiled by inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rkgb.errors import GraphError
from rkgb.ir.compiled import Kernels
from rkgb.ir.values import ValueInfo
from rkgb.torch_private.compiler.parts import SymbolicSizes, compiled, forward_and_backward_of
from rockmate.division.cut import SavingProblem
from rockmate.division.joint import JointGraph, is_tensor_valued, size_of
from rockmate.division.rates import Rates
from rockmate.regions.sizes import OfPattern, Pattern

# Not measured: wherever and whenever a part is compiled, it is to save the same, as a plan of it was made for.
# There are no products in it, so that only bytes count.
_RATES = Rates(operations=1e9, bytes=1e7)
_PRICE = 3.0  # of a byte that is saved, in times of writing and reading it: joined loops repeat nearly for nothing


def kernels_of(function: Callable[..., Any], inputs: Sequence[ValueInfo], differentiable: Sequence[bool]) -> Kernels:
    """What `function` is compiled to for tensors like these `inputs`; which of its outputs have gradients is given.

    Raises what the compiler raises.
    """
    joint = forward_and_backward_of(
        lambda *given: tuple(function(*given)), lambda: [_like(one, one.shape, one.stride) for one in inputs]
    )
    return _compiled(_Halves.of(joint, differentiable, 0))


def kernels_for(
    pattern: Pattern,
    function_with: Callable[[Sequence[Any]], Callable[..., Any]],
    inputs: Sequence[ValueInfo],
    differentiable: Sequence[bool],
) -> Kernels:
    """As `kernels_of`, for all sizes of the `pattern` for which the code holds.

    `function_with` gives the function with these arguments of its operations.
    """
    sizes = SymbolicSizes()
    count = len(pattern.symbols)

    def function(*given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(function_with(pattern.arguments_at(given[:count]))(*given[count:]))

    def make() -> list[Any]:
        symbols = [sizes.symbol(number) for number in pattern.symbols]
        layouts = pattern.layouts_at(symbols)
        return [*symbols, *(_like(one, *layout) for one, layout in zip(inputs, layouts, strict=True))]

    halves = _Halves.of(forward_and_backward_of(function, make, sizes), differentiable, count)
    made = _compiled(halves)
    return replace(made, any_size=OfPattern(pattern, sizes.conditions()))  # the compiler has added its own


def _compiled(halves: _Halves) -> Kernels:
    forward = compiled(halves.forward, is_backward=False)
    backward = None if halves.backward is None else compiled(halves.backward, is_backward=True)
    return Kernels(forward, backward, halves.read, halves.gradients, halves.tangents, halves.saved)


def _like(info: ValueInfo, sizes: Sequence[Any], strides: Sequence[Any]) -> torch.Tensor:
    made = torch.empty_strided(sizes, strides, dtype=info.dtype, device=info.device)
    return made.requires_grad_(info.requires_grad)


class _Halves:
    """The two graphs of a joint one."""

    def __init__(self) -> None:
        self.forward: GraphModule
        self.backward: GraphModule | None = None
        self.read: tuple[int, ...] = ()
        self.saved: tuple[str, ...] = ()
        self.gradients: tuple[int | None, ...] = ()
        self.tangents: tuple[int, ...] = ()

    @classmethod
    def of(cls, joint: GraphModule, differentiable: Sequence[bool], numbers: int) -> _Halves:
        """Those of a graph whose first inputs are so many `numbers`, which both are given."""
        halves = cls()
        inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
        tangents = [node for node in inputs if node.name.startswith("tangents")]
        primals = [node for node in inputs if node not in tangents]
        sizes, primals = primals[:numbers], primals[numbers:]
        (returned,) = next(node for node in joint.graph.nodes if node.op == "output").args
        count = len(differentiable)
        made, gradients = list(returned[:count]), list(returned[count + numbers :])
        wanted = [node for node in gradients if isinstance(node, Node)]
        saved = _saved(joint, count) if wanted else ()
        read = [node for node in saved if node in primals]
        kept = [node for node in saved if node not in primals]
        halves.forward = _extracted(joint, [*sizes, *primals], [*made, *kept])
        halves.gradients = tuple(None if not isinstance(node, Node) else wanted.index(node) for node in gradients)
        halves.read = tuple(primals.index(node) for node in read)
        halves.saved = tuple(_told(node) for node in kept)
        taking = [place for place, takes in enumerate(differentiable) if takes] if tangents else []
        halves.tangents = tuple(place for place, _ in zip(taking, tangents, strict=True))
        if any(_told(one) != _told(made[place]) for place, one in zip(taking, tangents, strict=True)):
            raise GraphError("the gradient of one of its outputs is compiled to lie otherwise than that output")
        if wanted:
            halves.backward = _extracted(joint, [*sizes, *read, *kept, *tangents], wanted)
        return halves


def _told(node: Node) -> str:
    kept = node.meta["val"]
    sizes, strides = (tuple(map(size_of, numbers)) for numbers in (kept.shape, kept.stride()))
    return f"{kept.dtype} {sizes} {strides}"


def _saved(joint: GraphModule, outputs: int) -> list[Node]:
    graph = JointGraph.of(joint, outputs)
    # What is read of earlier operations is held for this, unless one of them holds it, too.
    charged = [node for node in graph.given if is_tensor_valued(node) and node.meta["val"].dim() > 1]
    problem = SavingProblem(graph, {node: _RATES.time_ms(node) for node in graph.nodes}, charged)
    chosen = problem.cheapest(_PRICE / _RATES.bytes).saved
    needed, seen, waiting = [], set(), list(graph.needed)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if not is_tensor_valued(node):
            waiting += node.all_input_nodes  # a number is computed again, of those that are given
        elif node in chosen or node in graph.given:
            needed.append(node)
        else:
            waiting += node.all_input_nodes
    return sorted(needed, key=graph.place.__getitem__)


def _extracted(joint: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """The part of a graph between these inputs and outputs."""
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    wanted, waiting = set(inputs), [node for node in outputs if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node not in wanted:
            wanted.add(node)
            waiting += node.all_input_nodes
    for node in joint.graph.nodes:
        if node in wanted and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] if isinstance(node, Node) else node for node in outputs))
    graph.lint()
    return GraphModule(joint, graph)
