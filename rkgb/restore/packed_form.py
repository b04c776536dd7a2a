"""What a node fills, kept as fewer bytes without loss until it is wanted again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch

from rkgb.devices.registry import host
from rkgb.errors import GraphError
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.profiles import OpProfile
from rkgb.ir.restoration import CodeWriter, Restoration, Seen, Trial
from rkgb.ir.sgraph import SNode

LEAST_ELEMENTS = 16384  # of a tensor worth a form: fewer are made again in less than 0.1 ms


class PackedForm(Restoration):
    """A form of the tensor that a node fills: another tensor, on the CPU, of always as many bytes."""

    __slots__ = ()

    of_node: ClassVar[bool] = True
    holds_arguments: ClassVar[bool] = True

    @classmethod
    def find(cls, graph: DGraph, node: SNode, profiles: Mapping[str, OpProfile]) -> Sequence[Restoration]:
        form = cls.of(graph, node)
        return [] if form is None else [form]

    @classmethod
    @abstractmethod
    def of(cls, graph: DGraph, node: SNode) -> PackedForm | None:
        """The form of what `node` fills; None where it has none of this kind."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Bytes of the form."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The form of `tensor`."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The tensor that was packed, bit by bit."""

    def kept_bytes(self, graph: DGraph, node: SNode, sizes_bytes: Mapping[str, int]) -> int:
        return host().allocated_bytes(self.packed_bytes)

    def tried(self, seen: Seen) -> Trial:
        tensor = seen.values[seen.op.output_names[0]].detach()
        packed = self.pack(tensor)
        again = partial(self.unpack, packed)
        if not torch.equal(again(), tensor):
            raise GraphError(f"the form that stands for what {seen.op.name} makes does not give it back.")
        return Trial(again, partial(self.pack, tensor))

    def key(self, node: SNode) -> str:
        return f"{node.name} packed"

    def forward_line(self, key: str, value: str) -> str:
        return f"step.pack({key!r}, {value})"

    def lines(self, op: DNode, key: str, last: bool, code: CodeWriter) -> list[str]:
        return [f"{' = '.join(op.output_names)} = step.unpack({key!r}, last={last})"]
