"""Dropout masks as bits.

A mask holds two values, 0 and ``1 / (1 - p)``. One bit an element tells it, and to read these bits takes a small part
of the time of drawing the numbers again. On an accelerator drawing is as quick as reading, so that only the CPU's masks
have a form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rkgb.devices.registry import device_of
from rkgb.ir.call import Ref, is_ref
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.sgraph import SNode
from rkgb.restore.packed_form import LEAST_ELEMENTS, PackedForm
from rkgb.tree import leaves

# Elements packed at a time, a byte each, which numpy allocates and no budget counts. Not fewer: PyTorch's threads
# sleep after each chunk, and on a busy machine take long to wake up.
_CHUNK = 1 << 19
_FEW_BYTES = 1 << 15  # unpacked at a time with indices, of four bytes each, that numpy allocates as well
_INDEX = torch.int32

_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty_strided.default, _aten.empty.memory_format)
_DRAW = _aten.bernoulli_.float
_SCALES = (_aten.mul_.Scalar, _aten.div_.Scalar, _aten.mul_.Tensor, _aten.div_.Tensor)
_INTEGERS: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class PackedMask(PackedForm):
    """A dense tensor on the CPU of zeros and one other value, as one bit an element."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype  # of floating point
    low: int  # the bits of the zero, which may be a negative one, as an unsigned integer of the element's size
    high: int  # those of the other value
    elements: int = field(init=False, repr=False, compare=False)
    # [byte, 8]: the bits of the elements that it tells. No tensor: all that live are counted.
    _table: NDArray[np.signedinteger[Any]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        size_bytes = self.dtype.itemsize
        told = np.array([self.low, self.high], f"u{size_bytes}")[bits]
        object.__setattr__(self, "elements", math.prod(self.shape))
        object.__setattr__(self, "_table", told.view(f"i{size_bytes}"))  # few operations take unsigned ones

    @classmethod
    def of(cls, graph: DGraph, node: SNode) -> PackedMask | None:
        return _mask_form(graph, node)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the form."""
        return -(-self.elements // 8)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The form of `tensor`, which has this shape, stride and dtype and no third value: ``uint8[packed_bytes]``."""
        packed = torch.empty(self.packed_bytes, dtype=torch.uint8, device="cpu")
        into, elements = packed.numpy(), tensor.as_strided((self.elements,), (1,))
        truths = np.empty(min(_CHUNK, self.elements), np.bool_)
        shared = torch.from_numpy(truths)
        for start in range(0, self.elements, _CHUNK):
            size = min(_CHUNK, self.elements - start)
            shared[:size].copy_(elements[start : start + size])  # by all threads, as numpy would not
            into[start // 8 : start // 8 + -(-size // 8)] = np.packbits(truths[:size])
        return packed

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The tensor that was packed, bit by bit."""
        # Few calls of PyTorch: between other operations none of its code is in a cache (benchmarks/calls.py).
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        elements = tensor.as_strided((self.elements,), (1,)).view(_INTEGERS[self.dtype.itemsize])
        table, whole = torch.from_numpy(self._table), self.elements // 8
        rows = elements[: 8 * whole].view(whole, 8)
        # Indices lie where the last rows will be: of the rows that are left, most are written, and so on.
        room, row_bytes = rows.view(torch.uint8).view(-1), 8 * self.dtype.itemsize
        start = 0
        while whole - start > _FEW_BYTES:
            size = (whole - start) * row_bytes // (row_bytes + _INDEX.itemsize)
            chosen = room[-size * _INDEX.itemsize :].view(_INDEX)
            chosen.copy_(packed[start : start + size])
            torch.index_select(table, 0, chosen, out=rows[start : start + size])
            start += size
        given = packed.numpy()
        chosen = torch.from_numpy(given[start:whole].astype(np.int32))
        torch.index_select(table, 0, chosen, out=rows[start:])
        if self.elements % 8:
            elements[8 * whole :] = table[given[whole], : self.elements % 8]
        return tensor


def _mask_form(graph: DGraph, node: SNode) -> PackedMask | None:
    """The form of a dropout mask.

    A node makes one if all that it does is to allocate a tensor on the CPU, draw zeros and ones into it, and multiply
    them by numbers.
    """
    if len(node.ops) < 2 or node.ops[0].call.function not in _ALLOCATIONS or node.ops[1].call.function is not _DRAW:
        return None
    owner = node.ops[0].output_names[0]
    value = graph.values[owner]
    elements = math.prod(value.shape)
    suits = device_of(value.device).packs and value.dtype.is_floating_point and value.dtype.itemsize in _INTEGERS
    if not suits or elements < LEAST_ELEMENTS or elements * value.dtype.itemsize != value.storage_bytes:
        return None
    if owner in graph.varying or node.ops[0].inputs or node.ops[1].call.kwargs:
        return None
    if any(not _writes_alone(graph, op, owner) for op in node.ops[1:]):
        return None
    values = torch.tensor([0.0, 1.0], dtype=value.dtype, device="cpu")
    for op in node.ops[2:]:
        factor = op.call.args[1]
        if op.call.function not in _SCALES or op.call.kwargs or not isinstance(factor, int | float):
            return None
        op.call.function(values, factor)
    if values[0] != 0 or values[1] == 0:  # scaled by what is no number, or by so little that nothing is left
        return None
    low, high = values.view(_INTEGERS[value.dtype.itemsize]).tolist()
    mask = (1 << 8 * value.dtype.itemsize) - 1
    return PackedMask(tuple(value.shape), tuple(value.stride), value.dtype, low & mask, high & mask)


def _writes_alone(graph: DGraph, op: DNode, owner: str) -> bool:
    """Whether `op` reads and writes the whole tensor `owner`, and no other one."""
    names = [ref.name for ref in leaves((op.call.args, op.call.kwargs), is_ref)]
    first, whole = op.call.args[0], graph.values[owner]
    same = isinstance(first, Ref) and len(names) == 1 and len(op.output_names) == 1
    if not same or graph.owner(names[0]) != owner or graph.owner(op.output_names[0]) != owner:
        return False
    parts = (graph.values[name] for name in (*names, *op.output_names))
    return all((part.shape, part.stride) == (whole.shape, whole.stride) for part in parts)
