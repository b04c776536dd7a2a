"""Vision Transformer: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rockmate.zoo.encoder import SelfAttention, check_heads, feed_forward


@dataclass(frozen=True)
class ViTConfig:
    """The defaults are ViT-B/16 of the paper's table 1. `image` (pixels a side) is a multiple of `patch`."""

    image: int = 224
    patch: int = 16
    layers: int = 12
    width: int = 768
    heads: int = 12
    feed_forward_width: int = 3072
    classes: int = 1000
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_heads("ViTConfig", self.width, self.heads)
        if self.image % self.patch:
            raise ValueError(f"ViTConfig: image {self.image} is not a multiple of patch {self.patch}")

    @classmethod
    def demo(cls) -> ViTConfig:
        """12 layers of a quarter of the width, which is known as ViT-Ti/16: about a second a step on a CPU."""
        return cls(width=192, heads=3, feed_forward_width=768)

    @classmethod
    def tiny(cls) -> ViTConfig:
        """Milliseconds a step, for tests."""
        return cls(image=16, patch=4, layers=2, width=32, heads=4, feed_forward_width=64, classes=10)


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a normalisation and around a residual connection."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=1e-6)
        self.attention = SelfAttention(config.width, config.heads, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.width, eps=1e-6)
        self.feed_forward = feed_forward(config.width, config.feed_forward_width, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] → [batch, time, width]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class ViT(nn.Module):
    """Image classifier: patches as tokens, after one that is learnt and from which the class is read."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (config.image // config.patch) ** 2 + 1, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.final_norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, 3, image, image] → logits [batch, classes]."""
        patches = self.embedding(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(images.size(0), -1, -1), patches], dim=1)
        hidden = self.blocks(self.dropout(tokens + self.positions))
        return self.head(self.final_norm(hidden)[:, 0])
