"""Autograd's own threads: what they hold when a backward has ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class _Nothing(torch.autograd.Function):
    """An operation whose backward gives nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


def await_backwards(device: torch.device) -> None:
    """Return once autograd's thread for `device`, an accelerator, has let go of the backwards that have ended.

    Whoever called a backward that fails has its error while that thread still holds the graph, gradients that waited
    for others, and frames of Python that were met. It lets go of them before it turns to another operation, and turns
    to those that are left first, the latest made of them first: so to one that a new thread makes as its first, last.
    Nothing is allocated for that.
    """
    with ThreadPoolExecutor(1) as thread:
        output, gradient = thread.submit(_first_operation, device).result()
    torch.autograd.backward(output, gradient)


def _first_operation(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    empty = torch.empty(0, device=device)
    output: torch.Tensor = _Nothing.apply(empty.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return output, empty
