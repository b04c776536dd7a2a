"""K graph: forward and backward computations, and the data between them, measured.

Computation nodes and data nodes alternate. Data are of three kinds: ``data`` (a storage that an S
node fills), ``grad`` (its gradient) and ``phantom`` (a storage that only the backward sees, such as
a dropout mask). Which of them each backward computation reads was seen, not guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rkgb.errors import GraphError
from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DNode
from rkgb.ir.profiles import OpProfile, SavedKind, SavedTensor
from rkgb.ir.restoration import Restoration
from rkgb.ir.sgraph import SGraph, SNode


def gradient_name(owner: str) -> str:
    """The name of the gradient of the data with this name."""
    return f"{owner}.grad"


@dataclass(eq=False, slots=True)
class KData:
    """Bytes that a computation produces and others read."""

    name: str
    kind: str  # "data", "grad" or "phantom"
    size_bytes: int
    gradient_of: str = ""  # of a gradient: the name of the data that it is the gradient of
    producers: dict[KComp, None] = field(default_factory=dict, repr=False)  # several contribute to one gradient
    users: dict[KComp, None] = field(default_factory=dict, repr=False)


@dataclass(eq=False, slots=True)
class KComp:
    """A forward computation (of one S node) or a stage of the backward."""

    name: str
    is_backward: bool
    node: SNode
    time_ms: float
    block: int  # index of the block that it belongs to
    deps: dict[KData, None] = field(default_factory=dict, repr=False)
    outputs: dict[KData, None] = field(default_factory=dict, repr=False)
    workspace_bytes: int = 0  # forward: most bytes beyond inputs and outputs while it runs
    resident_bytes: int = 0  # backward: gradients alive when it starts, in the whole step
    peak_bytes: int = 0  # backward: most gradients and workspace alive while it runs
    repeat_ms: float | None = None  # forward: time of having its data again in the backward, where that was measured
    op: str = ""  # backward: the operation of which it is a stage


@dataclass(eq=False, slots=True)
class KGraph:
    """Every computation of a training step, the loss left out, in the order of the step."""

    sgraph: SGraph
    blocks: list[Block]
    forward: list[KComp]
    backward: list[KComp]
    data: dict[str, KData]
    op_profiles: Mapping[str, OpProfile]  # by operation name
    gradient_bytes: int  # of the model's outputs: what the loss hands to the backward
    # Of nodes some of whose operations are not repeated where their data are wanted again: what is done instead.
    restorations: Mapping[SNode, tuple[Restoration, ...]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[KComp]:
        yield from self.forward
        yield from self.backward

    def savers(self) -> dict[str, str]:
        """By the name of a phantom: the operation that saves it."""
        return {phantom.name: op for op, profile in self.op_profiles.items() for phantom in profile.phantoms}

    def saved_by(self, op: DNode) -> tuple[SavedTensor, ...]:
        """What autograd saves for an operation, in packing order."""
        return self.op_profiles[op.name].saved

    def verify(self) -> None:
        """Check that everything read was produced before, and that names are unique."""
        names = Counter(comp.name for comp in self)
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise GraphError(f"two K computations are named {repeated[0]}. Number the stages of an operation.")
        made = {data for data in self.data.values() if not data.producers}  # a block's inputs
        for comp in self.forward:
            for data in comp.deps:
                if data not in made:
                    raise GraphError(f"K computation {comp.name} reads {data.name}, which nothing before it makes.")
            made.update(comp.outputs)
        for comp in self.backward:
            for data in comp.deps:
                if data.kind != "grad" and data not in made:
                    raise GraphError(f"the backward {comp.name} reads {data.name}, which no forward makes.")


def held_storages(graph: KGraph) -> set[str]:
    """Storages alive to the end of the step whatever the plan: outputs, and what outputs without gradient saved.

    No backward comes to the operations that lead to such an output alone: the output's own graph keeps what they saved.
    One may come to those of a loss that is only assumed: room is for both.
    """
    dgraph = graph.sgraph.dgraph
    held = {dgraph.owner(name) for name in dgraph.output_names}
    staged = {comp.op for comp in graph.backward}
    maker = {name: op for op in dgraph for name in op.output_names}
    sure = dgraph.surely_trained
    reached = dgraph.storages_with_gradient(sure)
    waiting = [name for name in dgraph.output_names if name not in sure]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in maker or not dgraph.values[name].requires_grad:
            continue
        seen.add(name)
        op = maker[name]
        is_sure = op.name in staged and not reached.isdisjoint(dgraph.owner(made) for made in op.output_names)
        if not is_sure and op.name in graph.op_profiles:
            held |= {saved.source for saved in graph.op_profiles[op.name].saved if saved.kind is not SavedKind.LEAF}
        waiting += op.call.inputs
    return held
