"""What the zoo's models are trained to do, on data drawn at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rockmate.zoo.entry import Inputs, Task
from rockmate.zoo.language.gpt2 import next_token_loss


def language_task(batch: int, time: int, vocabulary: int) -> Task:
    """Predict each next one of random tokens [batch, time]."""

    def draw(generator: torch.Generator, batch: int) -> tuple[Inputs, Tensor]:
        tokens = torch.randint(vocabulary, (batch, time + 1), generator=generator)
        return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()

    return Task(batch, draw, next_token_loss)


def masked_language_task(batch: int, time: int, vocabulary: int) -> Task:
    """Name the token at each place of random tokens [batch, time], one in seven of them masked by token 0."""

    def draw(generator: torch.Generator, batch: int) -> tuple[Inputs, Tensor]:
        tokens = torch.randint(1, vocabulary, (batch, time), generator=generator)
        masked = torch.rand(batch, time, generator=generator) < 1 / 7
        return (tokens.masked_fill(masked, 0),), tokens

    return Task(batch, draw, next_token_loss)


def translation_task(batch: int, time: int, vocabulary: int) -> Task:
    """Predict each next one of random target tokens [batch, time] from as many source tokens."""

    def draw(generator: torch.Generator, batch: int) -> tuple[Inputs, Tensor]:
        source = torch.randint(vocabulary, (batch, time), generator=generator)
        tokens = torch.randint(vocabulary, (batch, time + 1), generator=generator)
        return (source, tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous()

    return Task(batch, draw, next_token_loss)


def classification_task(batch: int, size: int, classes: int) -> Task:
    """Name the class of random images [batch, 3, size, size]."""

    def draw(generator: torch.Generator, batch: int) -> tuple[Inputs, Tensor]:
        images = torch.randn(batch, 3, size, size, generator=generator)
        return (images,), torch.randint(classes, (batch,), generator=generator)

    return Task(batch, draw, F.cross_entropy)


def segmentation_task(batch: int, size: int | tuple[int, int], classes: int) -> Task:
    """Name the class of each pixel of random images [batch, 3, height, width], or square ones of that size."""
    sides = (size, size) if isinstance(size, int) else size

    def draw(generator: torch.Generator, batch: int) -> tuple[Inputs, Tensor]:
        images = torch.randn(batch, 3, *sides, generator=generator)
        return (images,), torch.randint(classes, (batch, *sides), generator=generator)

    return Task(batch, draw, F.cross_entropy)
