"""Modules whose masks or indices are worth a smaller form."""

import torch
from torch import nn

WIDTH = 256
ROWS = 96  # of so many, each mask is 12 KiB of bits


class Dropped(nn.Module):
    """Layers with dropouts that are worth a smaller form, and one that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.narrow = nn.Linear(WIDTH, 8)
        self.dropout, self.other = nn.Dropout(0.1), nn.Dropout(0.3)

    def forward(self, x):
        y = self.dropout(torch.tanh(self.first(x)))
        y = self.other(torch.tanh(self.second(y)) + y)
        return self.other(torch.tanh(self.narrow(self.dropout(self.third(y)))))


def rows():
    return torch.randn(ROWS, WIDTH)


STRIDED = {"kernel_size": 3, "stride": 2, "padding": 1}
DENSE = {"kernel_size": 3, "stride": 1, "padding": 1}


class Pools(nn.Module):
    """Pooling in a row and beside a convolution, as in an Inception block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.MaxPool2d(**STRIDED)
        self.across = nn.MaxPool2d(**DENSE)
        self.beside, self.after = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = self.down(torch.relu(self.stem(x)))
        y = torch.cat([torch.relu(self.after(self.across(y))), torch.relu(self.beside(y))], 1)
        return self.last(self.across(y))


def images():
    return torch.randn(4, 3, 64, 64)


def volumes():
    return nn.Sequential(nn.Conv3d(2, 4, 1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 1), nn.MaxPool3d(2, 1))
