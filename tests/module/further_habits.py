"""Further parts of random networks: libraries of layers, custom functions, hooks, and ways to write what eager allows.

As in `habits`, each maps a value [batch, length, WIDTH] to a value of that shape.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.module.habits import WIDTH, Part


class Scale(torch.autograd.Function):
    """Saves what it makes, and an integer tensor that takes no gradient."""

    @staticmethod
    def forward(ctx, value, places):
        found = torch.exp(-value.square())
        ctx.save_for_backward(value, found, places)
        ctx.set_materialize_grads(False)
        return found, places.add(1)

    @staticmethod
    def backward(ctx, gradient, _):
        value, found, places = ctx.saved_tensors
        return None if gradient is None else -2 * value * found * gradient * places.ne(-1), None


class Straight(torch.autograd.Function):
    """With a context that is set up apart."""

    @staticmethod
    def forward(value):
        return value.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


class Written(torch.autograd.Function):
    """Writes into its input, and says so."""

    @staticmethod
    def forward(ctx, value):
        ctx.mark_dirty(value)
        return value.mul_(0.5)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Two(torch.autograd.Function):
    """Computes its backward by autograd from the input alone."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value, weight)
        return torch.tanh(value @ weight), value.mean()

    @staticmethod
    def backward(ctx, gradient, of_mean):
        value, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            outputs = torch.tanh(value @ weight), value.mean()
        return torch.autograd.grad(outputs, (value, weight), (gradient, of_mean))


class Functions(Part):
    options = ("scale", "straight", "written", "two", "in a row")

    def forward(self, h, given):
        found = self.layer(h)
        match self.option:
            case "scale":
                return Scale.apply(found, torch.arange(WIDTH))[0]
            case "straight":
                return Straight.apply(found) * torch.sigmoid(h)
            case "written":
                return Written.apply(torch.tanh(found) * 1.0)
            case "two":
                value, mean = Two.apply(h.float(), self.layer.weight.float())
                return (value * (1 + mean)).to(h.dtype)
        for _ in range(3):
            found, _ = Scale.apply(found, torch.arange(WIDTH))
        return found


class Recurrent(Part):
    options = ("gru", "lstm", "cells", "both ways", "packed", "stateful cell")
    refused = ("packed",)

    def __init__(self, rng):
        super().__init__(rng)
        makers = {"gru": nn.GRU, "lstm": nn.LSTM, "packed": nn.GRU}
        if self.option == "both ways":
            self.net = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        elif self.option in makers:
            self.net = makers[self.option](WIDTH, WIDTH, batch_first=True)
        else:
            self.net = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, h, given):
        match self.option:
            case "cells":
                state, found = torch.zeros_like(h[:, 0]), []
                for place in range(min(h.shape[1], 3)):
                    state = self.net(h[:, place], state)
                    found.append(state)
                return torch.cat([torch.stack(found, 1), h[:, len(found) :]], 1)
            case "stateful cell":
                return h + self.net(h.mean(1))[:, None]
            case "packed":
                lengths = given.lengths.clamp(max=h.shape[1]).cpu()
                packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
                found, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], True, total_length=h.shape[1])
                return h + found
        return h + self.net(h)[0]


class Tables(Part):
    options = ("embedding", "padding", "bag", "one table twice", "positions", "large ids")

    def __init__(self, rng):
        super().__init__(rng)
        padding = 0 if self.option == "padding" else None
        self.table = nn.Embedding(WIDTH, WIDTH, padding_idx=padding, max_norm=None)
        self.bag = nn.EmbeddingBag(WIDTH, WIDTH, mode="sum")
        self.register_buffer("positions", torch.arange(64)[None], persistent=False)

    def forward(self, h, given):
        ids = given.ids.long()
        match self.option:
            case "bag":
                return h + self.bag(ids)[:, None]
            case "one table twice":
                return h + F.linear(torch.tanh(self.table(ids)), self.table.weight)
            case "positions":
                return h + self.table(self.positions[:, : h.shape[1]] % WIDTH)
            case "large ids":
                return h + self.table((ids * 7 + 3).remainder(WIDTH))
        return h + self.table(ids)


class Spectral(Part):
    options = ("fft", "complex weight", "view as complex", "polar")

    def __init__(self, rng):
        super().__init__(rng)
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.3)

    def forward(self, h, given):
        value = h.float()
        match self.option:
            case "fft":
                return (h + torch.fft.fft(torch.fft.fft(value, dim=-1), dim=-2).real * 0.1).to(h.dtype)
            case "complex weight":
                spectrum = torch.fft.rfft(value, dim=-1) * torch.view_as_complex(self.weight)
                return torch.fft.irfft(spectrum, n=WIDTH, dim=-1).to(h.dtype)
            case "view as complex":
                pairs = torch.view_as_complex(value.reshape(*h.shape[:-1], -1, 2).contiguous())
                turn = torch.polar(torch.ones(h.shape[1], 1), torch.arange(h.shape[1]).float()[:, None])
                return torch.view_as_real(pairs * turn).flatten(-2).to(h.dtype)
        turned = torch.polar(value.abs() + 0.1, torch.tanh(self.layer(h)).float())
        return (turned.real + turned.imag).to(h.dtype)


