"""What all calls of one generated module share, and under which names a step keeps things."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rkgb.devices.out_of_memory import is_out_of_memory
from rockmate.errors import ReplanWarning

Pack = Callable[[torch.Tensor], torch.Tensor]
Unpack = tuple[Callable[..., Any], tuple[str, ...]]  # what makes values again, and keys of what is kept for it


_TOLD = "told_of_by_rockmate"


class GivesBack(Protocol):
    """Who has what a handle stands for."""

    def run(self, segment: int, /) -> None:
        """Have it there again, with what comes with it."""


class Handle:
    """Stands for one saved tensor. Empty until its segment has run, if it is a forgotten one."""

    __slots__ = ("__weakref__", "packed", "segment", "step", "value", "version")

    value: torch.Tensor | None
    version: int
    packed: Any  # within hooks of the user's: what theirs made of a tensor that is kept
    step: GivesBack  # this and the segment: of tensors that are not there
    segment: int


@dataclass(frozen=True, slots=True)
class ForgottenTensor:
    """Where a forgotten saved tensor comes back from: the segment, and its place in its storage."""

    segment: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class SegmentCode:
    """A segment as the runtime needs it."""

    run: Callable[[Any], None]  # given the step
    is_random: bool
    makes: frozenset[str]  # keys of kept values that it stores
    takes: frozenset[str]  # keys of what is kept that it reads
    repeats: frozenset[str]  # random operations that it repeats
    reads: tuple[str, ...]  # parameters, buffers and inputs that it reads


@dataclass(frozen=True, slots=True)
class SavingOp:
    """An operation some of whose saved tensors are forgotten, or which may come to save others."""

    saved_count: int
    forgotten: dict[int, ForgottenTensor]  # by packing order
    kept: tuple[int, ...] = ()  # places of what is kept for a way to have its outputs again
    is_whole: bool = False  # code of the user's, or compiled, which may save something else in each call
    is_checked: bool = False  # the first call of its sizes: what is forgotten is looked at, too
    unread: frozenset[int] = field(init=False)  # places of forgotten tensors at which no step looks

    def __post_init__(self) -> None:
        unread = frozenset() if self.is_whole or self.is_checked else frozenset(self.forgotten).difference(self.kept)
        object.__setattr__(self, "unread", unread)


@dataclass(slots=True)
class StepTables:
    """What all calls of one generated module share."""

    saving: dict[str, SavingOp]  # by name
    segments: list[SegmentCode]
    generators: dict[str, torch.Generator]  # by device, PyTorch's own, of the operations that are repeated
    places: dict[str, tuple[dict[str, Any], str]]  # where the parameters and buffers that segments read are found
    packs: dict[str, Pack] = field(default_factory=dict)  # by key: what the forward keeps of a value
    unpacks: dict[str, Unpack] = field(default_factory=dict)  # by key
    sizes: Mapping[str, Any] = field(default_factory=dict)  # what code for several sizes looks up
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by value: as code that checks it has it
    # Told where memory runs out in a step; what that raises is the user's.
    on_lack: Callable[[BaseException], None] | None = None
    told: set[str] = field(default_factory=set)  # operations of which `tell_of_others` has told
    makers: dict[str, int] = field(init=False)  # by key of a kept value: the segment that stores it
    takers: dict[str, frozenset[int]] = field(init=False)  # by key of what is kept: the segments that read it
    repeaters: dict[str, frozenset[int]] = field(init=False)  # by random operation: the segments that repeat it

    def __post_init__(self) -> None:
        self.makers = {key: index for index, code in reversed(list(enumerate(self.segments))) for key in code.makes}
        self.takers = _by_name([code.takes for code in self.segments])
        self.repeaters = _by_name([code.repeats for code in self.segments])

    def tell_of_others(self, op: str) -> None:
        """Warn, once, that an operation has saved something else than when it was planned."""
        if op not in self.told:
            self.told.add(op)
            warnings.warn(
                f"%{op} saves other tensors for its backward in some calls than when it was planned: these calls keep "
                "what it saves, and may take more than the budget. They are as eager's. It goes another way by its own "
                "state or data, or torch.compile has compiled it once more.",
                ReplanWarning,
                stacklevel=2,
            )

    def tell_of_lack(self, error: BaseException) -> None:
        """Of an error in a step, if it is that memory ran out."""
        if self.on_lack is not None and is_out_of_memory(error) and not hasattr(error, _TOLD):
            setattr(error, _TOLD, True)  # one segment may run within another
            with contextlib.suppress(Exception):  # the user's error counts
                self.on_lack(error)


def _by_name(names_of: list[frozenset[str]]) -> dict[str, frozenset[int]]:
    """For each name the places of those that have it."""
    found: dict[str, set[int]] = {}
    for index, names in enumerate(names_of):
        for name in names:
            found.setdefault(name, set()).add(index)
    return {name: frozenset(places) for name, places in found.items()}


def saved_key(op: str, place: int) -> str:
    """The name in the step's store of the tensor that the operation `op` saves in that place."""
    return f"{op} saved {place}"
