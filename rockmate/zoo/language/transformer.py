"""torch's own `nn.Transformer` as a translation model.

Vaswani et al., "Attention Is All You Need", arXiv:1706.03762.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TransformerConfig:
    """The defaults are the base model of the paper's table 3."""

    layers: int = 6  # of the encoder, and as many of the decoder
    width: int = 512
    heads: int = 8
    feed_forward_width: int = 2048
    context: int = 256
    vocabulary: int = 37_000
    dropout: float = 0.1

    @classmethod
    def tiny(cls) -> TransformerConfig:
        """Milliseconds a step, for tests."""
        return cls(layers=2, width=32, heads=4, feed_forward_width=64, context=16, vocabulary=64)


def sinusoids(length: int, width: int) -> Tensor:
    """Position encodings [length, width] of section 3.5 of the paper; sines first, then cosines."""
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TranslationTransformer(nn.Module):
    """Encoder and decoder: every decoder layer reads the encoder's output, which therefore lives long."""

    positions: Tensor
    causal_mask: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.transformer = nn.Transformer(
            d_model=config.width,
            nhead=config.heads,
            num_encoder_layers=config.layers,
            num_decoder_layers=config.layers,
            dim_feedforward=config.feed_forward_width,
            dropout=config.dropout,
            batch_first=True,
        )
        self.head = nn.Linear(config.width, config.vocabulary)
        hidden_ones = torch.ones(config.context, config.context, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("positions", sinusoids(config.context, config.width), persistent=False)
        self.register_buffer("causal_mask", hidden_ones, persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 tokens [batch, time] of both languages → logits [batch, target time, vocabulary]."""
        time = target.size(1)
        decoded = self.transformer(
            self.embedding(source) + self.positions[: source.size(1)],
            self.embedding(target) + self.positions[:time],
            tgt_mask=self.causal_mask[:time, :time],
        )
        return self.head(decoded)
