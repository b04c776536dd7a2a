"""The layers of an `nn.Sequential` as a chain of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from rk_solvers import Chain, Solver
from rk_solvers.rotor import Rotor
from rkgb import KComp
from rockmate.planning.graph_solver import GraphSolver
from rockmate.planning.measured import Measured


def layers_of(module: nn.Module) -> tuple[str, ...]:
    """Paths of the layers of a Sequential, those of Sequentials within it in their place; none of another module.

    A layer that stands at several places has the path of the first at each of them.
    """
    path_of = {part: path for path, part in module.named_modules()}
    return tuple(path_of[layer] for layer in _flattened(module)) if _is_chain(module) else ()


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _flattened(module: nn.Module) -> Iterator[nn.Module]:
    for layer in module.children() if not isinstance(module, nn.Sequential) else module:
        if _is_chain(layer):
            yield from _flattened(layer)
        else:
            yield layer


@dataclass(frozen=True, slots=True)
class LayerChain:
    """A problem divided by layers. A block is a layer, or several whose operations cannot be told apart.

    So it is with an operation that writes in place: it belongs to the one that made what it writes into.
    """

    chain: Chain
    numbers: tuple[range, ...]  # of each block: which layers it is


def chain_of_layers(measured: Measured, layers: Sequence[str]) -> LayerChain:
    """`measured` divided by these layers; by the blocks of its graph where there are none, each taken for a layer."""
    if not layers:
        count = len(measured.chain.blocks)
        return LayerChain(measured.chain, tuple(range(index, index + 1) for index in range(count)))
    graph = measured.graphs.K_graph
    places = _Places(layers)
    numbers = [places.of(comp) for comp in graph.forward]
    blocks = _joined(numbers)
    block_of = {
        comp.node: index for index, block in enumerate(blocks) for comp in graph.forward[block.start : block.stop]
    }
    first = len(measured.problem.backward) - len(graph.backward)  # those before are the loss's
    stages = [block_of[comp.node] for comp in graph.backward]
    blocks, stages = _going_back(blocks, stages)
    chain = Chain(tuple(blocks), (len(blocks),) * first + tuple(stages))
    spans = (
        range(min(n.start for n in numbers[b.start : b.stop]), max(n.stop for n in numbers[b.start : b.stop]))
        for b in blocks
    )
    return LayerChain(chain, tuple(spans))


class _Places:
    """Finds the layer of each operation, in the order of the forward."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self._current = 0

    def of(self, comp: KComp) -> range:
        """The layers whose operations `comp` is of: several where one writes into what another has made."""
        numbers = [self._number(op.source.module_path) for op in comp.node.ops]
        return range(min(numbers), max(numbers) + 1)

    def _number(self, path: str) -> int:
        for number in range(self._current, len(self._layers)):
            layer = self._layers[number]
            if path == layer or path.startswith(f"{layer}."):
                self._current = number
                break
        return self._current  # no layer's own: a hook's, or a value that is computed once for many


def _joined(numbers: Sequence[range]) -> list[range]:
    """Blocks of neighbouring operations that share a layer."""
    blocks: list[range] = []
    last = -1  # layer of the block before
    for index, layers in enumerate(numbers):
        if blocks and layers.start <= last:
            blocks[-1] = range(blocks[-1].start, index + 1)
        else:
            blocks.append(range(index, index + 1))
        last = max(last, layers.stop - 1)
    return blocks


def _going_back(blocks: list[range], stages: list[int]) -> tuple[list[range], list[int]]:
    """The blocks, joined where the backward goes to and fro between them, and the block of each backward stage."""
    while True:
        wrong = next(((a, b) for a, b in itertools.pairwise(stages) if b > a), None)
        if wrong is None:
            return blocks, stages
        low, high = wrong
        blocks = [*blocks[:low], range(blocks[low].start, blocks[high].stop), *blocks[high + 1 :]]
        stages = [stage if stage < low else low if stage <= high else stage - (high - low) for stage in stages]


@dataclass(frozen=True, slots=True)
class AlongLayers(GraphSolver):
    """Rotor's dynamic program along the layers of a Sequential; along the blocks of its graph for another module."""

    layers: tuple[str, ...]  # paths; see `layers_of`
    slots: int = 500

    @property
    def name(self) -> str:
        """Short name shown in solutions."""
        return "rotor"

    def for_measured(self, measured: Measured) -> Solver:
        """The program for these layers."""
        return replace(Rotor(chain_of_layers(measured, self.layers).chain), slots=self.slots)
