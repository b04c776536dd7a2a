"""Tensors as autograd saw them in the forward, for operations that are repeated for the sake of what it saves."""

from __future__ import annotations

from typing import Any

import torch


def as_leaf(value: torch.Tensor) -> torch.Tensor:
    """`value` as one that requires a gradient: a leaf with its storage, which an operation may read."""
    return value.detach().requires_grad_()


def as_nonleaf(value: torch.Tensor) -> torch.Tensor:
    """`value` as one that was computed and requires a gradient, with its storage: an operation may write into it.

    Autograd lets nothing write into a leaf that requires a gradient, nor into a view of one.
    """
    made: torch.Tensor = _Computed.apply(torch.empty(0, device="cpu", requires_grad=True), [value.detach()])  # type: ignore[no-untyped-call]
    return made


class _Computed(torch.autograd.Function):
    """Gives a tensor that autograd knows as no input: the output is no view, as that of an identity would be."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        return given.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("what is repeated for what autograd saves has no backward")
