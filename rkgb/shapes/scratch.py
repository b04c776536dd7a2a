"""What the CPU's kernels allocate for themselves and free again, of those that take as much as their data.

Fitted to what was measured of them, operation by operation (`benchmarks/estimates.py` tells how well): oneDNN copies
what it convolves into blocked layouts, and normalisations copy what they are given or write twice. Other processors
may choose other layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rkgb.torch_private.operations import convolution

_aten = torch.ops.aten
_FEW_CHANNELS = 4
Scratch = Callable[[Sequence[Any], Sequence[torch.Tensor]], int]


def scratch_bytes(function: Any, args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Bytes for one call, which has made these tensors."""
    rule = _RULES.get(function)
    return rule(args, made) if rule is not None else 0


def _is_plain_product(weight: torch.Tensor, stride: Sequence[int], groups: int) -> bool:
    """A convolution that is a product of matrices, which needs no other layout."""
    return weight.shape[2:].numel() == 1 and all(step == 1 for step in stride) and groups == 1


def _convolution(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    given, weight, _, stride, _, _, is_transposed, _, groups = args[:9]
    if _is_plain_product(weight, stride, groups):
        return 0
    out = made[0].nbytes
    if is_transposed:
        return int(max(2 * out, weight.nbytes + out))
    return int(max(_copied_bytes(given) + weight.nbytes, out))


def _convolution_backward(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    gradient, given, weight, _, stride, _, _, is_transposed, _, groups = args[:10]
    if _is_plain_product(weight, stride, groups):
        return 0
    if is_transposed:
        return int(max(2 * gradient.nbytes + given.nbytes, weight.nbytes + gradient.nbytes))
    return int(max(weight.nbytes, _copied_bytes(given) + gradient.nbytes))


def _copied_bytes(images: torch.Tensor) -> int:
    """Those of few channels are read as they are."""
    return images.nbytes if images.shape[1] > _FEW_CHANNELS else 0


def _copy_of_scattered(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    return 0 if args[0].is_contiguous() else args[0].nbytes


def _copy_of_scattered_input(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    return 0 if args[1].is_contiguous() else args[1].nbytes


def _gradient_once_more(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    return int(args[1].nbytes)


_RULES: dict[Any, Scratch] = {
    _aten.convolution.default: _convolution,
    convolution: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_batch_norm_backward.default: _gradient_once_more,
    _aten.native_layer_norm.default: _copy_of_scattered,
    _aten.native_layer_norm_backward.default: _copy_of_scattered_input,
}
