"""What measuring a block tells: times, bytes, saved tensors, backward stages. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice


class SavedKind(enum.Enum):
    """Where a tensor saved for the backward lives."""

    DATA = "data"  # in a storage filled by an S node
    PHANTOM = "phantom"  # in a storage that only the backward sees
    LEAF = "leaf"  # in a parameter, buffer, input or constant


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that autograd saves for an operation, by its place in its storage."""

    kind: SavedKind
    source: str  # owner of the storage: a value's, a phantom's or a leaf's name
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    refillable: bool = True  # False: it cannot be remade from its storage by shape alone

    def renamed(self, rename: Callable[[str], str]) -> SavedTensor:
        """The same tensor of an equivalent block."""
        return replace(self, source=rename(self.source))


@dataclass(frozen=True, slots=True)
class Phantom:
    """A storage that exists only because an operation saved it."""

    name: str
    size_bytes: int


def phantom_name(op: str, number: int) -> str:
    """The name of the storage with this number, from 0, that exists because the operation saves it."""
    return f"{op}.saved{number}"


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One forward operation, measured."""

    time_ms: float
    peak_bytes: int  # most bytes alive above those before it ran, its outputs included
    saved: tuple[SavedTensor, ...]  # in the order in which autograd packs them
    phantoms: tuple[Phantom, ...]


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One step of the backward: consecutive autograd nodes of one operation."""

    op: str
    time_ms: float
    needs: tuple[str, ...]  # owners (values, phantoms) of the saved storages that it reads
    resident_bytes: int  # gradients alive when it reads what was saved
    peak_bytes: int  # most gradients and workspace alive while it runs
    nodes: tuple[str, ...] = ()  # the operation of each of its autograd nodes, in order


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """A block run alone, forward and backward, with everything kept."""

    ops: Mapping[str, OpProfile]
    stages: tuple[StageProfile, ...]  # in the order in which autograd runs them
    parameter_gradient_bytes: Mapping[str, int]  # by leaf name: gradients that stay after the block
    input_gradient_bytes: Mapping[str, int]  # by name: storages of the gradients that it hands to blocks before it
    # By node: time of having its data again in the backward, in the way that is taken (`rkgb.restore`).
    repeat_ms: Mapping[str, float] = field(default_factory=dict)
    # By operation: time of having again what it makes, where there is a way that gives the same bits.
    restore_ms: Mapping[str, float] = field(default_factory=dict)

    def with_times(self, op_ms: Mapping[str, float], node_ms: Sequence[float]) -> BlockProfile:
        """The same with times of the operations, by name, and of the autograd nodes, in order."""
        rest = iter(node_ms)
        return replace(
            self,
            ops={name: replace(op, time_ms=op_ms[name]) for name, op in self.ops.items()},
            stages=tuple(replace(stage, time_ms=sum(islice(rest, len(stage.nodes)))) for stage in self.stages),
        )

    def least_times(self, other: BlockProfile) -> BlockProfile:
        """The same with each time that is less in `other`, of the same block at another moment, taken from there."""
        return replace(
            self,
            ops={name: replace(op, time_ms=min(op.time_ms, other.ops[name].time_ms)) for name, op in self.ops.items()},
            stages=tuple(
                replace(stage, time_ms=min(stage.time_ms, again.time_ms))
                for stage, again in zip(self.stages, other.stages, strict=True)
            ),
            repeat_ms=_least(self.repeat_ms, other.repeat_ms),
            restore_ms=_least(self.restore_ms, other.restore_ms),
        )

    def renamed(self, names: Mapping[str, str]) -> BlockProfile:
        """The profile of an equivalent block, given how names of operations and values correspond."""
        phantoms = {
            phantom.name: phantom_name(names.get(op, op), number)
            for op, profile in self.ops.items()
            for number, phantom in enumerate(profile.phantoms)
        }

        def rename(name: str) -> str:
            return phantoms.get(name) or names.get(name, name)

        return BlockProfile(
            ops={
                rename(name): replace(
                    op,
                    saved=tuple(saved.renamed(rename) for saved in op.saved),
                    phantoms=tuple(Phantom(rename(p.name), p.size_bytes) for p in op.phantoms),
                )
                for name, op in self.ops.items()
            },
            stages=tuple(
                replace(
                    stage,
                    op=rename(stage.op),
                    needs=tuple(map(rename, stage.needs)),
                    nodes=tuple(map(rename, stage.nodes)),
                )
                for stage in self.stages
            ),
            parameter_gradient_bytes={
                rename(name): size_bytes for name, size_bytes in self.parameter_gradient_bytes.items()
            },
            input_gradient_bytes={rename(name): size for name, size in self.input_gradient_bytes.items()},
            repeat_ms={rename(name): time_ms for name, time_ms in self.repeat_ms.items()},
            restore_ms={rename(name): time_ms for name, time_ms in self.restore_ms.items()},
        )


def _least(some_ms: Mapping[str, float], others_ms: Mapping[str, float]) -> dict[str, float]:
    return {**others_ms, **{name: min(time_ms, others_ms.get(name, time_ms)) for name, time_ms in some_ms.items()}}


def backward_stages(profiles: Sequence[BlockProfile]) -> list[StageProfile]:
    """The stages of the whole backward in order, given the profiles of the blocks as the forward runs them."""
    return [stage for profile in reversed(profiles) for stage in profile.stages]
