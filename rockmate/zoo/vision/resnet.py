"""ResNet: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", arXiv:1512.03385 (table 1).

As everywhere today, a bottleneck strides in its 3×3 convolution and not in its first 1×1, and the last scale
of each residual branch may start at zero: Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677,
section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

BlockRunner = Callable[[nn.Module, Tensor], Tensor]


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Convolution without bias (a BatchNorm follows), padded such that stride 1 keeps height and width."""
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class ResidualBlock(nn.Module):
    """ReLU(branch(x) + shortcut(x)), in place as in torchvision's models; a subclass builds the branch."""

    expansion: int  # output channels = expansion × width

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.branch = self.build_branch(inputs, width, stride)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def build_branch(self, inputs: int, width: int, stride: int) -> nn.Sequential:
        """The layers beside the shortcut; the last one is a BatchNorm."""
        raise NotImplementedError

    def forward(self, image: Tensor) -> Tensor:
        """[batch, inputs, height, width] → [batch, expansion × width, height / stride, width / stride]."""
        output = self.branch(image)
        output += self.shortcut(image)
        return self.relu(output)


class BasicBlock(ResidualBlock):
    """Two 3×3 convolutions (ResNet-18, ResNet-34)."""

    expansion = 1

    def build_branch(self, inputs: int, width: int, stride: int) -> nn.Sequential:
        """3×3, 3×3."""
        return nn.Sequential(
            convolution(inputs, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            convolution(width, width, 3),
            nn.BatchNorm2d(width),
        )


class Bottleneck(ResidualBlock):
    """A 3×3 convolution between two 1×1 that narrow and widen (ResNet-50 and deeper)."""

    expansion = 4

    def build_branch(self, inputs: int, width: int, stride: int) -> nn.Sequential:
        """1×1 to `width` channels, 3×3, 1×1 to four times as many."""
        outputs = self.expansion * width
        return nn.Sequential(
            convolution(inputs, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            convolution(width, width, 3, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            convolution(width, outputs, 1),
            nn.BatchNorm2d(outputs),
        )


def run_block(block: nn.Module, image: Tensor) -> Tensor:
    """The plain way to run a block; `block_runner` may hold another, such as one that checkpoints."""
    return block(image)


class ResNet(nn.Module):
    """Image classifier: a stem, four stages of residual blocks with halving resolution, and a linear layer.

    `depths` counts the blocks of each stage, `width` is the number of channels of the first.
    """

    def __init__(
        self,
        block: type[ResidualBlock],
        depths: Sequence[int],
        classes: int = 1000,
        width: int = 64,
        zero_initialise_residual: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(3, width, 7, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[ResidualBlock] = []
        inputs = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(inputs, width << stage, stride))
                inputs = block.expansion * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)
        self.block_runner: BlockRunner = run_block
        self.initialise(zero_initialise_residual)

    def initialise(self, zero_residual: bool) -> None:
        """He initialisation of the convolutions; with `zero_residual` each block starts as its shortcut."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, ResidualBlock) and zero_residual:
                last = module.branch[-1]
                assert isinstance(last, nn.BatchNorm2d)
                nn.init.zeros_(last.weight)

    def forward(self, images: Tensor) -> Tensor:
        """images [batch, 3, height, width] → logits [batch, classes]."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = self.block_runner(block, hidden)
        return self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


def resnet18(classes: int = 1000, width: int = 64, zero_initialise_residual: bool = False) -> ResNet:
    """ResNet-18: 11.7 M parameters at the default sizes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, width, zero_initialise_residual)


def resnet50(classes: int = 1000, width: int = 64, zero_initialise_residual: bool = False) -> ResNet:
    """ResNet-50: 25.6 M parameters at the default sizes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, width, zero_initialise_residual)


def resnet101(classes: int = 1000, width: int = 64, zero_initialise_residual: bool = False) -> ResNet:
    """ResNet-101: 44.5 M parameters at the default sizes."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes, width, zero_initialise_residual)
