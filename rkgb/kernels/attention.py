"""Attention by the kernel that is asked for: `torch.ops.rkgb.attention`.

`scaled_dot_product_attention` picks one of several by rules. Flags that switch kernels off are those of the whole
process, other threads' too; here each is called by itself. Which there are is told by `torch.nn.attention.SDPBackend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda

from rkgb.torch_private.operations import (
    attention_of_accelerators,
    attention_of_cudnn,
    attention_of_the_cpu,
    attention_written_out,
    flash_attention,
)

_LIBRARY = torch.library.Library("rkgb", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale, "
    "bool enable_gqa, str kernel) -> Tensor"
)

IS_ON: Mapping[str, Callable[[], bool]] = {
    "flash": cuda.flash_sdp_enabled,
    "flash of the CPU": cuda.flash_sdp_enabled,
    "memory-efficient": cuda.mem_efficient_sdp_enabled,
    "cuDNN": cuda.cudnn_sdp_enabled,
    "written out": cuda.math_sdp_enabled,
}
"""By kernel: whether the user lets PyTorch have it."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kernel: str,
) -> Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` gives of these arguments, without dropout.

    `query` is of shape (N, H, L, E), `key` of (N, H, S, E), `value` of (N, H, S, Ev), and `attn_mask` of one that is
    broadcast to (N, H, L, S). `kernel` is one of `IS_ON`. Raises what PyTorch raises where that cannot have them.
    """
    saves = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    given = (query, key, value)
    mask = None if attn_mask is None else _added(attn_mask, query)
    made: Any
    if kernel == "written out":
        made = attention_written_out(*given, mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa)
        return _as_fused(made[0])
    if kernel == "flash of the CPU":
        made = attention_of_the_cpu(*given, 0.0, is_causal, attn_mask=mask, scale=scale)
        return made[0]
    if kernel == "flash":
        if mask is not None:
            raise ValueError("flash attention takes no mask")
        made = flash_attention(*given, 0.0, is_causal, False, scale=scale)
        return made[0]
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    if kernel == "memory-efficient":
        made = attention_of_accelerators(*given, mask, saves, 0.0, is_causal, scale=scale)
    elif kernel == "cuDNN":
        made = attention_of_cudnn(*given, mask, saves, 0.0, is_causal, False, scale=scale)
    else:
        raise ValueError(f"no kernel of attention is named {kernel!r}; there are {', '.join(IS_ON)}")
    return made[0]


_LIBRARY.impl("attention", attention, "CompositeImplicitAutograd")


def _as_fused(output: Tensor) -> Tensor:
    """The same in the strides of what fused kernels give: the heads of a row are beside each other."""
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """A mask as numbers to be added: kernels take truths for numbers."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
