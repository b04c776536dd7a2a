"""Operations whose shapes PyTorch does not tell without data, or otherwise than the machine has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rkgb.torch_private.operations import all_true, any_true, ctc_loss, ctc_loss_backward

_aten = torch.ops.aten
Call = Callable[..., Any]


def _batch_norm(given: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The CPU's gives dense images where it was given others, but for channels_last."""
    made = _aten.native_batch_norm.default(given, *args, **kwargs)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_kept = given.dim() in formats and given.is_contiguous(memory_format=formats[given.dim()])
    if given.is_contiguous() or is_kept:
        return made
    return (torch.empty(given.shape, dtype=made[0].dtype, device=given.device), *made[1:])


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any) -> Any:
    """The loss of each row, and the logarithms of its paths: at most as long as all of its targets."""
    rows = log_probs.shape[1]
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // max(1, rows))
    if not isinstance(target_lengths, Tensor):
        longest = max(target_lengths, default=0)
    return log_probs.new_empty(rows), log_probs.new_empty(rows, log_probs.shape[0], 2 * longest + 1)


def _ctc_loss_backward(gradient: Tensor, log_probs: Tensor, *_: Any, **__: Any) -> Any:
    return torch.empty_like(log_probs)


def _holds(_: Tensor) -> Tensor:
    """What a forward makes sure of is taken to be so."""
    return torch.ones((), dtype=torch.bool, device="cpu")


def _holds_nowhere(_: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device="cpu")


KERNELS: Mapping[Any, Call] = {
    ctc_loss.default: _ctc_loss,
    ctc_loss.Tensor: _ctc_loss,
    ctc_loss_backward.default: _ctc_loss_backward,
    ctc_loss_backward.Tensor: _ctc_loss_backward,
    all_true: _holds,
    any_true: _holds_nowhere,
}
"""By operation: what is called in its place."""

CPU_KERNELS: Mapping[Any, Call] = {_aten.native_batch_norm.default: _batch_norm}
"""Those of the CPU."""
