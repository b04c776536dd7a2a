"""Parts of random networks as training code has them: all but the plain ones have a habit that planning may trip over.

Each maps a value [batch, length, WIDTH] to a value of that shape. `given` holds what the call was given besides. A part
with options with which planning may refuse a network says so in `refused`; the message must name that part.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


@dataclass
class Given:
    """What a call was given besides the value."""

    ids: Tensor  # [batch, length]: small whole numbers, of a float type
    lengths: Tensor  # [batch]
    empty: Tensor  # no elements
    mask: Tensor | None  # [batch, length, 1]
    flag: bool


class Part(nn.Module):
    """One step of a network, with options drawn by `rng`."""

    refused: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.option = rng.choice(self.options)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def extra_repr(self) -> str:
        return self.option

    def losses(self) -> list[Tensor]:
        """What the last call has left for the loss."""
        return []

    def forward(self, h: Tensor, given: Given) -> Tensor:
        raise NotImplementedError


# ---- without habits ---------------------------------------------------------------------------------


class Dense(Part):
    options = ("dropout", "plain")

    def forward(self, h, given):
        rate = 0.2 if self.option == "dropout" else 0.0
        return h + F.dropout(F.gelu(self.layer(h)), rate, self.training)


class Norm(Part):
    options = ("layer", "batch", "group")

    def __init__(self, rng):
        super().__init__(rng)
        makers = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "group": functools.partial(nn.GroupNorm, 4)}
        self.norm = makers[self.option](WIDTH)

    def forward(self, h, given):
        return torch.tanh(self.norm(self.layer(h).reshape(-1, WIDTH))).view(h.shape)


class Attention(Part):
    options = ("fused", "by hand", "module")

    def __init__(self, rng):
        super().__init__(rng)
        self.module = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, h, given):
        if self.option == "module":
            return h + self.module(h, h, h, need_weights=False)[0]
        query = self.layer(h)
        if self.option == "fused":
            return h + F.scaled_dot_product_attention(query[:, None], h[:, None], h[:, None], is_causal=True)[:, 0]
        return h + F.dropout((query @ h.mT * 0.2).softmax(-1), 0.1, self.training) @ h


class Convolution(Part):
    def __init__(self, rng):
        super().__init__(rng)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h, given):
        return F.silu(self.convolution(h.mT)).mT


class Branches(Part):
    def forward(self, h, given):
        return torch.tanh(self.layer(h)) * torch.sigmoid(h) + h.roll(1, 1)


# ---- attributes -------------------------------------------------------------------------------------


class Auxiliary(Part):
    """Leaves a loss in an attribute."""

    options = ("tensor", "list", "appended", "dictionary", "nested", "detached", "large")
    refused = ("appended",)  # where another part keeps it from being one operation

    def __init__(self, rng):
        super().__init__(rng)
        self.aux, self.items, self.table, self.inner = None, [], {}, nn.Identity()

    def forward(self, h, given):
        h = torch.tanh(self.layer(h))
        loss = h.abs().mean()
        match self.option:
            case "tensor":
                self.aux = loss
            case "list":
                self.items = [loss, h.square().mean()]
            case "appended":
                if len(self.items) > 1:
                    self.items.clear()
                self.items.append(loss)
            case "dictionary":
                self.table["aux"], self.table["rows"] = loss, h.shape[0]
            case "nested":
                self.inner.aux = {"loss": (loss, "of the last call")}
            case "detached":
                self.aux = h.detach().mean(0)
            case "large":
                self.aux = h * 2
        return h

    def losses(self):
        nested = getattr(self.inner, "aux", {"loss": (None,)})["loss"][0]
        held = [self.aux, *self.items, self.table.get("aux"), nested]
        return [one for one in held if one is not None and one.grad_fn is not None]


class Number(Part):
    """Leaves a number of the data in an attribute."""

    refused = ("",)

    def __init__(self, rng):
        super().__init__(rng)
        self.seen = 0.0

    def forward(self, h, given):
        h = torch.tanh(self.layer(h))
        self.seen = h.detach().abs().mean().item()
        return h


class Counter(Part):
    """Counts its calls; perhaps what it computes depends on the count."""

    options = ("only counts", "warms up", "every other", "tensor")
    refused = ("warms up", "every other")

    def __init__(self, rng):
        super().__init__(rng)
        self.calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, h, given):
        self.calls += 1
        h = torch.tanh(self.layer(h))
        if self.option == "warms up":
            return h * min(1.0, self.calls / 4)
        if self.option == "every other":
            return h.sin() if self.calls % 2 else h
        if self.option == "tensor":
            self.count += 1
            return h * (self.count / 8).clamp(max=1)
        return h


class Carried(Part):
    """Adds what it had in the call before, if that was of the same shape."""

    options = ("attribute", "buffer", "list")
    refused = ("attribute", "buffer", "list")

    def __init__(self, rng):
        super().__init__(rng)
        self.previous, self.memory = None, []
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, h, given):
        h = torch.tanh(self.layer(h))
        if self.option == "buffer":
            found = h + self.state
            self.state = h.detach().mean((0, 1))
            return found
        if self.option == "list":
            found = h + sum(self.memory, start=torch.zeros(WIDTH))
            self.memory = [*self.memory[-1:], h.detach().mean((0, 1))]
            return found
        found = h if self.previous is None or self.previous.shape != h.shape else h + self.previous
        self.previous = h.detach()
        return found


class Setting(Part):
    """Reads an attribute that the loop changes between steps."""

    options = ("temperature", "epoch", "rate", "switch")

    def __init__(self, rng):
        super().__init__(rng)
        self.temperature, self.epoch, self.drop, self.switch = 1.0, 0, nn.Dropout(0.1), False

    def advance(self):
        """What the loop does between steps."""
        self.temperature *= 0.75
        self.epoch += 1
        self.drop.p += 0.1
        self.switch = not self.switch

    def forward(self, h, given):
        match self.option:
            case "temperature":
                return (self.layer(h) / self.temperature).softmax(-1) + h
            case "epoch":
                return torch.tanh(self.layer(h)) * (1 + self.epoch) if self.epoch < 2 else torch.tanh(self.layer(h))
            case "rate":
                return self.drop(torch.tanh(self.layer(h)))
        return torch.tanh(self.layer(h)).exp() if self.switch else torch.tanh(self.layer(h))


class Hooked(Part):
    """A hook of its own keeps what the layer returned, or changes it."""

    options = ("keeps", "changes")

    def __init__(self, rng):
        super().__init__(rng)
        self.features = {}
        self.layer.register_forward_hook(functools.partial(_hook, self.features, self.option))

    def forward(self, h, given):
        return torch.tanh(self.layer(h))


def _hook(features, option, module, arguments, output):
    if option == "changes":
        return output.sin()
    features["layer"] = output
    return None


# ---- numbers of tensors -----------------------------------------------------------------------------


class Scaled(Part):
    """Computes with a number that it takes from the data."""

    options = ("item", "float", "tensor", "input")
    refused = ("item", "float", "input")

    def forward(self, h, given):
        h = torch.tanh(self.layer(h))
        largest = h.detach().abs().max()
        match self.option:
            case "item":
                return h / (largest.item() + 1)
            case "float":
                return h * float(largest)
            case "input":
                return h * (1 + int(given.lengths.max()))
        return h / (largest + 1)


class OneHot(Part):
    """Classes as many as the data have."""

    options = ("number", "tensor", "bound")
    refused = ("number", "tensor", "bound")

    def __init__(self, rng):
        super().__init__(rng)
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, h, given):
        ids = given.ids.long()
        classes = ids.max() + 1
        if self.option == "number":
            classes = int(classes)
        if self.option == "bound":
            classes = max(classes, 6)
        chosen = F.one_hot(ids, classes).to(h.dtype)
        width = chosen.shape[-1]
        return torch.tanh(self.layer(h)) + chosen @ self.table[:width].to(h.dtype)


class Sliced(Part):
    """As much of the value as the lengths say."""

    options = ("longest", "masked", "packed", "each")
    refused = ("longest", "packed", "each")

    def __init__(self, rng):
        super().__init__(rng)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h, given):
        longest = given.lengths.max()
        if self.option == "longest":
            part = torch.tanh(self.layer(h[:, :longest]))
            return F.pad(part, (0, 0, 0, h.shape[1] - part.shape[1])) + h
        if self.option == "each":
            rows = [torch.tanh(self.layer(row[: int(n)])).mean(0) for row, n in zip(h, given.lengths, strict=True)]
            return h + torch.stack(rows)[:, None]
        if self.option == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(h, given.lengths, batch_first=True, enforce_sorted=False)
            found = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], True, total_length=h.shape[1])[0]
            return h + found
        inside = torch.arange(h.shape[1])[None, :] < given.lengths[:, None]
        return h.masked_fill(~inside[..., None], 0.0) + torch.tanh(self.layer(h))


class Branching(Part):
    """The way depends on the data."""

    options = ("sign", "check", "loop", "chosen", "experts")
    refused = ("sign", "check", "loop", "chosen", "experts")

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        match self.option:
            case "sign":
                return found.sin() if found.mean() > 0 else found
            case "check":
                if torch.isnan(found).any() or given.ids.max() >= WIDTH:
                    raise ValueError("the data are no good")
                return found
            case "loop":
                while found.norm() > 4:
                    found = found * 0.5
                return found
            case "chosen":
                rows = found.reshape(-1, WIDTH)
                chosen = (rows[:, 0] > 0).nonzero()[:, 0]
                return rows.index_add(0, chosen, rows[chosen].sin()).view(h.shape)
        rows, parts = found.reshape(-1, WIDTH), torch.zeros_like(found).view(-1, WIDTH)
        for expert, sign in enumerate((1, -1)):
            chosen = torch.where(rows[:, 1] * sign > 0)[0]
            if len(chosen) > 0:
                parts = parts.index_add(0, chosen, rows[chosen] * (expert + 1))
        return parts.view(h.shape)


# ---- state that a first call makes ------------------------------------------------------------------


class Lazy(Part):
    """Makes state in its first call."""

    options = ("buffer", "codebook", "norm", "layer", "table", "module")
    refused = ("layer",)

    def __init__(self, rng):
        super().__init__(rng)
        self.register_buffer("codes", torch.zeros(3, WIDTH))
        self.register_buffer("started", torch.tensor(False))
        self.scale, self.cached = nn.Parameter(torch.ones(WIDTH)), {}
        if self.option == "layer":
            self.layer = nn.LazyLinear(WIDTH)

    def forward(self, h, given):
        length = h.shape[1]
        if self.option == "buffer":
            if not hasattr(self, "positions") or len(self.positions) < length:
                self.register_buffer("positions", torch.arange(length)[:, None] * 0.01, persistent=False)
            h = h + self.positions[:length]
        elif self.option == "table":
            if length not in self.cached:
                self.cached[length] = torch.ones(length, length).tril()
            h = self.cached[length] @ h
        elif self.option == "module":
            if not hasattr(self, "extra"):
                self.extra = nn.Dropout(0.3)
            h = self.extra(h)
        elif not self.started and self.option != "layer":
            with torch.no_grad():
                if self.option == "norm":
                    self.scale.data.copy_(1 / (h.std((0, 1)) + 0.1))
                else:
                    self.codes.copy_(h.reshape(-1, WIDTH)[torch.randperm(h.shape[0] * length)[:3]])
                self.started.fill_(True)
        if self.option == "codebook":
            chosen = torch.cdist(h.reshape(-1, WIDTH), self.codes.to(h.dtype)).argmin(-1)
            h = h + (self.codes[chosen].view(h.shape) - h).detach()
        return torch.tanh(self.layer(h * self.scale))


# ---- calls ------------------------------------------------------------------------------------------


class Closure(Part):
    """Calls submodules through what holds them: a closure, a partial function, a bound method."""

    options = ("closure", "partial", "method", "unregistered")

    def __init__(self, rng):
        super().__init__(rng)
        held = self
        if self.option == "closure":
            self.function = lambda h: held.layer(h)
        elif self.option == "partial":
            self.function = functools.partial(_applied, self.layer)
        elif self.option == "method":
            self.function = self.layer.forward
        else:
            self.function = [self.layer]

    def forward(self, h, given):
        function = self.function[0] if isinstance(self.function, list) else self.function
        return torch.tanh(function(h))


def _applied(layer, h):
    return layer(h)


class Checkpointed(Part):
    """Checkpointing of its own."""

    options = ("reentrant", "plain", "without random numbers")
    refused = ("reentrant",)  # PyTorch gives its parameters no gradients where its input takes none

    def inner(self, h):
        rate = 0.0 if self.option == "without random numbers" else 0.2
        return F.dropout(F.gelu(self.layer(torch.tanh(h))), rate, self.training)

    def forward(self, h, given):
        kept = self.option != "without random numbers"
        return checkpoint(self.inner, h, use_reentrant=self.option == "reentrant", preserve_rng_state=kept) + h


class LayerDrop(Part):
    """Skips itself at random, or adds noise."""

    options = ("random", "torch", "rows", "numpy", "noise")
    refused = ("random", "torch", "numpy")

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        if not self.training:
            return found
        match self.option:
            case "random":
                return h if random.random() < 0.3 else found
            case "torch":
                return h if torch.rand(()).item() < 0.3 else found
            case "rows":
                return h + found * (torch.rand(h.shape[0], 1, 1) < 0.7) / 0.7
            case "numpy":
                return found * float(np.random.rand())
        return found + torch.randn_like(found) * 0.1


class InPlace(Part):
    """Writes over what it has."""

    options = ("relu", "silu", "slices", "dropout")

    def forward(self, h, given):
        found = self.layer(h)
        match self.option:
            case "relu":
                return F.relu_(found)
            case "silu":
                return F.silu(found, inplace=True)
            case "dropout":
                return F.dropout(found, 0.2, self.training, inplace=True)
        found = found * 2
        found[:, 1:].mul_(0.5)
        found[:, :1] = h[:, -1:]
        return found


class NoGradient(Part):
    """A part without gradients, or one on detached values."""

    options = ("no_grad", "detach", "straight through")

    def forward(self, h, given):
        if self.option == "no_grad":
            with torch.no_grad():
                centre = torch.tanh(self.layer(h)).mean(0)
            return torch.tanh(self.layer(h) - centre)
        if self.option == "detach":
            return torch.tanh(self.layer(h)) + h.detach().sin()
        found = torch.tanh(self.layer(h))
        return found + (found.round() - found).detach()


class InnerGradient(Part):
    """A gradient taken inside."""

    options = ("plain", "differentiated")
    refused = ("plain", "differentiated")

    def forward(self, h, given):
        if not torch.is_grad_enabled():
            return torch.tanh(self.layer(h))
        point = h if h.requires_grad else h.detach().requires_grad_()
        energy = torch.tanh(self.layer(point)).square().sum()
        (force,) = torch.autograd.grad(energy, point, create_graph=self.option == "differentiated", retain_graph=True)
        return h - 0.1 * force


class Swish(torch.autograd.Function):
    """A function with a backward of the user's."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.save_for_backward(value)
        ctx.scale = scale
        return value * torch.sigmoid(scale * value)

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.scale * value)
        return gradient * (gate + ctx.scale * value * gate * (1 - gate)), None