class Indexed(Part):
    options = (
        "gather", "scatter", "index_put", "masked_fill", "where", "take_along", "sorted", "topk", "cumulated", "unfold",
        "masked_scatter", "index_add", "diagonal",
    )  # fmt: skip

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        ids = given.ids.long()
        match self.option:
            case "gather":
                return found.gather(2, ids[..., None].expand(-1, -1, WIDTH))
            case "scatter":
                return found.scatter(2, ids[..., None], h[..., :1] * 0.5)
            case "index_put":
                out = found.clone()
                out[:, :, ids[0] % WIDTH] = h.mean()
                return out
            case "masked_fill":
                return found.masked_fill(ids[..., None] % 2 == 0, 0.0)
            case "where":
                return torch.where(ids[..., None] > WIDTH // 2, found, h)
            case "take_along":
                return torch.take_along_dim(found, found.argsort(-1), -1)
            case "sorted":
                return found.sort(dim=-1, stable=True).values
            case "topk":
                return found + found.topk(3, -1).values.sum(-1, keepdim=True)
            case "cumulated":
                return found.cumsum(1) / (1 + torch.arange(h.shape[1])[:, None])
            case "unfold":
                return F.pad(found, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)
            case "masked_scatter":
                return found.masked_scatter(torch.ones_like(found, dtype=torch.bool), h)
            case "index_add":
                return found.index_add(1, torch.zeros(1, dtype=torch.long), h[:, :1])
        return found + torch.diagonal(found @ found.mT, dim1=1, dim2=2)[..., None]


class OnTensors(Part):
    """Hooks on tensors within forward, and gradients that are kept."""

    options = ("inner", "input", "output", "logged", "kept", "post", "multi")
    refused = ("input",)  # what made it may be the root

    def __init__(self, rng):
        super().__init__(rng)
        self.seen: list[float] = []
        self.kept: Tensor | None = None

    def forward(self, h, given):
        inner = self.layer(h)
        found = torch.tanh(inner)
        if not (torch.is_grad_enabled() and inner.requires_grad):
            return found
        match self.option:
            case "inner" | "output":
                (inner if self.option == "inner" else found).register_hook(lambda grad: grad * 0.5)
            case "input":
                if not h.is_leaf:
                    h.register_hook(lambda grad: grad * 0.5)
            case "logged":
                inner.register_hook(self._log)
            case "kept":
                found.retain_grad()
                self.kept = found
            case "post":
                inner.grad_fn.register_hook(lambda into, _: tuple(None if one is None else one * 0.5 for one in into))
            case "multi":
                torch.autograd.graph.register_multi_grad_hook((inner,), lambda grads: self.seen.append(len(grads)))
        return found

    def _log(self, grad: Tensor) -> None:
        del self.seen[8:]
        self.seen.insert(0, float(grad.abs().sum()))


class Tied(Part):
    options = ("transposed", "same layer", "same parameter", "sliced")

    def __init__(self, rng):
        super().__init__(rng)
        self.other = nn.Linear(WIDTH, WIDTH)
        if self.option == "same layer":
            self.other = self.layer
        elif self.option == "same parameter":
            self.other.weight = self.layer.weight

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        if self.option == "transposed":
            return F.linear(found, self.layer.weight.t(), self.other.bias)
        if self.option == "sliced":
            return torch.cat([F.linear(found, self.layer.weight[: WIDTH // 2]), found[..., WIDTH // 2 :]], -1)
        return self.other(found)


class Types(Part):
    """Of which type what runs is."""

    options = ("autocast", "no autocast", "float", "double", "half weight", "promoted", "types read")

    def forward(self, h, given):
        match self.option:
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    found = self.layer(h)
                return torch.tanh(found).to(h.dtype)
            case "no autocast":
                with torch.autocast("cpu", enabled=False):
                    return torch.tanh(F.linear(h.float(), self.layer.weight)).to(h.dtype)
            case "float":
                return torch.tanh(self.layer(h)).float().softmax(-1).to(h.dtype)
            case "double":
                return (h + (self.layer(h).double() * math.pi).sin()).to(h.dtype)
            case "half weight":
                return torch.tanh(F.linear(h.bfloat16(), self.layer.weight.bfloat16())).to(h.dtype)
            case "promoted":
                return torch.tanh(self.layer(h)) * torch.tensor(2) + torch.tensor(0.5, dtype=torch.float64)
        found = self.layer(h)
        return torch.tanh(found) if found.dtype is torch.float32 else torch.sigmoid(found)


class Asks(Part):
    """Reads what the call is like."""

    options = ("grad mode", "training", "requires_grad", "shape", "is_leaf", "strides", "version", "inference")

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        match self.option:
            case "grad mode":
                return found if torch.is_grad_enabled() else found * 1.0
            case "training":
                return found if self.training else found.sin()
            case "requires_grad":
                return found * (2 if h.requires_grad else 3)
            case "shape":
                return found / math.sqrt(h.shape[1]) if h.shape[1] > 4 else found
            case "is_leaf":
                return found.sin() if h.is_leaf else found
            case "strides":
                return found if h.is_contiguous() else found.sin()
            case "version":
                return found * (1 + h.dim())
        return found.clone() if torch.is_inference_mode_enabled() else found


class Draws(Part):
    options = (
        "noise", "like", "bernoulli", "permutation", "dropout twice", "alpha", "feature", "gumbel", "multinomial",
        "uniform in place", "inner dropout", "channel",
    )  # fmt: skip

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        if not self.training:
            return found
        match self.option:
            case "noise":
                return found + 0.1 * torch.randn(h.shape)
            case "like":
                return found + 0.1 * torch.rand_like(found)
            case "bernoulli":
                return found * torch.bernoulli(torch.full_like(found, 0.8))
            case "permutation":
                return found[:, torch.randperm(h.shape[1])]
            case "dropout twice":
                return F.dropout(found, 0.3) + F.dropout(found, 0.3)
            case "alpha":
                return F.alpha_dropout(found, 0.2, training=True)
            case "feature":
                return F.feature_alpha_dropout(found, 0.2, training=True)
            case "gumbel":
                return found + F.gumbel_softmax(found, hard=self.layer.bias.numel() > 8)
            case "multinomial":
                return found + F.one_hot(
                    torch.multinomial(found.flatten(0, 1).float().softmax(-1), 1)[:, 0], WIDTH
                ).sum(0)
            case "uniform in place":
                return found * torch.empty(h.shape).uniform_(0.5, 1.5)
            case "inner dropout":
                return self.layer(F.dropout(F.dropout(found, 0.1), 0.1)) * found
        return F.dropout1d(found.mT, 0.2).mT


class Nested(Part):
    options = ("checkpoint", "sequential", "grad twice", "no grad within", "saved hooks", "module list", "recursion")

    def __init__(self, rng):
        super().__init__(rng)
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, h, given):
        match self.option:
            case "checkpoint":
                return checkpoint(
                    lambda value: checkpoint(self.inner[0], value, use_reentrant=False), h, use_reentrant=False
                )
            case "sequential":
                whole = nn.Sequential(*self.inner)
                return checkpoint_sequential(whole, 2, h, use_reentrant=False)
            case "grad twice":
                with torch.enable_grad(), torch.no_grad(), torch.set_grad_enabled(True):
                    return self.inner[0](h)
            case "no grad within":
                with torch.no_grad():
                    weight = torch.sigmoid(self.inner[1](h))
                return self.inner[0](h) * weight
            case "saved hooks":
                with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
                    return self.inner[0](h)
            case "module list":
                for layer in reversed(self.inner):
                    h = layer(h) + h
                return h
        return self._again(h, 3)

    def _again(self, h: Tensor, times: int) -> Tensor:
        return h if times == 0 else self._again(self.inner[times % 2](h), times - 1)


class Layers(Part):
    """Layers of PyTorch's with their own ways."""

    options = (
        "encoder", "decoder", "instance", "rms", "local response", "pool", "upsample", "fold", "bilinear", "cosine",
        "glu", "prelu", "transposed", "grouped", "adaptive", "pixels", "unflatten",
    )  # fmt: skip

    def __init__(self, rng):
        super().__init__(rng)
        makers: dict[str, Any] = {
            "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, batch_first=True),
            "decoder": lambda: nn.TransformerDecoderLayer(WIDTH, 2, WIDTH, 0.1, batch_first=True, norm_first=True),
            "instance": lambda: nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=False),
            "rms": lambda: nn.RMSNorm(WIDTH),
            "local response": lambda: nn.LocalResponseNorm(2),
            "bilinear": lambda: nn.Bilinear(WIDTH, 4, WIDTH),
            "prelu": lambda: nn.PReLU(WIDTH),
            "transposed": lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1),
            "grouped": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4, padding_mode="circular"),
        }
        self.net = makers.get(self.option, nn.Identity)()

    def forward(self, h, given):
        found = torch.tanh(self.layer(h))
        by_channel = found.mT
        match self.option:
            case "encoder" | "rms":
                return self.net(found)
            case "decoder":
                return self.net(found, h)
            case "instance" | "transposed" | "grouped":
                return self.net(by_channel).mT
            case "local response":
                return self.net(by_channel.contiguous()).mT
            case "pool":
                return F.max_pool1d(by_channel, 3, 1, 1).mT + F.avg_pool1d(by_channel, 3, 1, 1).mT
            case "upsample":
                return F.interpolate(by_channel, scale_factor=2.0, mode="linear")[..., : h.shape[1]].mT
            case "fold":
                columns = F.unfold(found[:, None], (1, 4), stride=(1, 4))
                return F.fold(columns, (h.shape[1], WIDTH), (1, 4), stride=(1, 4))[:, 0]
            case "bilinear":
                return self.net(found.contiguous(), h[..., :4].contiguous())
            case "cosine":
                return found * F.cosine_similarity(found, h, dim=-1)[..., None]
            case "glu":
                return torch.cat([F.glu(found), F.hardswish(found)[..., WIDTH // 2 :]], -1)
            case "prelu":
                return self.net(found.flatten(0, 1)).view(h.shape)
            case "adaptive":
                return found + F.adaptive_avg_pool1d(by_channel, 1).mT
            case "pixels":
                return F.pixel_shuffle(by_channel[..., None], 2).reshape(h.shape) + found
        return found.unflatten(-1, (4, -1)).softmax(-1).flatten(-2)


class Writes(Part):
    """Writes into views, and into what was made in another way."""

    options = (
        "view",
        "slice",
        "split",
        "expanded",
        "copied",
        "twice",
        "relu_",
        "add_ residual",
        "zero_",
        "out",
        "set item",
    )

    def forward(self, h, given):
        found = torch.tanh(self.layer(h)) * 1.0
        match self.option:
            case "view":
                found.view(-1, WIDTH).mul_(0.5)
            case "slice":
                found[:, ::2] += 1
            case "split":
                left, right = torch.tensor_split(found, 2, -1)
                left.add_(right)
            case "expanded":
                found += h.mean(1, keepdim=True).expand_as(h)
            case "copied":
                found = torch.zeros_like(found).copy_(found)
            case "twice":
                found.mul_(2).add_(h)
            case "relu_":
                found = F.relu_(found)
            case "add_ residual":
                found.add_(h, alpha=0.5)
            case "zero_":
                with torch.no_grad():
                    scratch = torch.empty_like(found).zero_()
                found = found + scratch
            case "out":
                with torch.no_grad():
                    mask = torch.empty_like(found)
                    torch.sigmoid(h.detach(), out=mask)
                found = found * mask
            case "set item":
                out = h.new_zeros(h.shape)
                out[:, 0] = found[:, 0]
                out[..., 1:] = found[..., :-1]
                found = out
        return found


class Structured(Part):
    """Hands lists, dictionaries and generators about."""

    options = ("dictionary", "list", "generator", "chunks", "stacked", "einsum", "keyword", "partial", "context")
    scale: ClassVar[float] = 0.5

    def forward(self, h, given):
        match self.option:
            case "dictionary":
                table = {name: torch.tanh(part) for name, part in zip("ab", self.layer(h).chunk(2, -1), strict=True)}
                return torch.cat([table["b"], table["a"]], -1)
            case "list":
                return torch.stack([torch.tanh(self.layer(h)) * factor for factor in (1.0, 0.5)]).sum(0)
            case "generator":
                return sum(torch.tanh(self.layer(h) + place) for place in range(2))
            case "chunks":
                return torch.cat([torch.tanh(self.layer(chunk)) for chunk in h.split(3, 1)], 1)
            case "stacked":
                return torch.stack([self.layer(h), h], -1).max(-1).values
            case "einsum":
                return torch.einsum("blw,bmw->blm", h, h).softmax(-1) @ torch.tanh(self.layer(h))
            case "keyword":
                return self._with(value=h, scale=self.scale)
            case "partial":
                return torch.vmap(self.layer)(h).tanh()
        with contextlib.nullcontext(), torch.profiler.record_function("part"):
            return torch.tanh(self.layer(h))

    def _with(self, *, value: Tensor, scale: float) -> Tensor:
        return torch.tanh(self.layer(value)) * scale


FURTHER = [
    Functions,
    Functions,
    Recurrent,
    Tables,
    Spectral,
    Indexed,
    Indexed,
    OnTensors,
    OnTensors,
    Tied,
    Types,
    Types,
    Asks,
    Draws,
    Draws,
    Nested,
    Nested,
    Layers,
    Layers,
    Writes,
    Writes,
    Structured,
]
