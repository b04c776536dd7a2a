"""From a region to compiled code: its joint graph is divided by least cuts, and each half compiled by inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rkgb.errors import GraphError
from rkgb.ir.compiled import Handed, Kernels
from rkgb.ir.values import ValueInfo
from rkgb.torch_private.compiler.parts import SymbolicSizes, compiled, forward_and_backward_of, numbers_in
from rockmate.division.cut import SavingProblem
from rockmate.division.joint import JointGraph, count_of, is_tensor_valued, is_tuple, size_of, tensors_of, with_inputs
from rockmate.division.rates import Rates
from rockmate.regions.sizes import OfPattern, Pattern

# Not measured: wherever and whenever a part is compiled, it is to save the same, as a plan of it was made for.
# There are no products in it, so that only bytes count.
_RATES = Rates(operations=1e9, bytes=1e7)
_PRICE = 3.0  # of a byte that is saved, in times of writing and reading it: joined loops repeat nearly for nothing
_SMALL = 16  # how many times more numbers are in the largest input than in statistics of it, at least


def kernels_of(
    function: Callable[..., Any], inputs: Sequence[ValueInfo], differentiable: Sequence[bool], statistics: int = 0
) -> list[Kernels]:
    """What `function` is compiled to for tensors like these `inputs`; which of its outputs have gradients is given.

    Where the last of its outputs are so many `statistics` of whole tensors, and what the others need of these tensors
    is small, they are computed apart: `rkgb.ir.compiled.CompiledCall` tells how. Raises what the compiler raises.
    """
    joint = forward_and_backward_of(
        lambda *given: tuple(function(*given)), lambda: [_like(one, one.shape, one.stride) for one in inputs]
    )
    return _compiled(_Joint(joint, differentiable, 0, statistics))


def kernels_for(
    pattern: Pattern,
    function_with: Callable[[Sequence[Any]], Callable[..., Any]],
    inputs: Sequence[ValueInfo],
    differentiable: Sequence[bool],
    statistics: int = 0,
) -> list[Kernels]:
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

    joint = forward_and_backward_of(function, make, sizes)
    made = _compiled(_Joint(joint, differentiable, count, statistics))
    conditions = sizes.conditions()  # the compiler has added its own
    every = tuple(range(len(inputs)))
    *first, rest = made
    found = [replace(one, any_size=OfPattern(pattern, conditions, one.takes)) for one in first]
    handed = tuple(tensor for one in first for tensor in one.hands_on)
    return [*found, replace(rest, any_size=OfPattern(pattern, conditions, every, handed))]


def _compiled(joint: _Joint) -> list[Kernels]:
    made = []
    for halves in joint.parts():
        forward = compiled(halves.forward, is_backward=False)
        backward = None if halves.backward is None else compiled(halves.backward, is_backward=True)
        handing = (halves.read, halves.gradients, halves.tangents, halves.saved)
        made.append(Kernels(forward, backward, *handing, takes=halves.takes, hands_on=halves.hands_on))
    return made


def _like(info: ValueInfo, sizes: Sequence[Any], strides: Sequence[Any]) -> torch.Tensor:
    made = torch.empty_strided(sizes, strides, dtype=info.dtype, device=info.device)
    return made.requires_grad_(info.requires_grad)


@dataclass(slots=True)
class _Halves:
    """The two graphs of an operation, as `Kernels` has their code."""

    forward: GraphModule
    backward: GraphModule | None = None
    read: tuple[int, ...] = ()
    saved: tuple[str, ...] = ()
    gradients: tuple[int | None, ...] = ()
    tangents: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    hands_on: tuple[Handed, ...] = ()


class _Joint:
    """A joint graph whose first inputs are so many `numbers`, which all that is made of it are given."""

    def __init__(self, graph: GraphModule, differentiable: Sequence[bool], numbers: int, statistics: int) -> None:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        tangents = [node for node in inputs if node.name.startswith("tangents")]
        primals = [node for node in inputs if node not in tangents]
        (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
        count = len(differentiable)
        self.graph = graph
        self.sizes, self.primals = primals[:numbers], primals[numbers:]
        self.tangents = tangents
        self.taking = [place for place, takes in enumerate(differentiable) if takes] if tangents else []
        self.made: list[Node] = list(returned[: count - statistics])
        self.statistics: list[Node] = list(returned[count - statistics : count])
        self.gradients = list(returned[count + numbers :])
        self.wanted = [node for node in self.gradients if isinstance(node, Node)]
        self.saved = _saved(graph, count) if self.wanted else []
        for place, one in zip(self.taking, tangents, strict=True):
            if _told(one) != _told(self.made[place]):
                raise GraphError("the gradient of one of its outputs is compiled to lie otherwise than that output")

    def parts(self) -> list[_Halves]:
        """The halves of it as a whole, or of statistics and of the rest."""
        handed = self._handed()
        if not handed:
            return [self._halves([], [*self.made, *self.statistics])]
        return [self._of_statistics(handed), self._halves(handed, self.made)]

    def _handed(self) -> list[Node]:
        """What the rest needs of statistics, where that spares it to read whole tensors for them."""
        if not self.statistics:
            return []
        most = max(_numbers(node) for node in self.primals)
        others = [node for node in self.saved if node not in self.primals and node not in self.made]
        small = [node for node in others if _SMALL * _numbers(node) <= most]
        rest = with_inputs(self.made, [*self.primals, *small])
        spared = with_inputs(small, self.primals) - rest
        return small if any(_reduces(node) for node in spared) else []

    def _of_statistics(self, handed: list[Node]) -> _Halves:
        outputs = [*handed, *self.statistics]
        reached = with_inputs(outputs, self.primals)
        taken = [node for node in self.primals if node in reached]
        halves = _Halves(_extracted(self.graph, [*self.sizes, *taken], outputs))
        halves.takes = tuple(map(self.primals.index, taken))
        halves.hands_on = tuple(
            Handed(one.dtype, numbers_in((tuple(one.shape), one.stride()), [size.meta["val"] for size in self.sizes]))
            for one in (node.meta["val"] for node in handed)
        )
        return halves

    def _halves(self, handed: list[Node], outputs: list[Node]) -> _Halves:
        given, wanted = [*self.primals, *handed], self.wanted
        read = [node for node in self.saved if node in given]
        kept = [node for node in self.saved if node not in given]
        halves = _Halves(_extracted(self.graph, [*self.sizes, *given], [*outputs, *kept]))
        halves.gradients = tuple(None if not isinstance(node, Node) else wanted.index(node) for node in self.gradients)
        halves.gradients += (None,) * len(handed)
        halves.read = tuple(map(given.index, read))
        halves.saved = tuple(map(_told, kept))
        halves.tangents = tuple(self.taking)
        if wanted:
            halves.backward = _extracted(self.graph, [*self.sizes, *read, *kept, *self.tangents], wanted)
        return halves


def _numbers(node: Node) -> int:
    return count_of(node.meta["val"].shape)


def _reduces(node: Node) -> bool:
    """Whether it makes few numbers of many."""
    read = [one for one in node.all_input_nodes if is_tensor_valued(one) and not is_tuple(one)]
    made = [one.numel() for one in tensors_of(node)]
    most = max(map(_numbers, read), default=0)
    return bool(made) and all(_SMALL * size_of(count) <= most for count in made)


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
    wanted = with_inputs((node for node in outputs if isinstance(node, Node)), inputs)
    for node in joint.graph.nodes:
        if node in wanted and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] if isinstance(node, Node) else node for node in outputs))
    graph.lint()
    return GraphModule(joint, graph)
