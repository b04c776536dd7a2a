"""What the zoo hands out: a model with everything that a training step needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]  # positional arguments of a model


@dataclass(frozen=True)
class Task:
    """The data side of an entry: random batches of fixed shapes, and what the output is compared with.

    `draw(generator, batch)` returns (inputs, target) of as many examples, on the CPU; `criterion(output, target)`
    returns a scalar.
    """

    batch: int  # examples in a batch, unless told otherwise
    draw: Callable[[torch.Generator, int], tuple[Inputs, Tensor]]
    criterion: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ZooEntry:
    """A model in training mode, with a sample and a loss. Everything is fixed by the name and the seed."""

    name: str
    model: nn.Module
    sample: Inputs  # positional arguments: `model(*entry.sample)`
    target: Tensor  # what the output for `sample` is compared with
    criterion: Callable[[Tensor, Tensor], Tensor]  # (output, target) → scalar
    make_batch: Callable[[int], tuple[Inputs, Tensor]]  # seed → (inputs, target), shaped as `sample` and `target`

    def loss(self, output: Tensor) -> Tensor:
        """Scalar loss of the output for `sample`."""
        return self.criterion(output, self.target)


def build_entry(
    name: str, build_model: Callable[[], nn.Module], task: Task, seed: int, device: torch.device | str
) -> ZooEntry:
    """Entry with weights and data drawn from `seed` on the CPU, then moved, so that all devices see the same.

    The global random state is left as it was.
    """

    def make_batch(batch_seed: int) -> tuple[Inputs, Tensor]:
        inputs, target = task.draw(torch.Generator().manual_seed(batch_seed), task.batch)
        return tuple(tensor.to(device) for tensor in inputs), target.to(device)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model().to(device).train()
    sample, target = make_batch(seed)
    return ZooEntry(name, model, sample, target, task.criterion, make_batch)
