"""A schedule in rotor's words: which layer runs when, and what its forward keeps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rk_solvers import Problem, Schedule, SecondMemory, Simulation, simulate
from rk_solvers.liveness import Step
from rockmate.compat.rotor.layers import LayerChain

Kind = Literal["Fng", "Fck", "Fe", "B"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One run of a layer.

    `Fng`: forward that keeps nothing, its input neither. `Fck`: forward that keeps its input alone. `Fe`: forward that
    keeps what the layer's backward needs, or a part of it. `B`: backward.
    """

    kind: Kind
    layers: range  # numbers of the layers in the flattened Sequential; several that are one block run together
    in_part: bool = False  # only some of the layer's operations run

    def __str__(self) -> str:
        last = f"-{self.layers[-1]}" if len(self.layers) > 1 else ""
        return f"{self.kind} {self.layers[0]}{last}{' (in part)' if self.in_part else ''}"


@dataclass(frozen=True, slots=True)
class Sequence:
    """The runs of all layers in a training step, in order. As text one line, such as ``Fck 0; Fng 1; Fe 2; B 2``."""

    operations: tuple[Operation, ...]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def __str__(self) -> str:
        return "; ".join(str(operation) for operation in self.operations)


@dataclass(slots=True)
class _Run:
    """Neighbouring steps of one block, all forward or all backward; from step `first` to step `last`."""

    block: int
    is_backward: bool
    first: int
    last: int
    names: set[int]  # indices of its operations


def sequence_of(
    problem: Problem, schedule: Schedule, layers: LayerChain, memory: SecondMemory | None = None
) -> Sequence:
    """What `schedule` does, layer by layer, the loss left out. What moves to `memory` and back counts as kept.

    Raises `ValueError` for a chain of another problem.
    """
    layers.chain.check(problem)
    return _Reader(problem, simulate(problem, schedule, memory), layers).read()


class _Reader:
    def __init__(self, problem: Problem, simulation: Simulation, layers: LayerChain) -> None:
        self.problem, self.layers = problem, layers
        self.block_of = [index for index, block in enumerate(layers.chain.blocks) for _ in block]
        self.steps = [moment.step for moment in simulation.moments]
        self.runs = list(_runs(self.steps, self.block_of, layers.chain.backward_block))
        self.last_use: dict[int, list[tuple[int, int]]] = {}  # of each data: when its instances begin and end
        for instance in simulation.instances:
            stays = self.last_use.setdefault(instance.data, [])
            first = stays.pop()[0] if instance.is_back else instance.first
            stays.append((first, instance.last))
        self.uses: dict[tuple[int, int], list[int]] = {}  # of each data by each block: the steps
        for position, step in enumerate(self.steps):
            block = self._block(step)
            for item in self._reads(step):
                self.uses.setdefault((item, block), []).append(position)
        self.readers: dict[int, set[int]] = {}  # of each data: the blocks
        for item, block in self.uses:
            self.readers.setdefault(item, set()).add(block)
        self.reruns: dict[int, list[_Run]] = {}  # of each block: its forwards
        for run in self.runs:
            if not run.is_backward:
                self.reruns.setdefault(run.block, []).append(run)

    def read(self) -> Sequence:
        """The sequence."""
        count = len(self.layers.chain.blocks)
        return Sequence(tuple(self._operation(run) for run in self.runs if run.block < count))

    def _operation(self, run: _Run) -> Operation:
        numbers = self.layers.numbers[run.block]
        if run.is_backward:
            stages = self.layers.chain.backward_block.count(run.block)
            return Operation("B", numbers, len(run.names) < stages)
        block = self.layers.chain.blocks[run.block]
        again = run.first >= len(self.problem.forward)
        can_run = sum(self.problem.forward[index].recomputable or not again for index in block)
        return Operation(self._kind(run), numbers, len(run.names) < can_run)

    def _kind(self, run: _Run) -> Kind:
        last = self.reruns[run.block][-1] is run
        if self._keeps_its_inside(run) or (last and run.block in self.layers.chain.backward_block):
            return "Fe"
        return "Fck" if self._keeps_its_input(run) else "Fng"

    def _keeps_its_inside(self, run: _Run) -> bool:
        """Whether data of the layer, that no other one reads, outlive the run."""
        for index in run.names:
            for item in self.problem.forward[index].outputs:
                handed_on = bool(self.readers.get(item, set()) - {run.block})
                if not handed_on and any(run.first <= first <= run.last < end for first, end in self.last_use[item]):
                    return True
        return False

    def _keeps_its_input(self, run: _Run) -> bool:
        """Whether what it reads of other layers is there for its next run, or its backward, without being made anew."""
        reads = {
            item
            for index in run.names
            for item in self.problem.forward[index].inputs
            if self.block_of[self.problem.data[item].producer] != run.block
        }
        if not reads:
            return self.reruns[run.block][-1] is not run  # the module's own input, which its caller keeps
        for item in reads:
            end = max(last for first, last in self.last_use[item] if first <= run.first)
            later = self.uses[item, run.block]
            place = bisect_right(later, run.last)
            if place < len(later) and later[place] <= end:
                return True
        return False

    def _block(self, step: Step) -> int:
        return self.layers.chain.backward_block[step.stage] if step.forward < 0 else self.block_of[step.forward]

    def _reads(self, step: Step) -> tuple[int, ...]:
        if step.forward < 0:
            return self.problem.backward[step.stage].needs
        return self.problem.forward[step.forward].inputs


def _runs(steps: list[Step], block_of: list[int], backward_block: tuple[int, ...]) -> Iterator[_Run]:
    run: _Run | None = None
    for position, step in enumerate(steps):
        is_backward = step.forward < 0
        block = backward_block[step.stage] if is_backward else block_of[step.forward]
        index = step.stage if is_backward else step.forward
        if run is None or (block, is_backward) != (run.block, run.is_backward) or index in run.names:
            if run is not None:
                yield run
            run = _Run(block, is_backward, position, position, set())
        run.last = position
        run.names.add(index)
    if run is not None:
        yield run
