"""Networks drawn at random from what real models are made of, with batches, a loss, and an autocast around them.

A network is a sequence of parts (`random_parts`). What eager PyTorch refuses to train is drawn anew.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkgb.tree import leaves
from tests.module.models import ROWS, WIDTH, built
from tests.module.random_parts import PARTS, RARE, pick


class RandomNetwork(nn.Module):
    """Parts in a random order, each on the last value and one before; one output, several, or a dictionary.

    Takes rows and the numbers `tokens` (and a second value, if `takes_second`). Some parameters are frozen.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.on = pick(rng, second=0.4, extra_outputs=0.5, frozen=0.4, dictionary=0.3, branch=0.5)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        kinds = [rng.choice(PARTS) for _ in range(rng.randint(4, 9))]
        if rng.random() < 0.08:
            kinds[0] = rng.choice(RARE)
        self.parts = nn.ModuleList(kind(rng, self.head) for kind in kinds)
        self.back = [rng.randint(1, 3) for _ in kinds]
        if self.on["frozen"]:
            for parameter in self.parts.parameters():
                parameter.requires_grad_(rng.random() < 0.6)

    def extra_repr(self) -> str:
        return f"{', '.join(name for name, on in self.on.items() if on)}; reads back {self.back}"

    def forward(self, value: Tensor, tokens: Tensor, second: Tensor | None = None) -> Any:
        values = [self.head(value)]
        for part, back in zip(self.parts, self.back, strict=True):
            values.append(part(values[-1], values[-min(back, len(values))], tokens))
        result = self.head(values[-1]) + (values[-1] if second is None else values[-1] * second)
        if not self.on["extra_outputs"]:
            return result
        middle = values[len(values) // 2]
        if self.on["branch"]:
            middle = self.branch(middle)
        outputs = (result, middle.sin().view(-1), values[-1].detach(), tokens + 1)
        return (
            dict(zip(("result", "middle", "last", "next"), outputs, strict=True)) if self.on["dictionary"] else outputs
        )


Loss = Callable[[Any], Tensor]


def of_first(output: Any) -> Tensor:
    """A loss of the first output alone: no gradient reaches the others."""
    return leaves(output)[0].float().square().mean()


def of_classes(output: Any) -> Tensor:
    """A classification by the first output."""
    return F.cross_entropy(leaves(output)[0].float(), torch.arange(ROWS) % WIDTH)


def of_every(output: Any) -> Tensor:
    """A loss of all outputs that have a gradient."""
    return torch.stack([tensor.float().sin().mean() for tensor in leaves(output) if tensor.requires_grad]).sum()


@dataclass(frozen=True)
class Case:
    """A network with all that training it takes."""

    network: RandomNetwork
    loss: Loss
    autocast: bool
    input_gradients: bool

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        """Arguments of one call, by the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_(self.input_gradients)
        numbers = torch.randint(WIDTH, (ROWS,), generator=generator)
        second = torch.randn(ROWS, WIDTH, generator=generator) if self.network.on["second"] else None
        return (value, numbers) if second is None else (value, numbers, second)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast under which the network is planned and called."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def __str__(self) -> str:
        return f"loss {self.loss.__name__}, autocast {self.autocast}, {self.input_gradients=}\n{self.network}"


def random_case(seed: int) -> Case:
    """The case of this seed: the first that eager PyTorch trains, of those drawn from it."""
    rng = random.Random(seed)
    while True:
        network = built(RandomNetwork, rng, seed=seed)
        case = Case(network, rng.choice([of_first, of_classes, of_every]), rng.random() < 0.15, rng.random() < 0.3)
        if _trains(case):
            return case


def _trains(case: Case) -> bool:
    """Whether eager PyTorch takes a step: it refuses writes into what autograd saved."""
    network = copy.deepcopy(case.network)
    try:
        with case.casting():
            loss = case.loss(network(*case.batch(0)))
        loss.backward()
    except RuntimeError as error:
        if "inplace operation" in str(error):
            return False
        raise
    return all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in network.parameters())
