"""BERT: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", arXiv:1810.04805.

The encoder with the head that names masked tokens; without the prediction of the next sentence, and so without the
embedding that tells two sentences apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rockmate.zoo.encoder import SelfAttention, check_heads, feed_forward


@dataclass(frozen=True)
class BERTConfig:
    """The defaults are the base model of the paper."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    feed_forward_width: int = 3072
    context: int = 512  # longest sequence
    vocabulary: int = 30_522
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_heads("BERTConfig", self.width, self.heads)

    @classmethod
    def demo(cls) -> BERTConfig:
        """12 layers, but narrow: about a second a step on a CPU."""
        return cls(width=256, heads=8, feed_forward_width=1024, context=256, vocabulary=4096)

    @classmethod
    def tiny(cls) -> BERTConfig:
        """Milliseconds a step, for tests."""
        return cls(layers=2, width=32, heads=4, feed_forward_width=64, context=16, vocabulary=64)


class Layer(nn.Module):
    """Attention and feed-forward, each around a residual connection and before a normalisation."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.width, config.heads, config.dropout)
        self.attention_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.feed_forward = feed_forward(config.width, config.feed_forward_width, 0.0)
        self.feed_forward_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden)))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


class BERT(nn.Module):
    """Masked language model: tokens to logits. The output layer shares its weight with the token embedding."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.embedding_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.transform = nn.Sequential(
            nn.Linear(config.width, config.width), nn.GELU(), nn.LayerNorm(config.width, eps=1e-12)
        )
        self.head = nn.Linear(config.width, config.vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 tokens [batch, time ≤ context] → logits [batch, time, vocabulary] of the token at each place."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.transform(self.layers(self.dropout(self.embedding_norm(hidden)))))
