"""A model of one's own, as the command line takes it."""

import torch
from torch import nn


class Net(nn.Module):
    """A small perceptron."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 8)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = self.dropout(nn.functional.gelu(layer(hidden)))
        return self.head(hidden)


def make(batch=256):
    """Model, sample and loss of a training step."""
    torch.manual_seed(0)
    target = torch.randint(8, (batch,))
    return Net(), torch.randn(batch, 32), lambda output: nn.functional.cross_entropy(output, target)
