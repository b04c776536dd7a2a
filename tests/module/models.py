"""Small modules with stated properties. Their activations outweigh their parameters, so that there is a choice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.where import placed, streams_kept

WIDTH = 32
ROWS = 512  # an activation [ROWS, WIDTH] of float32 has 64 KiB


def rows(seed: int = 0, *, requires_grad: bool = False) -> Tensor:
    """A batch [ROWS, WIDTH] that depends on the seed alone."""
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return placed(values).requires_grad_(requires_grad)


def built(make: type[nn.Module], *args, seed: int = 0) -> nn.Module:
    """`make(*args)` with weights that depend on the seed alone, in training mode."""
    with streams_kept():
        torch.manual_seed(seed)
        return placed(make(*args).train())


class Layers(nn.Module):
    """`depth` layers of linear, GELU and dropout around residual connections."""

    def __init__(self, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + self.dropout(F.gelu(layer(hidden)))
        return hidden


class Smooth(nn.Module):
    """Twice differentiable everywhere, without randomness."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * torch.sigmoid(hidden)
        return hidden


class Normalised(nn.Module):
    """Convolutions with batch normalisation, in-place ReLU and pooling: buffers, and storages written twice."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(channels, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.stem(images)), inplace=True)
        for convolution, norm in zip(self.convolutions, self.norms[1:], strict=True):
            hidden = F.relu_(norm(convolution(hidden)) + hidden)
        return self.head(F.avg_pool2d(hidden, 2).mean(dim=(2, 3)))


def images(seed: int = 0) -> Tensor:
    """A batch of images for `Normalised`."""
    return placed(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed)))


class Tied(nn.Module):
    """One weight embeds tokens, mixes them in the middle and reads them out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(torch.relu(self.middle(self.embedding(tokens))), self.embedding.weight))
        return self.head(F.gelu(hidden))


def tokens(seed: int = 0) -> Tensor:
    """Integer inputs for `Tied` and other modules with an embedding."""
    return placed(torch.randint(WIDTH, (ROWS,), generator=torch.Generator().manual_seed(seed)))


class TwoHeads(nn.Module):
    """A shared trunk and two outputs, in a dictionary beside a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Layers(2)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> dict[str, Tensor | int]:
        hidden = self.trunk(hidden)
        left, right = F.gelu(self.left(hidden)).exp(), torch.tanh(self.right(hidden)).exp()
        return {"left": left, "right": right, "width": WIDTH}


class SharedMask(nn.Module):
    """Two outputs that share nothing but a mask, which no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        mask = (hidden * 2).sigmoid() + 1
        left = torch.sigmoid(torch.tanh(self.left(hidden)) * mask).square()
        right = torch.sigmoid(torch.tanh(self.right(hidden)) * mask).square()
        return left, right


class TwoInputs(nn.Module):
    """`first` and `second` meet after an operation that saves neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        hidden = F.gelu(first + second)
        return torch.tanh(F.gelu(self.layer(hidden)) + second)


class SharedNoise(nn.Module):
    """Two outputs that share nothing but random noise, which no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        noise = F.dropout(hidden, 0.5, self.training)
        return torch.tanh(self.left(hidden) * noise).square(), torch.tanh(self.right(hidden) * noise).square()
