"""DenseNet: Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", arXiv:1608.06993."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rockmate.zoo.vision.resnet import convolution


@dataclass(frozen=True)
class DenseNetConfig:
    """The defaults are DenseNet-121 of the paper's table 1, with bottlenecks and compression by half (DenseNet-BC)."""

    depths: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32  # channels that each layer adds
    stem_width: int = 64
    classes: int = 1000

    @classmethod
    def tiny(cls) -> DenseNetConfig:
        """Milliseconds a step, for tests."""
        return cls(depths=(2, 3), growth=8, stem_width=16, classes=10)


class DenseLayer(nn.Module):
    """Adds `growth` channels, computed of all channels there are, to them."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        width = 4 * growth
        self.branch = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            convolution(inputs, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            convolution(width, growth, 3),
        )

    def forward(self, image: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, inputs + growth, height, width]."""
        return torch.cat([image, self.branch(image)], dim=1)


class DenseNet(nn.Module):
    """Image classifier: a stem, dense blocks with a narrowing and a pooling between two of them, a linear layer."""

    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__()
        channels = config.stem_width
        self.stem = nn.Sequential(
            convolution(3, channels, 7, stride=2),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        layers: list[nn.Module] = []
        for stage, depth in enumerate(config.depths):
            if stage:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), convolution(channels, channels // 2, 1)]
                layers.append(nn.AvgPool2d(2))
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels, config.growth))
                channels += config.growth
        self.blocks = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.head = nn.Linear(channels, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, 3, height, width] → logits [batch, classes]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))
