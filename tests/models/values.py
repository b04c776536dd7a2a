"""Small models that are hard in what their values are: views, indices, structures, shared and routed parts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.factories import Factories, images, on


class Bounds(NamedTuple):
    """A named tuple that goes in and comes out."""

    low: Tensor
    high: Tensor


@dataclass
class Options:
    """A dataclass that goes in: a tensor, a number, a text, nothing."""

    scale: Tensor
    power: int = 2
    mode: str = "tanh"
    extra: Tensor | None = None


@dataclass(frozen=True)
class Result:
    """A frozen dataclass that comes out, with another inside."""

    hidden: Tensor
    bounds: Bounds
    options: Options
    history: tuple[Any, ...] = ()


class InPlaceAndViews(nn.Module):
    """Writes through views and slices, into values that were read before and are read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        before = hidden.sigmoid()
        copy = hidden.clone()
        copy[:, 2:4] = 0
        pairs = copy.view(4, 2, 4)
        pairs.mul_(2.0)
        pairs[0].add_(before[0].view(2, 4))
        filled = torch.zeros(4, 8)
        filled[:, :4] = copy[:, 4:]
        filled[:, 4:].copy_(hidden[:, :4])
        filled.diagonal().fill_(0.5)
        filled += x.masked_fill(x > 1, 0.0)
        filled.t()[0].neg_()
        F.relu_(filled)
        return self.last(copy + filled.sin()) * before


class Indexing(nn.Module):
    """Einstein sums, and every way to pick elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.heads = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8, 3))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        z = torch.einsum("bd,hde->bhe", self.layer(x), self.heads)
        weights = torch.einsum("bhe,bge->bhg", z, z).softmax(dim=-1)
        by_list, by_mask = z[:, [0, 2]], z[:, torch.arange(4) > 0, ::2]
        gathered = z.gather(1, torch.zeros(4, 1, 3, dtype=torch.long)) + z[..., None, 0].mean()
        best, places = z.topk(2, dim=1)
        low, middle, high = z.unbind(-1)
        chosen = torch.where(low > 0, middle, high)
        scattered = torch.zeros_like(z).scatter_add(1, places, best)
        added = torch.zeros(5, 3).index_add(0, torch.tensor([0, 1, 4, 1]), z[:, 0])
        total = sum(part.sum() for part in (by_list, by_mask, gathered, chosen, weights))
        return total, z.chunk(2, dim=1)[1], places, scattered.flip(0).roll(1, dims=1), added.cumsum(0).tril()


class Structures(nn.Module):
    """Nested arguments by position and by keyword, of which some are no tensors; nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, pair: Any, *, options: Options, bounds: Bounds, flag: bool = False) -> dict[str, Any]:
        first, named = pair
        hidden = self.layer(first) + self.layer(named["other"]) * options.scale
        hidden = getattr(torch, options.mode)(hidden) ** options.power if flag else hidden
        clamped = torch.clamp(hidden, bounds.low, bounds.high)
        result = Result(clamped, Bounds(hidden.amin(), hidden.amax()), options, (hidden, None, ["text", hidden + 1]))
        return OrderedDict(result=result, number=3, tensors=[clamped, {"input": first}], nothing=None)


class TwoTowers(nn.Module):
    """One encoder run on two views of the data, and a contrastive loss between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = (F.normalize(self.encoder(part), dim=-1) for part in (left, right))
        logits = left @ right.mT / self.temperature.exp()
        labels = torch.arange(logits.size(0))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.mT, labels)) / 2


class DenseExperts(nn.Module):
    """A mixture whose experts all run, weighted by their two best scores."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = self.router(x).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, scores.softmax(dim=-1))
        mixed = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (mixed * weights.unsqueeze(-2)).sum(dim=-1), weights.mean(dim=0).var()


class SpatialTransformer(nn.Module):
    """Images warped by what a network makes of them, then shuffled, padded and resized."""

    def __init__(self) -> None:
        super().__init__()
        self.localise = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.angles, self.mix = nn.Linear(16, 6), nn.Conv2d(3, 12, 3, padding="same", padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles(self.localise(x)).view(-1, 2, 3)
        warped = F.grid_sample(x, F.affine_grid(angles, list(x.shape), align_corners=False), align_corners=False)
        enlarged = F.pixel_shuffle(self.mix(warped), 2)
        smaller = F.interpolate(enlarged, scale_factor=0.5, mode="bilinear", align_corners=False)
        return F.pad(smaller, (1, 1, 0, 0), value=0.5) + torch.fft.ifft2(torch.fft.fft2(smaller)).real.mean()


class StochasticDepth(nn.Module):
    """Residual branches that are dropped for a part of the batch, and noise on the input."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Mish()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x)
        for layer in self.layers:
            kept = torch.empty(x.size(0), 1).bernoulli_(0.8)
            x = x + layer(x) * kept / 0.8
        return x + F.gumbel_softmax(x, tau=0.7)


def structures() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    options = Options(torch.rand(8), power=3)
    bounds = Bounds(torch.full((8,), -0.5), torch.full((8,), 0.5))
    return on(
        Structures(), (torch.randn(4, 8), {"other": torch.randn(4, 8)}), options=options, bounds=bounds, flag=True
    )


VALUES: Factories = {
    "in_place_and_views": lambda: on(InPlaceAndViews(), torch.randn(4, 8)),
    "einsum_and_indexing": lambda: on(Indexing(), torch.randn(4, 8)),
    "structures": structures,
    "two_towers": lambda: on(TwoTowers(), torch.randn(4, 8), torch.randn(4, 8)),
    "dense_experts": lambda: on(DenseExperts(), torch.randn(2, 5, 8)),
    "spatial_transformer": lambda: on(SpatialTransformer(), images(size=8)),
    "stochastic_depth": lambda: on(StochasticDepth(), torch.randn(6, 8)),
    "double_precision": lambda: on(TwoTowers().double(), torch.randn(4, 8).double(), torch.randn(4, 8).double()),
}
