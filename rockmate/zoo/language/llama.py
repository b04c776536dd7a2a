"""Llama: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv:2302.13971.

A decoder with root mean square normalisation (Zhang, Sennrich, arXiv:1910.07467), rotary positions (Su et al.,
arXiv:2104.09864), gated feed-forwards (Shazeer, arXiv:2002.05202) and heads that share keys and values in groups
(Ainslie et al., arXiv:2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rockmate.zoo.encoder import check_heads


@dataclass(frozen=True)
class LlamaConfig:
    """The defaults are Llama 3 of 8 billion parameters (arXiv:2407.21783, table 3)."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_value_heads: int = 8  # each serves heads / key_value_heads heads
    feed_forward_width: int = 14_336
    context: int = 8192  # longest sequence
    vocabulary: int = 128_256
    rotary_base: float = 500_000.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_heads("LlamaConfig", self.width, 2 * self.heads)
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"LlamaConfig: heads {self.heads} is not a multiple of key_value_heads {self.key_value_heads}"
            )

    @classmethod
    def demo(cls) -> LlamaConfig:
        """12 layers, but narrow: about a second a step on a CPU."""
        return cls(
            layers=12,
            width=256,
            heads=8,
            key_value_heads=2,
            feed_forward_width=704,
            context=256,
            vocabulary=4096,
            rotary_base=10_000.0,
        )

    @classmethod
    def tiny(cls) -> LlamaConfig:
        """Milliseconds a step, for tests."""
        return cls(layers=2, width=32, heads=4, key_value_heads=2, feed_forward_width=64, context=16, vocabulary=64)


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`heads` [batch, heads, time, size], its two halves turned against each other by [time, size / 2] angles."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


class Attention(nn.Module):
    """Causal attention whose queries and keys are turned by their positions."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.key_value_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, config.key_value_heads * self.head_width, bias=False)
        self.projection = nn.Linear(config.width, config.width, bias=False)
        frequencies = config.rotary_base ** -(torch.arange(0, self.head_width, 2) / self.head_width)
        angles = torch.arange(config.context)[:, None] * frequencies
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        batch, time, width = hidden.shape
        query, key, value = (
            layer(hidden).view(batch, time, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        cosines, sines = self.cosines[:time], self.sines[:time]
        query, key = rotated(query, cosines, sines), rotated(key, cosines, sines)
        served = self.config.heads // self.config.key_value_heads
        key, value = key.repeat_interleave(served, dim=1), value.repeat_interleave(served, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, time, width))


class FeedForward(nn.Module):
    """SwiGLU: of two linear layers the one gates the other, a third goes back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.feed_forward_width, bias=False)
        self.expansion = nn.Linear(config.width, config.feed_forward_width, bias=False)
        self.projection = nn.Linear(config.feed_forward_width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        return self.projection(F.silu(self.gate(hidden)) * self.expansion(hidden))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a normalisation and around a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, config.epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Llama(nn.Module):
    """Language model: tokens to logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.final_norm = nn.RMSNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 tokens [batch, time ≤ context] → logits [batch, time, vocabulary] of the next token."""
        return self.head(self.final_norm(self.blocks(self.embedding(tokens))))
