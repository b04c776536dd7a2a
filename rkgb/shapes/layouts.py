"""How images lie that convolutions make."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rkgb.torch_private.operations import suggested_format

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def format_of_images(
    given: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], groups: int, is_accelerator: bool
) -> torch.memory_format:
    """How a convolution has its images, and what it multiplies them with: as it is given either, in channels_last.

    That is the choice of oneDNN and of cuDNN. What the CPU's own kernels compute, they have so in two dimensions alone.
    """
    is_own = given.dtype == torch.float64 or (not is_accelerator and is_plain_product(weight, stride, groups))
    if is_own and (is_accelerator or given.dim() != 4):
        return torch.contiguous_format
    wanted = CHANNELS_LAST.get(given.dim(), torch.contiguous_format)
    return wanted if wanted in (suggested_format(given), suggested_format(weight)) else torch.contiguous_format


def is_plain_product(weight: torch.Tensor, stride: Sequence[int], groups: int) -> bool:
    """Whether a convolution is one product of matrices, which needs no other layout."""
    return weight.shape[2:].numel() == 1 and all(step == 1 for step in stride) and groups == 1
