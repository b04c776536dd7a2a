"""MLP-Mixer: Tolstikhin et al., "MLP-Mixer: An all-MLP Architecture for Vision", arXiv:2105.01601."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class MixerConfig:
    """The defaults are Mixer-B/16 of table 1. `image` (pixels a side) must be a multiple of `patch`."""

    image: int = 224
    patch: int = 16
    width: int = 768
    token_width: int = 384  # hidden width of the MLP across patches
    channel_width: int = 3072  # hidden width of the MLP across channels
    layers: int = 12
    classes: int = 1000

    @classmethod
    def demo(cls) -> MixerConfig:
        """About a second a step on a CPU; half of Mixer-B/16 in every width."""
        return cls(width=384, token_width=192, channel_width=1536)

    @classmethod
    def tiny(cls) -> MixerConfig:
        """Milliseconds a step, for tests."""
        return cls(image=16, patch=4, width=32, token_width=16, channel_width=64, layers=3, classes=10)


def multilayer_perceptron(width: int, hidden: int) -> nn.Sequential:
    """width → hidden → width along the last dimension."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class MixerBlock(nn.Module):
    """Mixes along the patches, then along the channels, each around a residual connection."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        patches = (config.image // config.patch) ** 2
        self.token_norm = nn.LayerNorm(config.width)
        self.token_mixing = multilayer_perceptron(patches, config.token_width)
        self.channel_norm = nn.LayerNorm(config.width)
        self.channel_mixing = multilayer_perceptron(config.width, config.channel_width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, patches, width] → [batch, patches, width]."""
        hidden = hidden + self.token_mixing(self.token_norm(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.channel_mixing(self.channel_norm(hidden))


class Mixer(nn.Module):
    """Image classifier made of linear layers alone."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        if config.image % config.patch:
            raise ValueError(f"MixerConfig: image {config.image} is not a multiple of patch {config.patch}")
        self.embedding = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.blocks = nn.Sequential(*(MixerBlock(config) for _ in range(config.layers)))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, 3, image, image] → logits [batch, classes]."""
        patches = self.embedding(images).flatten(2).transpose(1, 2)
        return self.head(self.final_norm(self.blocks(patches)).mean(dim=1))