class Custom(Part):
    def forward(self, h, given):
        return Swish.apply(self.layer(h), 1.5)


class Buffers(Part):
    """A buffer that is written into, or put in the place of the last one."""

    options = ("in place", "anew", "data", "copied")
    refused = ("anew", "data")

    def __init__(self, rng):
        super().__init__(rng)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, h, given):
        h = torch.tanh(self.layer(h))
        if self.training:
            mean = h.detach().float().mean((0, 1))
            match self.option:
                case "in place":
                    self.average.mul_(0.9).add_(mean, alpha=0.1)
                case "anew":
                    self.average = 0.9 * self.average + 0.1 * mean
                case "data":
                    self.average.data = 0.9 * self.average + 0.1 * mean
                case "copied":
                    self.average.copy_(mean)
        return h - self.average


class Normed(Part):
    """A weight that is computed in each forward."""

    options = ("weight_norm", "spectral_norm", "old weight_norm")

    def __init__(self, rng):
        super().__init__(rng)
        if self.option == "weight_norm":
            nn.utils.parametrizations.weight_norm(self.layer)
        elif self.option == "spectral_norm":
            nn.utils.parametrizations.spectral_norm(self.layer)
        else:
            nn.utils.weight_norm(self.layer)

    def forward(self, h, given):
        return torch.tanh(self.layer(h))


