"""How a forgotten tensor comes back: what every answer to that has in common. The answers are in `rkgb.restore`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

Statistics = tuple[tuple[int, str], tuple[int, str]]
"""The mean and the inverse deviation among what a batch normalisation saves: the place of each, and its phantom."""


class Restoration(ABC):
    """One way to have again, bit by bit, what an S node fills.

    Instances are frozen dataclasses of plain data, which a file can hold.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Bytes of what `pack` makes, which are kept from the forward to the last time that it is unpacked."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept in the place of `tensor`."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The tensor that was packed, bit by bit."""
