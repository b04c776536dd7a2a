"""Small modules drawn at random: residual branches, dropout, normalisation, in-place operations, views, cat."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rk_solvers import Problem
from rk_solvers.groups import normalise
from rk_solvers.problem import Recompute
from tests.module.models import ROWS, WIDTH

Operation = Callable[[Tensor, Tensor], Tensor]  # (value, an earlier value) -> value, all [ROWS, WIDTH]


def linear(rng: random.Random) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)


def batch_norm(_: random.Random) -> nn.Module:
    return nn.BatchNorm1d(WIDTH)


def layer_norm(_: random.Random) -> nn.Module:
    return nn.LayerNorm(WIDTH)


def dropout(rng: random.Random) -> nn.Module:
    return nn.Dropout(rng.choice([0.1, 0.5]))


def in_place_relu(_: random.Random) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))


LAYERS: tuple[Callable[[random.Random], nn.Module], ...] = (linear, batch_norm, layer_norm, dropout, in_place_relu)


def cat_of_halves(value: Tensor, earlier: Tensor) -> Tensor:
    return torch.cat([value[:, : WIDTH // 2], earlier[:, WIDTH // 2 :]], dim=1)


def transposed_there_and_back(value: Tensor, earlier: Tensor) -> Tensor:
    return torch.tanh(value.t()).reshape(WIDTH, -1).t() + earlier


def gated(value: Tensor, earlier: Tensor) -> Tensor:
    gate, content = torch.cat([value, earlier], dim=1).chunk(2, dim=1)
    return torch.sigmoid(gate) * content


def heads_of_attention(value: Tensor, earlier: Tensor) -> Tensor:
    queries, keys = (tensor.view(-1, 16, 4, WIDTH // 4).transpose(1, 2) for tensor in (value, earlier))
    mixed = torch.softmax(queries @ keys.transpose(-2, -1), dim=-1) @ keys
    return mixed.transpose(1, 2).reshape(value.shape)


def masked_without_gradient(value: Tensor, earlier: Tensor) -> Tensor:
    with torch.no_grad():
        mask = (earlier > 0).to(value.dtype)
    return value * mask + earlier


def written_twice(value: Tensor, earlier: Tensor) -> Tensor:
    return F.gelu(value).add_(earlier).mul_(0.5)


def written_through_a_view(value: Tensor, earlier: Tensor) -> Tensor:
    fresh = value + earlier
    fresh[:, : WIDTH // 4].mul_(0.5)
    return fresh


FUNCTIONS: tuple[Operation, ...] = (
    lambda value, earlier: value + earlier,
    lambda value, earlier: F.gelu(value) * torch.sigmoid(earlier),
    lambda value, earlier: torch.exp(-value.square()) + value,
    lambda value, earlier: F.relu(value - earlier, inplace=True),
    cat_of_halves,
    transposed_there_and_back,
    gated,
    heads_of_attention,
    masked_without_gradient,
    written_twice,
    written_through_a_view,
)


def pooled(value: Tensor, earlier: Tensor) -> Tensor:
    found, places = F.max_pool2d(value.reshape(-1, 8, 16, 32), 2, return_indices=True)
    return F.max_unpool2d(found, places, 2).reshape(value.shape) + earlier


def shuffled(value: Tensor, earlier: Tensor) -> Tensor:
    return value.sort(dim=1).values + earlier[torch.randperm(ROWS)].tanh()


def scattered(value: Tensor, earlier: Tensor) -> Tensor:
    best, places = value.topk(WIDTH // 4, dim=1)
    return torch.zeros_like(value).scatter_add(1, places, best) * torch.sigmoid(earlier)


def spectrum(value: Tensor, earlier: Tensor) -> Tensor:
    found = torch.fft.rfft(value.float())
    return torch.fft.irfft(found * found.conj().sgn()).to(value.dtype) + earlier


def windows(value: Tensor, earlier: Tensor) -> Tensor:
    padded = F.pad(value[None], (1, 1), mode="reflect")[0]
    return padded.unfold(1, 3, 1).amax(-1) + earlier


def channels_dropped(value: Tensor, earlier: Tensor) -> Tensor:
    images = F.dropout2d(value.reshape(-1, 8, 16, 32), 0.3)
    return F.pixel_shuffle(F.pixel_unshuffle(images.sin(), 2), 2).reshape(value.shape)


def noise_in_place(value: Tensor, earlier: Tensor) -> Tensor:
    noise = torch.empty_like(value).uniform_(-0.1, 0.1)
    return F.rrelu(value + noise, training=True) * (1 + noise).clamp_(max=1.05)


def means_broadcast(value: Tensor, earlier: Tensor) -> Tensor:
    variance, mean = torch.var_mean(value, 1, keepdim=True)
    return (value - mean.expand_as(value)) * (variance + 1).rsqrt() + earlier.mean(0)


def products(value: Tensor, earlier: Tensor) -> Tensor:
    first, second = value.view(8, -1, WIDTH), earlier.reshape(8, -1, WIDTH).to(value.dtype)
    mixed = torch.einsum("btw,btv->bwv", first, second) * 0.01
    return torch.matmul(first, mixed.tanh().to(first.dtype)).reshape(value.shape)


def drawn_choices(value: Tensor, earlier: Tensor) -> Tensor:
    return F.gumbel_softmax(value, tau=2.0) * earlier + F.alpha_dropout(value, 0.1, True).tanh()


def summed_up(value: Tensor, earlier: Tensor) -> Tensor:
    chunks = [part.cumsum(0).mul_(0.01) for part in value.chunk(3)]
    return torch.tanh(torch.cat(chunks)).index_add(0, torch.arange(8), earlier[:8].to(value.dtype))


RARE_FUNCTIONS: tuple[Operation, ...] = (
    *(pooled, shuffled, scattered, spectrum, windows, channels_dropped, noise_in_place),
    *(means_broadcast, products, drawn_choices, summed_up),
)


class RandomModule(nn.Module):
    """`length` layers and functions in a random order, each on the last value and one of the three before."""

    def __init__(self, seed: int, length: int = 9) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.layers = nn.ModuleList()
        self.order: list[tuple[int | None, Operation | None, int]] = []
        for _ in range(length):
            back = rng.randint(1, 3)
            if rng.random() < 0.5:
                self.order.append((len(self.layers), None, back))
                self.layers.append(rng.choice(LAYERS)(rng))
            else:
                self.order.append((None, rng.choice(FUNCTIONS), back))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        values = [self.head(value)]
        for layer, function, back in self.order:
            earlier = values[-min(back, len(values))]
            if layer is not None:
                values.append(self.layers[layer](values[-1]))
            elif function is not None:
                values.append(function(values[-1], earlier))
        return self.head(values[-1]) + values[-1]


def random_plan(problem: Problem, seed: int) -> Recompute:
    """A plan in normal form: before each backward operation a random part of what may be recomputed."""
    rng = random.Random(seed)
    allowed = [index for index, op in enumerate(problem.forward) if op.recomputable]
    rate = rng.choice([0.1, 0.3, 0.6, 0.9])
    return normalise(problem, tuple(tuple(i for i in allowed if rng.random() < rate) for _ in problem.backward))