class Odd(Part):
    """Reads what is odd among the arguments."""

    options = ("mask", "flag", "empty", "ids", "type")

    def __init__(self, rng):
        super().__init__(rng)
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        match self.option:
            case "mask":
                return found if given.mask is None else found * given.mask
            case "flag":
                return found.sin() if given.flag else found
            case "empty":
                return torch.cat([found, given.empty.to(found.dtype).view(h.shape[0], 0, WIDTH)], 1) + given.empty.sum()
            case "ids":
                return found + self.table(given.ids.long())
        return found + torch.arange(h.shape[1])[:, None] * 0.01 + torch.ones(WIDTH) * torch.tensor(0.5)


PLAIN = [Dense, Norm, Attention, Convolution, Branches]
HABITS = [
    Auxiliary,
    Auxiliary,
    Number,
    Counter,
    Carried,
    Setting,
    Hooked,
    Scaled,
    OneHot,
    Sliced,
    Branching,
    Lazy,
    Lazy,
    Closure,
    Checkpointed,
    LayerDrop,
    InPlace,
    NoGradient,
    InnerGradient,
    Custom,
    Buffers,
    Normed,
    Odd,
]


@dataclass
class Result:
    """What some networks return."""

    value: Tensor
    hidden: Any = None
    names: list[str] = field(default_factory=list)


