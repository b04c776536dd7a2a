"""GoogLeNet: Szegedy et al., "Going Deeper with Convolutions", arXiv:1409.4842 (table 1).

As everywhere today, a BatchNorm follows each convolution in the place of the local response normalisations, and the
auxiliary classifiers, which that makes needless, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

Widths = tuple[int, int, int, int, int, int]  # of 1×1; before and of 3×3; before and of 5×5; after the pooling


@dataclass(frozen=True)
class GoogLeNetConfig:
    """The defaults are the paper's table 1. A pooling halves the resolution between two `stages`."""

    stem_width: int = 64
    stages: tuple[tuple[Widths, ...], ...] = (
        ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
        (
            (192, 96, 208, 16, 48, 64),
            (160, 112, 224, 24, 64, 64),
            (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64),
            (256, 160, 320, 32, 128, 128),
        ),
        ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    )
    large: int = 5  # side of the larger convolutions; torchvision's model has 3 there
    classes: int = 1000
    dropout: float = 0.4

    @classmethod
    def tiny(cls) -> GoogLeNetConfig:
        """Milliseconds a step, for tests."""
        return cls(8, (((8, 8, 8, 4, 4, 4),), ((8, 8, 16, 4, 8, 8), (8, 8, 16, 4, 8, 8))), classes=10)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias that keeps height and width at stride 1, its normalisation, a ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
        nn.ReLU(inplace=True),
    )


class Inception(nn.Module):
    """Four branches beside each other, whose channels are joined: figure 2b of the paper."""

    def __init__(self, inputs: int, widths: Widths, large: int) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = widths
        self.branches = nn.ModuleList(
            [
                convolution(inputs, one, 1),
                nn.Sequential(convolution(inputs, before_three, 1), convolution(before_three, three, 3)),
                nn.Sequential(convolution(inputs, before_five, 1), convolution(before_five, five, large)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), convolution(inputs, pooled, 1)),
            ]
        )
        self.outputs = one + three + five + pooled

    def forward(self, image: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, outputs, height, width]."""
        return torch.cat([branch(image) for branch in self.branches], dim=1)


class GoogLeNet(nn.Module):
    """Image classifier: a stem, stages of inception modules, a pooling and a linear layer."""

    def __init__(self, config: GoogLeNetConfig) -> None:
        super().__init__()
        width, channels = config.stem_width, 3 * config.stem_width
        self.stem = nn.Sequential(
            convolution(3, width, 7, stride=2),
            nn.MaxPool2d(3, stride=2, padding=1),
            convolution(width, width, 1),
            convolution(width, channels, 3),
        )
        blocks: list[nn.Module] = []
        for stage in config.stages:
            blocks.append(nn.MaxPool2d(3, stride=2, padding=1))
            for widths in stage:
                block = Inception(channels, widths, config.large)
                blocks.append(block)
                channels = block.outputs
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, 3, height, width] → logits [batch, classes]."""
        return self.head(self.dropout(self.blocks(self.stem(images)).mean((2, 3))))
