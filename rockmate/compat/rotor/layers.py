"""The layers of an `nn.Sequential` as a chain of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from rk_solvers import Chain, Solver
from rk_solvers.chain.rotor import Rotor
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
    """A problem divided by layers. A block is a layer, with those after it that make nothing of their own.

    What writes in place, or makes a view, belongs to what made the tensor: so does a layer that does nothing else.
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
    homes = [places.home_of(comp) for comp in graph.forward]
    others = [places.others_of(comp, home) for comp, home in zip(graph.forward, homes, strict=True)]
    blocks = [range(part[0], part[-1] + 1) for part in _runs_of_equal(homes)]
    block_of = {
        comp.node: index for index, block in enumerate(blocks) for comp in graph.forward[block.start : block.stop]
    }
    first = len(measured.problem.backward) - len(graph.backward)  # those before are the loss's
    stages = [block_of[comp.node] for comp in graph.backward]
    blocks, stages = going_back(blocks, stages)
    chain = Chain(tuple(blocks), (len(blocks),) * first + tuple(stages))
    numbers = []
    for block in blocks:
        following = homes[block.stop] if block.stop < len(homes) else len(layers)
        guests = {number for number in set().union(*others[block.start : block.stop]) if number < following}
        numbers.append(range(homes[block.start], max(homes[block.stop - 1], *guests, 0) + 1))
    return LayerChain(chain, tuple(numbers))


class _Places:
    """Finds the layer of each operation, in the order of the forward."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self._current = 0

    def home_of(self, comp: KComp) -> int:
        """The layer that made what `comp` makes; not before that of the computation asked for before."""
        found = self._number(comp.node.ops[0].source.module_path, self._current)
        self._current = self._current if found is None else found
        return self._current  # what is no layer's own is counted with the layer where it stands

    def others_of(self, comp: KComp, home: int) -> set[int]:
        """Later layers that view what `comp` makes, or write into it."""
        found = (self._number(op.source.module_path, home) for op in comp.node.ops)
        return {number for number in found if number is not None and number > home}

    def _number(self, path: str, first: int) -> int | None:
        for number in range(first, len(self._layers)):
            layer = self._layers[number]
            if path == layer or path.startswith(f"{layer}."):
                return number
        return None


def _runs_of_equal(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Positions of neighbouring equal numbers."""
    for _, run in itertools.groupby(range(len(numbers)), key=lambda index: numbers[index]):
        yield list(run)


def going_back(blocks: list[range], stages: list[int]) -> tuple[list[range], list[int]]:
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
