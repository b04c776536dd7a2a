"""How the data of a step come back in its backward: what every way has in common. The ways are in `rkgb.restore`.

A way is found in a graph (`find`), says what it keeps from the forward to the last time that it is asked
(`kept_bytes`, `saved`), is tried on real values and compared bit by bit (`tried`), is written into the generated
code (`forward_line`, `lines`), and does its work when that code runs (`pack`, `unpack`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.profiles import OpProfile
from rkgb.ir.sgraph import SNode


@dataclass(frozen=True, slots=True)
class Seen:
    """A run of an operation in the forward."""

    op: DNode
    values: Mapping[str, Any]  # what it has read and made, among others
    saved: Sequence[torch.Tensor]  # what autograd saved, in packing order; empty for ways that take nothing of that


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be timed of a way that gave the same bits."""

    again: Callable[[], Any]  # gives the outputs of the operation once more
    keep: Callable[[], Any] | None = None  # what the forward does for it, on the device that computes


class CodeWriter(Protocol):
    """Writes the recomputation that a way is a part of."""

    def argument(self, value: Any) -> str:
        """An argument of a call, as an expression."""

    def repeated(self, op: DNode) -> list[str]:
        """The lines that run an operation again as the forward ran it."""


class Restoration(ABC):
    """One way in which what operations of an S node make comes back, bit by bit.

    Instances are frozen dataclasses of plain data, which a file can hold. They live as long as the graph does, so they
    hold no tensors.
    """

    __slots__ = ()

    of_node: ClassVar[bool] = False
    """Whether it stands for all operations of its node, which are then never repeated; else it is taken where it is
    quicker than they are."""
    rests_on_kernels: ClassVar[bool] = False
    """Whether the bits depend on code that is not ours: then they are compared again wherever a record is believed."""
    holds_arguments: ClassVar[bool] = False
    """Whether numbers among the arguments of its operations are in it: then no call may give others."""
    comes_back: ClassVar[bool] = True
    """Whether the data may be forgotten at all."""

    # ---- where it applies ---------------------------------------------------------------------------------------

    @classmethod
    def prepared(cls, graph: DGraph) -> DGraph:
        """The graph with what this way needs as operations of their own."""
        return graph

    @classmethod
    def find(cls, graph: DGraph, node: SNode, profiles: Mapping[str, OpProfile]) -> Sequence[Restoration]:
        """The ways of this kind for operations of `node`, given profiles by operation."""
        return ()

    def ops(self, node: SNode) -> list[DNode]:
        """The operations of its node that it stands for, in order."""
        return list(node.ops)

    # ---- what it keeps and takes --------------------------------------------------------------------------------

    @property
    def saved(self) -> tuple[tuple[int, str], ...]:
        """Of what autograd saves for its one operation, what it keeps, and gives back: the place, and the phantom."""
        return ()

    @abstractmethod
    def kept_bytes(self, graph: DGraph, node: SNode, sizes_bytes: Mapping[str, int]) -> int:
        """Bytes that are kept from the forward to the last time that it is asked, given those of the node's data."""

    def tried(self, seen: Seen) -> Trial | None:
        """What to time of it on real values; None where it does not give the same bits, or there is nothing to try."""
        return None

    # ---- its code -----------------------------------------------------------------------------------------------

    def reads(self, op: DNode) -> tuple[Any, ...]:
        """Of the arguments of the last of its operations, those that it takes: any values that are there then."""
        return ()

    def key(self, node: SNode) -> str:
        """The name under which generated code asks for it."""
        return node.name

    def forward_line(self, key: str, value: str) -> str | None:
        """What the forward does once it has computed `value`; None for nothing."""
        return None

    @abstractmethod
    def lines(self, op: DNode, key: str, last: bool, code: CodeWriter) -> list[str]:
        """What a recomputation does, for the `last` time or not, in the place of its operations.

        `op` has the outputs of all of them, and as arguments what `reads` told.
        """

    # ---- when it runs -------------------------------------------------------------------------------------------

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """What the forward keeps of `value`."""
        raise NotImplementedError

    def unpack(self, *kept_and_read: Any) -> Any:
        """What is made of what was kept, and of what it reads."""
        raise NotImplementedError
