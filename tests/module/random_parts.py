"""Parts of random networks.

Each maps values [ROWS, WIDTH] to a value of that shape, and looks at it inside as rows, as a sequence or as images.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.module.models import ROWS, WIDTH
from tests.module.random_modules import RARE_FUNCTIONS

BATCH, TIME, HEADS = 8, ROWS // 8, 4  # a value as a sequence [BATCH, TIME, WIDTH]
CHANNELS, HEIGHT = 8, 16  # ... and as images [4, CHANNELS, HEIGHT, 32]


def pick(rng: random.Random, **rates: float) -> dict[str, bool]:
    """For each name, whether the option of that name is on."""
    return {name: rng.random() < rate for name, rate in rates.items()}


class Part(nn.Module):
    """One step of a network: options drawn by `rng`, and what it computes of values [ROWS, WIDTH]."""

    def __init__(self, rng: random.Random, common: nn.Module, **rates: float) -> None:
        super().__init__()
        self.on = pick(rng, **rates)

    def extra_repr(self) -> str:
        return ", ".join(name for name, on in self.on.items() if on)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        raise NotImplementedError


class Perceptron(Part):
    """Linear layers with a dropout, perhaps checkpointed or with a weight that is computed in each forward."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, bias=0.7, checkpointed=0.25, spectral=0.15, residual=0.5, shared=0.2)
        wide = WIDTH * rng.choice([1, 2])
        self.first, self.second = nn.Linear(WIDTH, wide, bias=self.on["bias"]), nn.Linear(wide, WIDTH)
        if self.on["shared"]:
            self.first = self.second = common
        elif self.on["spectral"]:
            nn.utils.parametrizations.weight_norm(self.second)
            if not self.on["checkpointed"]:  # a checkpoint would take its power iteration twice
                nn.utils.parametrizations.spectral_norm(self.first)
        self.rate = rng.choice([0.0, 0.1, 0.5])

    def inner(self, value: Tensor) -> Tensor:
        return F.dropout(self.second(F.gelu(self.first(value))), self.rate, self.training)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        found = checkpoint(self.inner, value, use_reentrant=False) if self.on["checkpointed"] else self.inner(value)
        return value + found if self.on["residual"] else found


class Convolution(Part):
    """A convolution and a normalisation, perhaps with the channels last, at half the resolution, in groups."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, channels_last=0.4, in_place=0.6, half=0.4, residual=0.5)
        self.layer = nn.Conv2d(CHANNELS, CHANNELS, rng.choice([1, 3]), padding="same", groups=rng.choice([1, 2, 8]))
        if self.on["channels_last"]:
            self.layer.to(memory_format=torch.channels_last)
        norms = [
            nn.BatchNorm2d(CHANNELS),
            nn.BatchNorm2d(CHANNELS, affine=False, momentum=0.3),
            nn.GroupNorm(2, CHANNELS),
            nn.InstanceNorm2d(CHANNELS, affine=True),
            nn.Identity(),
        ]
        self.norm = rng.choice(norms)
        # In place, all but the first and the last save a copy of what they write over.
        self.function = rng.choice([F.relu, F.relu6, F.silu, F.hardswish, F.leaky_relu])

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        images = value.reshape(-1, CHANNELS, HEIGHT, 32)
        if self.on["channels_last"]:
            images = images.contiguous(memory_format=torch.channels_last)
        hidden = F.avg_pool2d(images, 2) if self.on["half"] else images
        hidden = self.function(self.norm(self.layer(hidden)), inplace=self.on["in_place"])
        if self.on["half"]:
            hidden = F.interpolate(hidden, scale_factor=2.0, mode="bilinear")
        return (hidden + images if self.on["residual"] else hidden).reshape(value.shape)


class Attention(Part):
    """Attention with dropout: by the fused operation, by hand, or by torch's own module."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, cross=0.4, causal=0.4, by_hand=0.3, module=0.2)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rate = rng.choice([0.0, 0.2])
        if self.on["module"]:
            self.project = nn.MultiheadAttention(WIDTH, HEADS, dropout=self.rate, batch_first=True)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        sequence = value.view(BATCH, TIME, WIDTH)
        if self.on["module"]:
            return value + self.project(sequence, sequence, sequence, need_weights=False)[0].reshape(value.shape)
        queries, keys, values = (
            part.view(BATCH, TIME, HEADS, -1).transpose(1, 2) for part in self.project(sequence).chunk(3, dim=-1)
        )
        if self.on["cross"]:
            keys = earlier.view(BATCH, TIME, HEADS, -1).transpose(1, 2).to(queries.dtype)
        if self.on["by_hand"]:
            scores = (queries @ keys.transpose(-2, -1)) * 0.3
            if self.on["causal"]:
                hidden = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -1e4)
            mixed = F.dropout(scores.softmax(-1), self.rate, self.training) @ values.to(scores.dtype)
        else:
            values = values.to(queries.dtype)
            mixed = F.scaled_dot_product_attention(queries, keys, values, None, self.rate, self.on["causal"])
        return value + mixed.transpose(1, 2).reshape(value.shape)


