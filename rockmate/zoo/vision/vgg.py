"""VGG: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", arXiv:1409.1556.

Configuration D of table 1, which is VGG-16. As everywhere today, a pooling to 7×7 takes images of any size, and the
normalisation that came later is an option.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class VGGConfig:
    """The defaults are VGG-16. A stage of `depths[i]` convolutions has `width` << min(i, 3) channels."""

    depths: tuple[int, ...] = (2, 2, 3, 3, 3)
    width: int = 64
    head_width: int = 4096  # of the two hidden layers of the head
    pooled: int = 7  # pixels a side that the head reads
    classes: int = 1000
    dropout: float = 0.5
    batch_norm: bool = False

    @classmethod
    def demo(cls) -> VGGConfig:
        """Half as wide, with a head of a tenth of the parameters: about a second a step on a CPU."""
        return cls(width=32, head_width=512)

    @classmethod
    def tiny(cls) -> VGGConfig:
        """Milliseconds a step, for tests."""
        return cls(depths=(1, 2, 2), width=8, head_width=32, pooled=2, classes=10)


class VGG(nn.Module):
    """Image classifier: stages of 3×3 convolutions, each ended by a pooling, and three linear layers."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage, depth in enumerate(config.depths):
            outputs = config.width << min(stage, 3)
            for _ in range(depth):
                layers.append(nn.Conv2d(channels, outputs, 3, padding=1))
                layers += [nn.BatchNorm2d(outputs)] if config.batch_norm else []
                layers.append(nn.ReLU(inplace=True))
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(config.pooled)
        self.head = nn.Sequential(
            nn.Linear(channels * config.pooled**2, config.head_width),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.head_width, config.head_width),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.head_width, config.classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, 3, height, width] → logits [batch, classes]."""
        return self.head(self.pool(self.features(images)).flatten(1))
