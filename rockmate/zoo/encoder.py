"""Attention in which every position sees every other one, for models that read a whole sequence.

Vaswani et al., "Attention Is All You Need", arXiv:1706.03762.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Multi-head attention by torch's fused function; `width` is a multiple of `heads`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout  # of the attention weights
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        batch, time, width = hidden.shape
        query, key, value = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)  # [batch, heads, time, width / heads]
            for part in self.qkv(hidden).split(width, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0)
        return self.projection(mixed.transpose(1, 2).reshape(batch, time, width))


def feed_forward(width: int, hidden_width: int, dropout: float) -> nn.Sequential:
    """Two linear layers with a GELU between them."""
    return nn.Sequential(nn.Linear(width, hidden_width), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden_width, width))


def check_heads(name: str, width: int, heads: int) -> None:
    """Raise `ValueError` for a width that cannot be divided among the heads."""
    if width % heads:
        raise ValueError(f"{name}: width {width} is not a multiple of heads {heads}")
