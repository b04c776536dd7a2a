"""Image classifiers: images [batch, 3, height, width] → logits [batch, classes]."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from rockmate.zoo import (
    VGG,
    DenseNet,
    DenseNetConfig,
    GoogLeNet,
    GoogLeNetConfig,
    MobileNetV2,
    MobileNetV2Config,
    ResNet,
    VGGConfig,
)
from rockmate.zoo.vision.resnet import BasicBlock, Bottleneck, ResidualBlock


def resnet18(classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-18; `width` is the number of channels of the first stage."""
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, width)


def resnet34(classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-34."""
    return _resnet(BasicBlock, (3, 4, 6, 3), classes, width)


def resnet50(classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-50."""
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, width)


def resnet101(classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-101."""
    return _resnet(Bottleneck, (3, 4, 23, 3), classes, width)


def resnet152(classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-152."""
    return _resnet(Bottleneck, (3, 8, 36, 3), classes, width)


def vgg16(config: VGGConfig | None = None) -> nn.Sequential:
    """VGG-16, or another of its family."""
    model = VGG(config or VGGConfig())
    return _sequential(features=model.features, pool=model.pool, flatten=nn.Flatten(), head=model.head)


def mobilenet_v2(config: MobileNetV2Config | None = None) -> nn.Sequential:
    """MobileNet-V2, or another of its family."""
    model = MobileNetV2(config or MobileNetV2Config())
    return _sequential(features=model.features, **_pooled(), dropout=model.dropout, head=model.head)


def googlenet(config: GoogLeNetConfig | None = None) -> nn.Sequential:
    """GoogLeNet, or another of its family."""
    model = GoogLeNet(config or GoogLeNetConfig())
    return _sequential(stem=model.stem, blocks=model.blocks, **_pooled(), dropout=model.dropout, head=model.head)


def densenet121(config: DenseNetConfig | None = None) -> nn.Sequential:
    """DenseNet-121, or another of its family."""
    model = DenseNet(config or DenseNetConfig())
    return _sequential(stem=model.stem, blocks=model.blocks, **_pooled(), head=model.head)


def _resnet(block: type[ResidualBlock], depths: Sequence[int], classes: int, width: int) -> nn.Sequential:
    model = ResNet(block, depths, classes, width)
    blocks = nn.Sequential(*model.blocks)
    return _sequential(stem=model.stem, blocks=blocks, **_pooled(), head=model.head)


def _pooled() -> dict[str, nn.Module]:
    """What makes one number of each channel."""
    return {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}


def _sequential(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))