class Lookup(Part):
    """An embedding of the integer input, read out again through the same weight."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, tied=0.6, shared=0.3, indexed=0.3)
        self.table = nn.Embedding(WIDTH, WIDTH)
        if self.on["shared"]:
            self.table.weight = common.weight

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.table(tokens) + value)
        if self.on["tied"]:
            hidden = F.linear(hidden, self.table.weight)
        if self.on["indexed"]:
            hidden = torch.where((tokens > WIDTH // 2)[:, None], hidden[tokens], hidden)
        return hidden


class Writing(Part):
    """Writes into fresh storages, into slices of them, through views, into the value itself."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, through_view=0.5, into_value=0.3, inplace_dropout=0.3, copied=0.3, gated=0.3)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        if self.on["into_value"]:
            value.mul_(0.9).add_(0.1)
        fresh = F.gelu(value).add_(earlier).mul_(0.5)
        if self.on["through_view"]:
            fresh.view(2, -1, WIDTH)[:, 1:, : WIDTH // 4].mul_(0.5)
        if self.on["copied"]:
            fresh[: ROWS // 4].copy_(value[ROWS // 2 : -ROWS // 4])
        if self.on["gated"]:
            fresh.view(-1)[WIDTH:].mul_(earlier.reshape(-1)[WIDTH:].sigmoid())
        if self.on["inplace_dropout"]:
            fresh = F.dropout(fresh, 0.2, self.training, inplace=True)
        return fresh


class Viewing(Part):
    """Chunks, halves, transposed and flipped views, joined again."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, gated=0.4, halves=0.4, transposed=0.4, stacked=0.3)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        if self.on["gated"]:
            gate, content = torch.cat([value, earlier], dim=1).chunk(2, dim=1)
            value = torch.sigmoid(gate) * content
        if self.on["halves"]:
            first, second = value.split(WIDTH // 2, dim=1)
            value = torch.cat([second.tanh(), first], dim=1)
        if self.on["transposed"]:
            value = torch.tanh(value.t()).reshape(WIDTH, -1).t() + earlier
        if self.on["stacked"]:
            value = torch.stack([value, earlier.roll(1, 0)]).logsumexp(0)
        return value.view(value.shape)


class Swish(torch.autograd.Function):
    """Saves a tensor, keeps a number in its context, and has an output without gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(value)
        ctx.scale = scale
        positive = value > 0
        ctx.mark_non_differentiable(positive)
        return value * torch.sigmoid(scale * value), positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        (value,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.scale * value)
        return gradient * (gate + ctx.scale * value * gate * (1 - gate)), None


class Custom(Part):
    """A function with a backward of the user's."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, masked=0.5)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        swished, positive = Swish.apply(value.sin(), 1.5)
        return torch.where(positive, swished, earlier) if self.on["masked"] else swished.tanh()


class Remembering(Part):
    """Buffers written in every forward, read before or after it."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, counts=0.5, before=0.5)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        if self.on["before"]:
            value = (value - self.average).tanh()
        with torch.no_grad():
            self.average.mul_(0.9).add_(value.mean(0), alpha=0.1)
        if self.on["counts"]:
            self.count += 1
        return value * torch.sigmoid(value) - self.average


class Ungraded(Part):
    """A part without gradients beside one with: a teacher, a mask, noise."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, teacher=0.5, noise=0.4)
        self.teacher = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            weight = F.softmax(self.teacher(earlier), -1) if self.on["teacher"] else (earlier > 0).to(value.dtype)
        if self.on["noise"]:
            weight = weight + torch.randn_like(weight) * 0.1
        return value.sin() * weight + value.detach().cos()


class Normalising(Part):
    """Normalisations of rows, reductions, and softmaxes."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, statistics=0.5, softmax=0.4, lowered=0.3)
        self.norm = nn.BatchNorm1d(WIDTH) if self.on["statistics"] else nn.LayerNorm(WIDTH)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        value = self.norm(value)
        if self.on["softmax"]:
            value = value.log_softmax(-1) * value.std(-1, keepdim=True)
        if self.on["lowered"]:
            with torch.autocast("cpu", torch.bfloat16):
                value = torch.tanh(F.linear(value, self.norm.weight.diag())).float()
        return value


class Tabled(Part):
    """Adds a table, a row and a buffer of the module's in the shape and type of a value."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common, precise=0.3, row=0.5, flat=0.5)
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH) * 0.1)
        # Small: where a cast's backward makes a gradient twice as large as what it is given, prediction still counts
        # what the operation before it read.
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.rows = nn.ParameterList([torch.randn(WIDTH)])
        self.register_buffer("flat", torch.randn(ROWS * WIDTH))

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        value = value * torch.sin(self.table.type_as(earlier.tanh()))
        if self.on["precise"]:
            value = value * self.scale.type_as(earlier)
        if self.on["row"]:
            value = value + torch.sigmoid(self.rows[0].expand_as(value.square())) * earlier
        if self.on["flat"]:
            value = value - self.flat.reshape_as(earlier).to(earlier).detach().clone()
        return torch.tanh(value)


class Assorted(Part):
    """One function of many."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common)
        self.function = rng.choice(RARE_FUNCTIONS)

    def extra_repr(self) -> str:
        return self.function.__name__

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        return torch.tanh(self.function(value, earlier))


class Recurrent(Part):
    """A recurrent layer over short sequences."""

    def __init__(self, rng: random.Random, common: nn.Module) -> None:
        super().__init__(rng, common)
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, value: Tensor, earlier: Tensor, tokens: Tensor) -> Tensor:
        return self.layer(value.reshape(-1, 4, WIDTH))[0].reshape(value.shape)


COMMON = (Perceptron, Convolution, Attention, Lookup, Writing, Viewing, Custom, Remembering, Ungraded, Normalising)
PARTS = (*COMMON, Tabled, Assorted, Assorted, Assorted)
RARE = (Recurrent,)  # slow to measure: many operations each
