"""What a model of the test zoo is: a factory of a module in training mode and the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Factories = dict[str, Callable[[], Model]]

VOCABULARY = 100
PADDING = 0  # the token that fills short sentences


def tokens(*shape: int) -> Tensor:
    """Random tokens, none of which is the padding."""
    return torch.randint(1, VOCABULARY, shape)


def images(batch: int = 2, channels: int = 3, size: int = 32) -> Tensor:
    """Normal noise in the place of images."""
    return torch.randn(batch, channels, size, size)


def padding_mask(*lengths: int, width: int) -> Tensor:
    """One row for each sentence: 1 for its tokens, 0 for what fills it up to `width`."""
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


def padded_tokens(*lengths: int, width: int) -> dict[str, Tensor]:
    """Sentences of those lengths, filled up to `width`, with the mask that says so."""
    mask = padding_mask(*lengths, width=width)
    return {"input_ids": tokens(len(lengths), width) * mask + PADDING * (1 - mask), "attention_mask": mask}


def on(module: nn.Module, *args: Any, **kwargs: Any) -> Model:
    """The module and the arguments with which it is called."""
    return module, args, kwargs
