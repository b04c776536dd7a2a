"""Fused kernels that a machine takes where PyTorch, without data, tells of their parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout

from rkgb.torch_private.operations import attention_of_accelerators, attention_of_the_cpu

_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Attention(NamedTuple):
    """The arguments of `scaled_dot_product_attention`, by the names that they have there."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def fused(self, is_accelerator: bool) -> torch.Tensor | None:
        """What the fused kernel makes that PyTorch would choose; None where it would take none.

        Each keeps the output and a logarithm for each row. Which of an accelerator's kernels it is makes no difference.
        """
        query, key, value, mask = self.query, self.key, self.value, self.attn_mask
        # While `torch.jit.trace` records, sizes are tensors: plain numbers are compared.
        shapes = [tuple(map(int, tensor.shape)) for tensor in (query, key, value)]
        queries, keys, values = shapes
        if not query.is_meta or {(len(shape), shape[-1]) for shape in shapes} != {(4, queries[-1])} or keys != values:
            return None
        if query.dtype not in _TYPES or (mask is not None and mask.requires_grad):
            return None
        if queries[1] != keys[1] and self.enable_gqa:
            if is_accelerator:
                key, value = (tensor.repeat_interleave(queries[1] // keys[1], 1) for tensor in (key, value))
        elif queries[:2] != keys[:2]:
            return None
        if mask is not None:
            mask = _additive(mask, query.dtype)
        if is_accelerator:
            bias = None if mask is None else mask.expand(*queries[:-1], keys[-2])
            given = (query, key, value, bias, torch.is_grad_enabled(), self.dropout_p, self.is_causal)
            made: Any = attention_of_accelerators(*given, scale=self.scale)
        elif self.dropout_p > 0:
            return None
        else:
            options = {"attn_mask": mask, "scale": self.scale}
            made = attention_of_the_cpu(query, key, value, self.dropout_p, self.is_causal, **options)
        first: torch.Tensor = made[0]
        return first


_CHOOSING = threading.RLock()


@contextlib.contextmanager
def attention_chosen(is_accelerator: bool) -> Iterator[None]:
    """Context in which functions of `torch.nn.functional` find the fused kernel of this machine, without data.

    What they call among each other is not told to modes.
    """
    with _CHOOSING:
        plain = torch.nn.functional.scaled_dot_product_attention

        def chosen(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = Attention(*args, **kwargs).fused(is_accelerator)
            return plain(*args, **kwargs) if made is None else made

        torch.nn.functional.scaled_dot_product_attention = chosen
        try:
            yield
        finally:
            torch.nn.functional.scaled_dot_product_attention = plain


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of truths as numbers to be added, as PyTorch makes it."""
    if mask.dtype is not torch.bool:
        return mask
    kept, masked = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, float("-inf")))
    return torch.where(mask, kept, masked)


def fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Accelerators keep a mask of one byte an element, where the CPU keeps one as large as the data."""
    if not training or inplace or not 0 < p < 1:
        return dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
