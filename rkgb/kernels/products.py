"""Products of matrices by oneDNN, whichever library PyTorch has them of: `torch.ops.rkgb.product`.

On the CPU PyTorch hands products of float32 to the BLAS library it was built with, and convolutions to oneDNN. Where
that library was not made for the processor, oneDNN takes half of its time. Sums are in another order: results are
rounded otherwise, equal each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rkgb.torch_private.operations import linear_of_onednn

_LIBRARY = torch.library.Library("rkgb", "FRAGMENT")
_LIBRARY.define("product(Tensor input, Tensor other, Tensor? bias=None, bool transposed=False) -> Tensor")


def is_there() -> bool:
    """Whether PyTorch has oneDNN, and may use it."""
    return linear_of_onednn is not None and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def product(input: Tensor, other: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """``input @ other + bias``, or ``input @ other.t() + bias``.

    `input` is of shape (..., K), `other` of (K, N), or (N, K) where it is to be `transposed`, `bias` of (N); all are of
    float32 and on the CPU. Autograd saves `input` and `other`, each where the other one has a gradient.
    """
    if torch.is_grad_enabled():
        result: Tensor = _Product.apply(input, other, bias, transposed)  # type: ignore[no-untyped-call]
        return result
    return _product(input, other if transposed else other.t(), bias)


_LIBRARY.impl("product", product, "CompositeImplicitAutograd")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, other: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.transposed = transposed
        ctx.set_materialize_grads(False)
        for_input, for_other, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input if for_other else None, other if for_input else None)
        ctx.shape = input.shape
        return _product(input, other if transposed else other.t(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None
        input, other = ctx.saved_tensors
        for_input, for_other, for_bias, _ = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_input = of_other = None
        if for_input:
            of_input = product(rows, other, None, not ctx.transposed).view(ctx.shape)
        if for_other:
            given = input.reshape(-1, input.shape[-1])
            of_other = _summed(rows, given) if ctx.transposed else _summed(given, rows)
        return of_input, of_other, rows.sum(0) if for_bias else None, None


def _summed(one: Tensor, other: Tensor) -> Tensor:
    """``one.t() @ other``. oneDNN copies the first of two matrices where it lies transposed; the fewer numbers, the
    better: those of `one`, or those of `other` and the result."""
    (count, rows), columns = one.shape, other.shape[1]
    if count * rows <= (count + rows) * columns:
        return product(one.t(), other)
    return product(other.t(), one).t().contiguous()


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``input @ weight.t() + bias`` for a weight of shape (N, K)."""
    if linear_of_onednn is None or not (input.numel() and weight.numel()):
        return torch.nn.functional.linear(input, weight, bias)
    if not (weight.is_contiguous() or weight.t().is_contiguous()):  # such as one that was expanded
        weight = weight.contiguous()
    return linear_of_onednn(input, weight, bias, "none", [], "")
