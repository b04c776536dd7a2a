"""MobileNet-V2: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", arXiv:1801.04381."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

Stage = tuple[int, int, int, int]  # expansion, channels, blocks, stride of the first: a row of the paper's table 2


@dataclass(frozen=True)
class MobileNetV2Config:
    """The defaults are the paper's table 2."""

    stem_width: int = 32
    stages: tuple[Stage, ...] = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    head_width: int = 1280
    classes: int = 1000
    dropout: float = 0.2

    @classmethod
    def tiny(cls) -> MobileNetV2Config:
        """Milliseconds a step, for tests."""
        return cls(8, ((1, 8, 1, 1), (4, 8, 2, 2), (4, 16, 2, 2)), head_width=32, classes=10)


def normalised(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, its normalisation, and a ReLU that ends at 6."""
    return [
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    ]


class InvertedResidual(nn.Module):
    """1×1 to `expansion` times the channels, 3×3 on each channel alone, 1×1 back without an activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.branch = nn.Sequential(
            *(normalised(inputs, width, 1) if expansion > 1 else []),
            *normalised(width, width, 3, stride, groups=width),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, image: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, outputs, height / stride, width / stride]."""
        return image + self.branch(image) if self.has_shortcut else self.branch(image)


class MobileNetV2(nn.Module):
    """Image classifier: a stem, inverted residuals, a 1×1 convolution, a pooling and a linear layer."""

    def __init__(self, config: MobileNetV2Config) -> None:
        super().__init__()
        channels = config.stem_width
        layers: list[nn.Module] = normalised(3, channels, 3, stride=2)
        for expansion, outputs, depth, stride in config.stages:
            for place in range(depth):
                layers.append(InvertedResidual(channels, outputs, 1 if place else stride, expansion))
                channels = outputs
        layers += normalised(channels, config.head_width, 1)
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.head_width, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, 3, height, width] → logits [batch, classes]."""
        return self.head(self.dropout(self.features(images).mean((2, 3))))
