"""Indices of max pooling: data of their own, with a smaller form.

Max pooling keeps for its backward where in the input each maximum was: an int64 counted through the whole plane, twice
the bytes of a float32 output. Within its window that is a small number, for which a byte or two will do. Recomputation
should have the indices again from these without the input of the pooling, which is the larger part of what there is:
therefore D has an operation that takes the indices over from the pooling, and S a node for them alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rkgb.devices.registry import device_of
from rkgb.ir.call import Call, Ref, ref_names
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.ir.sgraph import SNode
from rkgb.ir.values import ValueInfo
from rkgb.restore.packed_form import LEAST_ELEMENTS, PackedForm

_aten = torch.ops.aten
_DIMENSIONS: Mapping[Any, int] = {
    _aten.max_pool2d_with_indices.default: 2,
    _aten.max_pool3d_with_indices.default: 3,
}
_TAKE_OVER = _aten.alias.default
_DISTANCES = (torch.uint8, torch.int16)


@dataclass(frozen=True, slots=True)
class WindowIndices(PackedForm):
    """Indices of a max pooling on the CPU, as distances from where their windows begin."""

    shape: tuple[int, ...]  # [..., *windows]
    stride: tuple[int, ...]
    sizes: tuple[int, ...]  # of the planes that are pooled
    steps: tuple[int, ...]  # from window to window
    padding: tuple[int, ...]
    dtype: torch.dtype  # of a distance
    # [*windows]: indices of their places, and what is left of these in a distance's bits. No tensors: all that live
    # are counted.
    _begin: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    _begin_left: NDArray[np.integer[Any]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        begin = np.zeros((), np.int64)
        for size, windows, step, padding in zip(
            self.sizes, self.shape[-len(self.sizes) :], self.steps, self.padding, strict=True
        ):
            begin = begin[..., None] * size + (np.arange(windows, dtype=np.int64) * step - padding)
        object.__setattr__(self, "_begin", begin)
        object.__setattr__(self, "_begin_left", begin.astype(str(self.dtype).removeprefix("torch.")))

    @classmethod
    def prepared(cls, graph: DGraph) -> DGraph:
        return _with_indices_apart(graph)

    @classmethod
    def of(cls, graph: DGraph, node: SNode) -> WindowIndices | None:
        return _window_indices(graph, node.ops[0]) if len(node.ops) == 1 else None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the form."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The form of `tensor`, int64 of this shape and stride: of the same shape and stride, and this `dtype`."""
        # Converted, then subtracted, both modulo the range of a distance, which a distance is within. An operation on
        # both types would make a whole int64 tensor on its way, which nobody counts.
        packed = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        return packed.copy_(tensor).sub_(torch.from_numpy(self._begin_left))

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The indices that were packed."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=torch.int64, device="cpu")
        return tensor.copy_(packed).add_(torch.from_numpy(self._begin))


def _with_indices_apart(graph: DGraph) -> DGraph:
    """`graph` with one more operation after each max pooling whose indices have a smaller form.

    It takes them over: they keep their name, and what the pooling itself gives is called otherwise, and is `handed`.
    """
    nodes: list[DNode] = []
    values = dict(graph.values)
    handed = set(graph.handed)
    for node in graph.nodes:
        if _form_of(node, values, graph.varying) is None:
            nodes.append(node)
            continue
        maxima, indices = ref_names(node.outputs)
        given = _new_name(f"{indices}_given", values)
        values[given] = values[indices]  # which says that its storage belongs to the indices
        handed.add(given)
        nodes += [
            replace(node, outputs=[Ref(maxima), Ref(given)]),
            replace(
                node, name=_new_name(f"{node.name}_indices", values), call=Call(_TAKE_OVER, (Ref(given),)),
                outputs=Ref(indices), written=[],
            ),
        ]  # fmt: skip
    return replace(graph, nodes=nodes, values=values, handed=frozenset(handed))


def _window_indices(graph: DGraph, op: DNode) -> WindowIndices | None:
    """The smaller form of the indices that `op` takes over from a pooling; None for other operations."""
    if op.call.function is not _TAKE_OVER or op.call.inputs[0] not in graph.handed:
        return None
    (given,) = op.call.inputs
    pooling = next(node for node in graph.nodes if given in node.output_names)
    return _form_of(pooling, graph.values, graph.varying)


def _form_of(pooling: DNode, values: Mapping[str, ValueInfo], varying: frozenset[str]) -> WindowIndices | None:
    """The form of a pooling's indices; None where there is none, or `pooling` is none."""
    count = _DIMENSIONS.get(pooling.call.function)
    names = ref_names(pooling.outputs)
    if count is None or len(names) != 2 or pooling.is_random or not varying.isdisjoint((*names, *pooling.inputs)):
        return None
    maxima, indices = (values[name] for name in names)
    elements = math.prod(indices.shape)
    is_dense = elements * 8 == indices.storage_bytes and indices.dtype is torch.int64
    if not device_of(indices.device).packs or not maxima.requires_grad or not is_dense or elements < LEAST_ELEMENTS:
        return None
    arguments = _arguments(pooling.call)
    kernel = _each(arguments["kernel_size"], count)
    steps, padding, dilation = (_each(arguments[name], count) for name in ("stride", "padding", "dilation"))
    sizes = values[arguments["self"].name].shape[-count:]
    farthest = 0
    for size, window, apart in zip(sizes, kernel, dilation, strict=True):
        farthest = farthest * size + (window - 1) * apart
    dtype = next((dtype for dtype in _DISTANCES if farthest <= torch.iinfo(dtype).max), None)
    if dtype is None:
        return None
    return WindowIndices(indices.shape, indices.stride, sizes, steps or kernel, padding, dtype)


def _arguments(call: Call) -> dict[str, Any]:
    """All arguments of a pooling by name."""
    pairs = call.schema_pairs()
    return {argument.name: argument.default_value if value is None else value for argument, value in pairs}


def _each(numbers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for each dimension, of which one given stands for all."""
    given = [numbers] if isinstance(numbers, int) else list(numbers)
    return tuple(given * count if len(given) == 1 else given)


def _new_name(name: str, values: Mapping[str, Any]) -> str:
    """`name`, with a number if it is taken."""
    numbered = (f"{name}{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in values)
