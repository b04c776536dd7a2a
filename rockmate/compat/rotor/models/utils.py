"""What a Sequential is made of."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ReLUAtEnd(nn.Module):
    """`module`, then a ReLU in the place of what it returned: one layer.

    For Sequentials whose layers are to begin with nothing that works in place. Here any layer may, as what writes in
    place and what made the tensor are planned together anyway.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, data: Tensor) -> Tensor:
        """ReLU(module(data))."""
        return F.relu(self.module(data), inplace=True)
