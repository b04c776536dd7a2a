"""U-Net.

Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation",
arXiv:1505.04597. Differs from the paper in padding its convolutions, so that the output has the size of the
input, and in the BatchNorm after each, as common implementations do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class UNetConfig:
    """`depth` halvings of the resolution; `width` channels at full resolution, doubled at each halving."""

    channels: int = 3
    classes: int = 21
    width: int = 64
    depth: int = 4

    @classmethod
    def demo(cls) -> UNetConfig:
        """A fraction of a second a step on a CPU, five halvings deep."""
        return cls(classes=4, width=16, depth=5)

    @classmethod
    def tiny(cls) -> UNetConfig:
        """Milliseconds a step, for tests."""
        return cls(classes=4, width=8, depth=2)


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3×3 convolutions, each with BatchNorm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Segmentation model: long skip connections keep early activations alive until late in the forward."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        widths = [config.width << level for level in range(config.depth + 1)]
        inputs = [config.channels, *widths[:-1]]
        self.down = nn.ModuleList(double_convolution(*pair) for pair in zip(inputs[:-1], widths[:-1], strict=True))
        self.bottom = double_convolution(widths[-2], widths[-1])
        self.expand = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[:-1])
        self.up = nn.ModuleList(double_convolution(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(config.width, config.classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, channels, height, width] → logits [batch, classes, height, width].

        Height and width must be multiples of 2^depth.
        """
        skips: list[Tensor] = []
        hidden = images
        for down in self.down:
            skips.append(down(hidden))
            hidden = F.max_pool2d(skips[-1], 2)
        hidden = self.bottom(hidden)
        for level in reversed(range(len(skips))):
            hidden = torch.cat([skips.pop(), self.expand[level](hidden)], dim=1)
            hidden = self.up[level](hidden)
        return self.head(hidden)
