"""What the CPU's kernels allocate for themselves and free again, of those that take as much as their data.

Fitted to what was measured of them, operation by operation (`benchmarks/estimates.py` tells how well): normalisations
copy what they are given or write twice, and what lies otherwise than a kernel wants it is copied first. Convolutions
and LSTMs have modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rkgb.shapes import losses
from rkgb.shapes.convolutions import brought_into_bytes, convolution_backward_scratch, convolution_scratch
from rkgb.shapes.cpu.bags import embedding_bag_backward_scratch
from rkgb.shapes.cpu.recurrent import lstm_layer_backward_scratch, lstm_layer_scratch
from rkgb.torch_private.operations import (
    attention_of_the_cpu,
    attention_of_the_cpu_backward,
    convolution,
    distances,
    embedding_bag_backward,
    fourier_of_complex,
    fourier_of_numbers,
    fourier_to_numbers,
    lstm_layer,
    lstm_layer_backward,
    safe_softmax,
    softmaxes,
    softmaxes_backward,
)

_aten = torch.ops.aten
_QUERIES_AT_A_TIME = (768, 256), (192, 64), (0, 32)  # from so many rows on
_KEYS_AT_A_TIME = 512
_SUMMED_BYTES = 4
Scratch = Callable[[Sequence[Any], Sequence[torch.Tensor]], int]


def scratch_bytes(function: Any, args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Bytes for one call, which has made these tensors."""
    rule = _RULES.get(function)
    return rule(args, made) if rule is not None else 0


def _scattered_bytes(tensor: torch.Tensor) -> int:
    return brought_into_bytes(torch.contiguous_format, tensor)


def _copy_of_scattered(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    return _scattered_bytes(args[0])


def _copies_of_scattered(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    return _scattered_bytes(args[0]) + _scattered_bytes(args[1])


def _copy_of_factors(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Of those that BLAS does not read as they are: neither rows nor columns lie one number after another."""
    return sum(one.nbytes for one in args if isinstance(one, torch.Tensor) and one.dim() == 2 and not _is_read(one))


def _is_read(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _gradient_once_more(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Where it lies as what it is the gradient of: else it is written element by element."""
    gradient, given = args[:2]
    return int(given.nbytes) if gradient.stride() == given.stride() else 0


def _rows_of_nothing(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Which elements are minus infinity, in which rows all are, and minus infinity itself."""
    given, dim = args[:2]
    count: int = given.numel()
    return count + count // max(1, given.shape[dim]) + given.element_size() if given.dim() else 0


def _attention(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Of each thread: products of a part of the queries with a part of the keys, their sums, and what these come to."""
    query, key = args[:2]
    queries, keys = _parts_of_attention(query, key)
    return torch.get_num_threads() * queries * (keys + 2 + query.shape[-1]) * _SUMMED_BYTES


def _attention_backward(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Gradients are read as tokens, each with its heads."""
    gradient, query, key = args[:3]
    queries, keys = _parts_of_attention(query, key)
    copied_bytes = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return copied_bytes + torch.get_num_threads() * 2 * queries * keys * _SUMMED_BYTES


def _parts_of_attention(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """How many queries and keys its kernels take at a time."""
    rows = query.shape[-2]
    most = next(part for least, part in _QUERIES_AT_A_TIME if rows >= least)
    return min(rows, most), min(_KEYS_AT_A_TIME, key.shape[-2])


def _distances(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Of both sides, points with their squares and ones beside them."""
    return sum(points.nbytes + 2 * points.nbytes // max(1, points.shape[-1]) for points in args[:2])


def _transformed(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Fourier transforms bring the dimension that they go along to the end."""
    given, dims = args[:2]
    return 0 if given.dim() - 1 in [dim % given.dim() for dim in dims] else int(given.nbytes)


def _transformed_back(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """All others first, and then the one that has numbers of one part."""
    return 2 * args[0].nbytes if len(args[1]) > 1 else _transformed(args, made)


def _rows_of_a_mask(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Where it holds, as whole numbers: as many as there are rows of what is taken."""
    return _places_bytes(args[1], made[0]) if made else 0


def _rows_put_by_a_mask(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    return _places_bytes(args[1], args[2])


def _places_bytes(indices: Sequence[Any], rows: torch.Tensor) -> int:
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype is not torch.bool or given[0][0] >= rows.dim():
        return 0
    place, mask = given[0]
    return rows.shape[place] * mask.dim() * torch.int64.itemsize


def _copy_in_other_type(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Of numbers whose sum is of another type."""
    return _as_type(args[0], made[0].dtype) if made else 0


def _copy_in_float(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """The same; means of short types are those of floats, and are floats first."""
    if not made:
        return 0
    dtype = torch.promote_types(made[0].dtype, torch.float32)
    return _as_type(args[0], dtype) + _as_type(made[0], dtype)


def _as_type(given: torch.Tensor, dtype: torch.dtype) -> int:
    return 0 if given.dtype is dtype else given.numel() * dtype.itemsize


def _as_much_as_given(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """A copy to be worked on; and columns begin as memory for as many numbers as their images have."""
    return int(args[0].nbytes)


_RULES: dict[Any, Scratch] = {
    lstm_layer: lstm_layer_scratch,
    lstm_layer_backward: lstm_layer_backward_scratch,
    embedding_bag_backward: embedding_bag_backward_scratch,
    attention_of_the_cpu.default: _attention,
    attention_of_the_cpu_backward.default: _attention_backward,
    distances: _distances,
    fourier_of_numbers: _transformed,
    fourier_of_complex: _transformed,
    fourier_to_numbers: _transformed_back,
    _aten.index.Tensor: _rows_of_a_mask,
    _aten.index_put.default: _rows_put_by_a_mask,
    _aten.index_put_.default: _rows_put_by_a_mask,
    _aten.convolution.default: convolution_scratch,
    convolution: convolution_scratch,
    _aten.convolution_backward.default: convolution_backward_scratch,
    _aten.im2col.default: _as_much_as_given,
    _aten.mm.default: _copy_of_factors,
    _aten.addmm.default: _copy_of_factors,
    _aten.native_batch_norm_backward.default: _gradient_once_more,
    _aten.native_layer_norm.default: _copy_of_scattered,
    _aten.native_layer_norm_backward.default: _copies_of_scattered,
    **dict.fromkeys(softmaxes, _copy_of_scattered),
    **dict.fromkeys(softmaxes_backward, _copies_of_scattered),
    safe_softmax: _rows_of_nothing,
    _aten.sum.default: _copy_in_other_type,
    _aten.sum.dim_IntList: _copy_in_other_type,
    _aten.cumsum.default: _copy_in_other_type,
    _aten.mean.default: _copy_in_float,
    _aten.mean.dim: _copy_in_float,
    _aten.logsumexp.default: _as_much_as_given,
    _aten.median.dim: _as_much_as_given,
    **losses.SCRATCH,
}
