"""RegNet: Radosavovic et al., "Designing Network Design Spaces", arXiv:2003.13678 (X blocks, section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rockmate.zoo.vision.resnet import convolution


@dataclass(frozen=True)
class RegNetConfig:
    """The defaults are RegNetX-3.2GF of the paper's table 5. Each width must be a multiple of `group_width`."""

    stem_width: int = 32
    depths: tuple[int, ...] = (2, 6, 15, 2)
    widths: tuple[int, ...] = (96, 192, 432, 1008)
    group_width: int = 48
    classes: int = 1000

    @classmethod
    def tiny(cls) -> RegNetConfig:
        """Milliseconds a step, for tests."""
        return cls(stem_width=8, depths=(1, 2, 3, 1), widths=(8, 16, 24, 32), group_width=8, classes=10)


class XBlock(nn.Module):
    """A grouped 3×3 convolution between two 1×1 of the same width, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, group_width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            convolution(inputs, outputs, 1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, stride, 1, groups=outputs // group_width, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            convolution(outputs, outputs, 1),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, outputs, height / stride, width / stride]."""
        return self.relu(self.branch(image) + self.shortcut(image))


class RegNet(nn.Module):
    """Image classifier: a stem, stages of X blocks of which each first one halves height and width, a head."""

    def __init__(self, config: RegNetConfig) -> None:
        super().__init__()
        for width in config.widths:
            if width % config.group_width:
                raise ValueError(f"RegNetConfig: width {width} is not a multiple of group_width {config.group_width}")
        self.stem = nn.Sequential(
            convolution(3, config.stem_width, 3, stride=2), nn.BatchNorm2d(config.stem_width), nn.ReLU(inplace=True)
        )
        blocks: list[XBlock] = []
        inputs = config.stem_width
        for depth, width in zip(config.depths, config.widths, strict=True):
            for place in range(depth):
                blocks.append(XBlock(inputs, width, 1 if place else 2, config.group_width))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, height, width] → logits [batch, classes]."""
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))