class Network(nn.Module):
    """Parts in a random order, and what they return in one of several forms."""

    forms = ("tensor", "tuple", "dictionary", "dataclass", "twice", "none")

    def __init__(self, rng: random.Random, habits: list[type[Part]] = HABITS) -> None:
        super().__init__()
        kinds = [rng.choice(habits if rng.random() < 0.6 else PLAIN) for _ in range(rng.randint(3, 6))]
        if not set(kinds).intersection(habits):
            kinds[-1] = rng.choice(habits)
        self.parts = nn.ModuleList(kind(rng) for kind in kinds)
        self.form = rng.choice(self.forms)

    def losses(self) -> list[Tensor]:
        """What the parts have left for the loss."""
        return [loss for part in self.parts for loss in part.losses()]

    def advance(self) -> None:
        """What a loop changes between steps."""
        for part in self.parts:
            if isinstance(part, Setting):
                part.advance()

    def forward(self, x: Tensor, extras: dict[str, Tensor], mask: Tensor | None = None, flag: bool = False) -> Any:
        given = Given(extras["ids"], extras["lengths"], extras["empty"], mask, flag)
        h, middle = x, x
        for index, part in enumerate(self.parts):
            h = part(h, given)
            if index == 1:
                middle = h
        match self.form:
            case "tuple":
                return h, middle.sin(), None, 3
            case "dictionary":
                return {"value": h, "hidden": [middle.sin(), middle.detach()], "flag": flag}
            case "dataclass":
                return Result(h, middle.sin(), ["value", "hidden"])
            case "twice":
                return h, h
            case "none":
                return h, None
        return h
