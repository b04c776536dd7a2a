"""Which tensors autograd saves for each operation of a block, and in which storages they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.devices.registry import stored_bytes
from rkgb.errors import GraphError
from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.profiles import Phantom, SavedKind, SavedTensor, phantom_name
from rkgb.process.uncompiled import never_compiled
from rkgb.profile.block_run import Observer


class Packed:
    """Stands in the autograd graph for a saved tensor, so that its use is seen."""

    __slots__ = ("source", "tensor")

    def __init__(self, tensor: torch.Tensor, source: str) -> None:
        self.tensor = tensor
        self.source = source


class SavedObserver(Observer):
    """Records saved tensors: to be told of a run of `block` whose saved tensors are packed by `pack`."""

    def __init__(self, graph: DGraph, block: Block) -> None:
        self.graph = graph
        self.block = block
        self.saved: dict[str, list[SavedTensor]] = {}
        self.phantoms: dict[str, list[Phantom]] = {op.name: [] for op in block.ops}
        self._packed: list[Packed] = []
        self._sources: dict[int, tuple[StorageWeakRef, str, SavedKind]] = {}

    @never_compiled  # it is no part of the compiled submodules that save
    def pack(self, tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor.detach(), "")
        self._packed.append(packed)
        return packed

    def unpack(self, packed: Packed) -> torch.Tensor:
        return packed.tensor

    def given(self, leaves: dict[str, torch.Tensor]) -> None:
        for name, tensor in leaves.items():
            owner = self.graph.owner(name)  # of a view that an earlier block made of a leaf: the leaf
            self._know(owner, tensor, SavedKind.LEAF if owner in self.graph.leaves else SavedKind.DATA)

    def before_op(self, op: DNode) -> None:
        self._packed = []

    def after_op(self, op: DNode, values: dict[str, Any]) -> None:
        for name in op.output_names:
            owner = self.graph.owner(name)
            fresh = owner == name
            self._know(owner, values[name], SavedKind.DATA if owner not in self.graph.leaves else SavedKind.LEAF)
            if fresh:
                self._remember(values[name])
        self.saved[op.name] = [self._describe(op, packed) for packed in self._packed]
        self._packed = []

    def _know(self, name: str, tensor: torch.Tensor, kind: SavedKind) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._sources.setdefault(reference.cdata, (reference, name, kind))

    def _remember(self, tensor: torch.Tensor) -> None:
        """Told of each storage that is new and may live on."""

    def _describe(self, op: DNode, packed: Packed) -> SavedTensor:
        tensor = packed.tensor
        if tensor.layout != torch.strided:
            raise GraphError(f"%{op.name} saves a {tensor.layout} tensor: only dense tensors are supported.")
        reference = StorageWeakRef(tensor.untyped_storage())
        known = self._sources.get(reference.cdata)
        if known is None:
            name = phantom_name(op.name, len(self.phantoms[op.name]))
            known = (reference, name, SavedKind.PHANTOM)
            self._sources[reference.cdata] = known
            self.phantoms[op.name].append(Phantom(name, stored_bytes(tensor)))
            self._remember(tensor)
        _, source, kind = known
        packed.source = source if kind is not SavedKind.LEAF else ""
        info = self.graph.values.get(source)
        plain = not tensor.is_conj() and not tensor.is_neg() and (info is None or info.dtype == tensor.dtype)
        return SavedTensor(
            kind, source, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), refillable=plain
        )
