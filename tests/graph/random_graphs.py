"""Modules drawn at random: a directed graph of operations with random fan-out, aliases and writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkgb.ir.sample import Sample
from rkgb.replay.replay import backward_from
from rkgb.state.module_state import module_state_kept
from rkgb.tree import leaves

ROWS, WIDTH = 6, 8
STEPS_BACK = (1, 1, 1, 2, 3, 5)  # how far before it an operation finds an operand
Operation = Callable[..., Tensor]  # of one or two values [ROWS, WIDTH] to another one


def gate(a: Tensor, b: Tensor) -> Tensor:
    left, right = torch.cat([a, b], dim=1).chunk(2, dim=1)
    return torch.sigmoid(left) * right


def halves(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a[:, : WIDTH // 2], b[:, WIDTH // 2 :]], dim=1)


def turned(a: Tensor) -> Tensor:
    return a.t().contiguous().view(WIDTH, ROWS).t()


def attention(a: Tensor, b: Tensor) -> Tensor:
    query, key = (x.view(ROWS, 2, WIDTH // 2).transpose(0, 1) for x in (a, b))
    return ((query @ key.transpose(1, 2)).softmax(-1) @ key).transpose(0, 1).reshape(ROWS, WIDTH)


def without_gradient(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        mask = (b > 0).to(a.dtype) * 2
    return a * mask


def rows_exchanged(a: Tensor) -> Tensor:
    return a[torch.arange(ROWS - 1, -1, -1)]


def written_slice(a: Tensor) -> Tensor:
    a[:, 1:3].mul_(0.5)
    return a


def written_by_its_own(a: Tensor) -> Tensor:
    return a.add_(torch.sigmoid(a))


def written_into_zeros(a: Tensor, b: Tensor) -> Tensor:
    result = torch.zeros(ROWS, WIDTH)
    result[1:] = a[1:]
    result[0] = b[0]
    return result


def largest(a: Tensor, b: Tensor) -> Tensor:
    best = a.max(dim=1, keepdim=True)
    return b * best.values + best.indices


def viewed(a: Tensor) -> Tensor:
    return a.view(-1).view(ROWS, WIDTH) if a.is_contiguous() else a.clone()


OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "of one": (
        lambda a: torch.exp(-a.square()),
        lambda a: F.gelu(a),
        lambda a: F.dropout(a, 0.3),
        lambda a: a.unsqueeze(0).squeeze(0),
        turned,
        rows_exchanged,
        viewed,
    ),
    "of two": (
        lambda a, b: a + b,
        lambda a, b: a * b.tanh(),
        lambda a, b: a - 0.5 * b,
        lambda a, b: a.softmax(-1) + b.mean(0),
        lambda a, b: torch.where(b > 0, a, -1.0),
        lambda a, b: torch.stack([a, b]).mean(0),
        lambda a, b: a.detach() * b,
        lambda a, b: a.sum(1, keepdim=True).expand(ROWS, WIDTH) * b,
        gate,
        halves,
        attention,
        without_gradient,
        written_into_zeros,
        largest,
    ),
    "in place": (
        lambda a: F.relu(a, inplace=True),
        lambda a: a.mul_(0.5),
        lambda a: F.dropout(a, 0.3, inplace=True),
        lambda a: a.t().tanh_().t(),
        written_slice,
        written_by_its_own,
    ),
    "in place with another": (lambda a, b: a.add_(b), lambda a, b: a.mul_(b.sigmoid())),
}


class RandomGraph(nn.Module):
    """`length` layers and operations, each on one or two of all the values before; returns what none of them reads.

    Nothing is left unread, as torch.jit.trace drops even random operations whose results nobody reads.
    """

    def __init__(self, rng: random.Random, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.plan: list[tuple[str, int, list[int]]] = []  # kind, which of that kind, operands
        for place in range(length):
            kind = rng.choices(["layer", "layer again", *OPERATIONS], [4, 1, 3, 5, 2, 1])[0]
            if kind == "layer again" and self.layers:
                which = rng.randrange(len(self.layers))
            elif kind.startswith("layer"):
                which = len(self.layers)
                self.layers.append(random_layer(rng))
            else:
                which = rng.randrange(len(OPERATIONS[kind]))
            count = 2 if kind in ("of two", "in place with another") else 1
            self.plan.append((kind, which, [max(0, place + 1 - rng.choice(STEPS_BACK)) for _ in range(count)]))
        read = {operand for _, _, operands in self.plan for operand in operands}
        self.returned = sorted({*range(length + 1)} - read | {rng.randint(1, length)})

    def forward(self, x: Tensor) -> Any:
        values = [x * 1.0]
        for kind, which, operands in self.plan:
            function = self.layers[which] if kind.startswith("layer") else OPERATIONS[kind][which]
            values.append(function(*(values[operand] for operand in operands)))
        outputs = [values[place] for place in self.returned]
        return outputs[0] if len(outputs) == 1 else {f"value {place}": output for place, output in enumerate(outputs)}


def random_layer(rng: random.Random) -> nn.Module:
    """A layer of width WIDTH, sometimes frozen."""
    layer: nn.Module = rng.choice(
        [
            lambda: nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.6),
            lambda: nn.LayerNorm(WIDTH),
            lambda: nn.BatchNorm1d(WIDTH),
            lambda: nn.Dropout(rng.choice([0.0, 0.4])),
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
        ]
    )()
    return layer.requires_grad_(rng.random() < 0.85)


def random_graph(seed: int, length: int = 9) -> tuple[RandomGraph, Tensor]:
    """The first module drawn from that seed of which a step runs in eager PyTorch, and its sample.

    Many do not: they write in place what the backward needs.
    """
    rng = random.Random(seed)
    for _ in range(200):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = RandomGraph(rng, length)
            sample = torch.randn(ROWS, WIDTH, requires_grad=rng.random() < 0.3)
        if trains(module, sample):
            return module, sample
    raise AssertionError(f"seed {seed} draws no module that trains")


def trains(module: nn.Module, sample: Tensor) -> bool:
    """Whether forward and backward run, and a gradient reaches an output."""
    with module_state_kept(module):
        try:
            outputs = leaves(module(Sample((sample,), {}).copy().tensors[0]))
            backward_from(outputs)
        except RuntimeError:
            return False
    return any(output.requires_grad for output in outputs)
