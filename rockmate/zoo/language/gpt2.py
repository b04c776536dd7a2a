"""GPT-2, a decoder-only Transformer.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. The layers follow Vaswani et al.,
"Attention Is All You Need", arXiv:1706.03762, with the normalisation moved before each sub-layer and one more
after the last block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BlockRunner = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2. `width` must be a multiple of `heads`."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024  # longest sequence
    vocabulary: int = 50_257
    dropout: float = 0.1  # of embeddings, attention weights and residuals alike
    attention: Literal["explicit", "sdpa"] = "explicit"  # matrices written out, or torch's fused function

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"GPT2Config: width {self.width} is not a multiple of heads {self.heads}")
        if self.attention not in ("explicit", "sdpa"):
            raise ValueError(f'GPT2Config: attention is "explicit" or "sdpa", not {self.attention!r}')

    @classmethod
    def small(cls) -> Self:
        """GPT-2 small, 124 M parameters."""
        return cls()

    @classmethod
    def demo(cls) -> Self:
        """12 layers as in GPT-2 small, but narrow: a training step takes about a second on two CPU cores."""
        return cls(layers=12, width=256, heads=8, context=256, vocabulary=4096)

    @classmethod
    def tiny(cls, attention: Literal["explicit", "sdpa"] = "explicit") -> Self:
        """Milliseconds a step, for tests."""
        return cls(layers=2, width=32, heads=4, context=16, vocabulary=64, attention=attention)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position t sees positions ≤ t."""

    causal_mask: Tensor

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.residual_dropout = nn.Dropout(config.dropout)
        visible = torch.ones(config.context, config.context, dtype=torch.bool).tril()
        self.register_buffer("causal_mask", visible[None, None], persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        batch, time, width = hidden.shape
        query, key, value = (
            part.view(batch, time, self.config.heads, -1).transpose(1, 2)  # [batch, heads, time, width / heads]
            for part in self.qkv(hidden).split(width, dim=-1)
        )
        if self.config.attention == "sdpa":
            dropout = self.config.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
            scores = scores.masked_fill(~self.causal_mask[:, :, :time, :time], float("-inf"))
            mixed = self.attention_dropout(scores.softmax(dim=-1)) @ value
        merged = mixed.transpose(1, 2).reshape(batch, time, width)
        return self.residual_dropout(self.projection(merged))


class FeedForward(nn.Module):
    """Two linear layers with the tanh approximation of GELU between them, as in GPT-2."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.width, 4 * config.width)
        self.activation = nn.GELU(approximate="tanh")
        self.projection = nn.Linear(4 * config.width, config.width)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        return self.residual_dropout(self.projection(self.activation(self.expansion(hidden))))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a normalisation and around a residual connection."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


def run_block(block: nn.Module, hidden: Tensor) -> Tensor:
    """The plain way to run a block; `block_runner` may hold another, such as one that checkpoints."""
    return block(hidden)


class GPT2(nn.Module):
    """Language model: tokens to logits. The output layer shares its weight with the token embedding."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self.block_runner: BlockRunner = run_block
        self.initialise()

    def initialise(self) -> None:
        """Draws the weights as GPT-2 does: normal, with residual projections scaled down by √(2 layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("projection.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers))
            elif "norm" in name:
                nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.01 if "position" in name else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 tokens [batch, time ≤ context] → logits [batch, time, vocabulary] of the next token."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        hidden = self.embedding_dropout(hidden)
        for block in self.blocks:
            hidden = self.block_runner(block, hidden)
        return self.head(self.final_norm(hidden))


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, time, vocabulary] against the tokens that follow [batch, time]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
