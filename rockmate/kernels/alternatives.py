"""For which operations PyTorch has another kernel than the one that it picks, and how that is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rkgb import DGraph, DNode
from rkgb.devices.registry import device_of
from rkgb.ir.call import Call, Ref
from rkgb.ir.values import ValueInfo
from rkgb.kernels.products import is_there
from rkgb.torch_private.operations import convolution
from rockmate.kernels.alternative import Alternative, given, replaced
from rockmate.kernels.attentions import attentions, is_attention

_aten = torch.ops.aten
_product = torch.ops.rkgb.product.default

_CONVOLUTIONS = frozenset({convolution, _aten.conv2d.default, _aten.convolution.default})
_BATCH_BY_ONEDNN = 16  # from which on PyTorch has oneDNN for all convolutions, as it has with several threads


def alternatives_of(graph: DGraph, op: DNode) -> tuple[Alternative, ...]:
    """The operation by each other kernel that gives the same but for rounding."""
    read = [graph.values[name] for name in op.inputs]
    if not read:
        return ()
    if is_attention(op):
        return attentions(graph, op)
    of_host = all(device_of(info.device).is_host and info.dtype is torch.float32 for info in read)
    other = _by_onednn(op.call, graph.values) if of_host and is_there() else None
    return () if other is None else (other,)


def _by_onednn(call: Call, values: Mapping[str, ValueInfo]) -> Alternative | None:
    if call.function in _CONVOLUTIONS:
        return _pointwise(call, values)
    make = _PRODUCTS.get(call.function)
    other = None if make is None else make(call, values)
    if other is None:
        return None
    # None of its arguments is a number that comes of sizes.
    return Alternative("products by oneDNN", replace(other, sizes=None if call.sizes is None else {}))


# ---- products --------------------------------------------------------------------------------------------


def _linear(call: Call, values: Mapping[str, ValueInfo]) -> Call | None:
    input, weight, bias = given(call, "input", "weight", "bias")
    if not _is_matrix_of(values, input, weight):
        return None
    return Call(_product, (input, weight, bias, True))


def _addmm(call: Call, values: Mapping[str, ValueInfo]) -> Call | None:
    bias, input, other, beta, alpha = given(call, "self", "mat1", "mat2", "beta", "alpha")
    one = all(number is None or number == 1 for number in (beta, alpha))
    if not one or not _is_matrix_of(values, input, other) or len(values[bias.name].shape) != 1:
        return None
    if values[bias.name].shape != values[other.name].shape[1:]:  # one number that is added to all
        return None
    return Call(_product, (input, other, bias, False))


def _mm(call: Call, values: Mapping[str, ValueInfo]) -> Call | None:
    input, other = call.args[:2] if len(call.args) == 2 else (None, None)
    return Call(_product, (input, other, None, False)) if _is_matrix_of(values, input, other) else None


_PRODUCTS: Mapping[Any, Callable[[Call, Mapping[str, ValueInfo]], Call | None]] = {
    _aten.linear.default: _linear,
    _aten.addmm.default: _addmm,
    _aten.mm.default: _mm,
    _aten.matmul.default: _mm,
}


def _is_matrix_of(values: Mapping[str, ValueInfo], input: Any, other: Any) -> bool:
    """Whether rows of `input` are multiplied by a matrix `other`."""
    if not (isinstance(input, Ref) and isinstance(other, Ref)):
        return False
    return len(values[input.name].shape) >= 2 and len(values[other.name].shape) == 2


# ---- convolutions ----------------------------------------------------------------------------------------


def _pointwise(call: Call, values: Mapping[str, ValueInfo]) -> Alternative | None:
    """A convolution of single points, by oneDNN.

    With one thread and a small batch PyTorch computes these by products of its BLAS library, but not where points are
    apart by a `dilation`, of which a kernel of one point has no use: that changes nothing but the kernel that it picks.
    """
    input, weight, stride, dilation, transposed = given(call, "input", "weight", "stride", "dilation", "transposed")
    if not (isinstance(input, Ref) and isinstance(weight, Ref)):
        return None
    sizes, batch = values[weight.name].shape, values[input.name].shape
    places = len(sizes) - 2
    ones = all(size == 1 for size in sizes[2:]) and _are_ones(stride) and _are_ones(dilation)
    if len(batch) != len(sizes) or places < 2 or not ones or transposed:
        return None
    apart = replaced(call, "dilation", [2] * places)
    is_picked = torch.get_num_threads() > 1 or batch[0] >= _BATCH_BY_ONEDNN
    return None if apart is None else Alternative("convolutions of single points by oneDNN", apart, is_picked)


def _are_ones(numbers: Any) -> bool:
    return numbers is None or all(number == 1 for number in numbers)
