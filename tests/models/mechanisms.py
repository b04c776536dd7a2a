"""Small models, each of which uses one mechanism of PyTorch that is easily traced wrongly: gradients and state."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.models.factories import VOCABULARY, Factories, Model, images, on, tokens


def square() -> Tensor:
    """A batch of rows."""
    return torch.randn(4, 8)


class ScaledSquare(torch.autograd.Function):
    """A number among the arguments; the backward is on purpose not the derivative, to show who computes it."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x.square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * gradient * x, None


class Halves(torch.autograd.Function):
    """Several outputs of which one is an integer, arguments that are no tensors, gradients that are None."""

    @staticmethod
    def forward(ctx, x, mode, shift, bias, slope=None):
        order = x.argsort(dim=-1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x, slope)
        left, right = x.clone().chunk(2, dim=-1)
        return left.contiguous() + bias, right * (shift if mode == "shifted" else 1), order

    @staticmethod
    def backward(ctx, of_left, of_right, of_order):
        x, slope = ctx.saved_tensors
        gradient = torch.cat([of_left, 5 * of_right], dim=-1) + x
        return gradient * (1 if slope is None else slope), None, None, of_left.sum(0), None


scaled_square = ScaledSquare.apply  # bound when the file is imported, as kernels in libraries are
halves = Halves.apply


@torch.library.custom_op("model_zoo::scaled_sine", mutates_args=())
def scaled_sine(x: Tensor, factor: float) -> Tensor:
    """An operator of a library outside of PyTorch: the dispatcher knows it, nothing can look into it."""
    return factor * x.sin()


def _keep_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def _slope_of_sine(ctx, gradient):
    (x,) = ctx.saved_tensors
    return 2 * ctx.factor * gradient * x.cos(), None  # twice the derivative: on purpose, as above


scaled_sine.register_autograd(_slope_of_sine, setup_context=_keep_input)


class WithOperator(nn.Module):
    """A registered operator between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(scaled_sine(self.first(x), 0.5), 0.1))


class PerSample(nn.Module):
    """One layer mapped over the batch, and one whose weights a network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.made, self.maker = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.vmap(lambda row: self.layer(row).softmax(dim=0))(x)
        weight = self.maker(x.mean(dim=0)).view(4, 8)
        return torch.func.functional_call(self.made, {"weight": weight}, hidden)


class WithFunctions(nn.Module):
    """Custom functions called through their class, or through names bound at import."""

    def __init__(self, bound: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias, self.slope = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((8,), 2.0))
        self.square, self.halves = (scaled_square, halves) if bound else (None, None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        square, split = self.square or ScaledSquare.apply, self.halves or Halves.apply
        hidden = square(self.first(x), 0.5).relu()
        left, right, order = split(hidden, "shifted", 2.0, self.bias, self.slope)
        return self.last(torch.cat([left, right], dim=-1)), order


class Statistics(nn.Module):
    """Batch normalisation, and a buffer that counts the calls and is read."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        features = self.norm(self.convolution(x)).relu().mean(dim=(2, 3))
        return self.head(features) * self.calls / (1 + self.calls)


class MovingAverage(nn.Module):
    """A codebook that follows its data: buffers written in a region without gradient, gradients passed straight on."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encode(x)
        nearest = torch.cdist(hidden, self.codes).argmin(dim=-1)
        chosen = F.embedding(nearest, self.codes)
        with torch.no_grad():
            counts = F.one_hot(nearest, 5).to(hidden.dtype)
            self.codes.mul_(0.9).add_(counts.mT @ hidden, alpha=0.1)
        passed = hidden + (chosen - hidden).detach()
        return self.decode(passed), F.mse_loss(hidden, chosen.detach())


class Autocast(nn.Module):
    """A region in lower precision around a weight that is used twice, and a region inside it that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = F.dropout(self.norm(self.layer(x)).relu(), 0.1)
            hidden = self.layer(hidden)
            with torch.autocast("cpu", enabled=False):
                hidden = self.head(hidden.float())
            scores = hidden @ hidden.mT
        return scores.float().softmax(dim=-1) @ hidden


class Checkpointed(nn.Module):
    """Layers that PyTorch recomputes already, by either of its two ways, the second within the first."""

    def __init__(self, *reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(2 * len(reentrant))
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for place, reentrant in enumerate(self.reentrant):
            x = checkpoint(partial(self.pair, 2 * place), x, use_reentrant=reentrant)
        return x

    def pair(self, place: int, x: Tensor) -> Tensor:
        """Two layers, the second in a checkpoint of its own."""
        return checkpoint(self.layers[place + 1], self.layers[place](x), use_reentrant=False)


class WithoutGradient(nn.Module):
    """A teacher in a region without gradient, detached values, tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(8, 8), torch.rand(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        with torch.no_grad():
            target = F.dropout(self.layer(2 * x), 0.1).softmax(dim=-1)
            with torch.enable_grad():
                bonus = self.layer(x).tanh()
        loss = F.kl_div(hidden.log_softmax(dim=-1), target, reduction="batchmean")
        constant = torch.tensor([1.0, 2.0]).to(hidden).sum() * x.new_ones(8)
        return loss + (hidden.detach() * hidden * self.weights).sum() + (constant * hidden + bonus).mean()


class StudentAndTeacher(nn.Module):
    """Self-distillation: one half trains, the other runs without gradient, convolutions among its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
            for _ in range(2)
        )

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        """What the teacher says."""
        return self.teacher(x).softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.student(x), self.target(x))


class LowRank(nn.Module):
    """A frozen linear layer with a small trainable part beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, rank), nn.Linear(rank, layer.out_features)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(self.dropout(x))) * 2.0


def low_rank() -> Model:
    """Integers in, a frozen embedding, adapters: nothing before the first adapter needs a gradient."""
    embedding = nn.Embedding(VOCABULARY, 8).requires_grad_(False)
    layers = [LowRank(nn.Linear(8, 8)), nn.GELU(), LowRank(nn.Linear(8, 8)), nn.LayerNorm(8).requires_grad_(False)]
    return on(nn.Sequential(embedding, *layers, nn.Linear(8, 4).requires_grad_(False)), tokens(2, 6))


def frozen() -> Model:
    """A trained trunk whose normalisation still counts batches, and a new head."""
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).requires_grad_(False)
    return on(
        nn.Sequential(trunk, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)), images(size=8)
    )


def normalised(weight: str) -> Model:
    """Weight and spectral norm: as parametrizations, or as the hooks of older code."""
    if weight == "parametrized":
        first, last = parametrizations.weight_norm(nn.Linear(8, 8)), parametrizations.spectral_norm(nn.Linear(8, 8))
    else:
        with warnings.catch_warnings():  # the library would like these to be gone; models still use them
            warnings.simplefilter("ignore", FutureWarning)
            first, last = weight_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 8))
    return on(nn.Sequential(first, nn.ReLU(), last, nn.Tanh(), nn.Linear(8, 2)), square())


def orthogonal() -> Model:
    """A weight that is a matrix exponential of its parameter."""
    layer = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp", use_trivialization=False)
    return on(nn.Sequential(layer, nn.Softsign(), nn.Linear(8, 2)), square())


MECHANISMS: Factories = {
    "custom_functions": lambda: on(WithFunctions(bound=False), square()),
    "custom_functions_bound_at_import": lambda: on(WithFunctions(bound=True), square()),
    "custom_operator": lambda: on(WithOperator(), square()),
    "mapped_and_made_layers": lambda: on(PerSample(), square()),
    "statistics_and_a_counter": lambda: on(Statistics(), images(size=8)),
    "moving_average": lambda: on(MovingAverage(), square()),
    "autocast": lambda: on(Autocast(), square()),
    "checkpoint": lambda: on(Checkpointed(False, False), square()),
    "checkpoint_reentrant": lambda: on(Checkpointed(True, False), square().requires_grad_()),
    "regions_without_gradient": lambda: on(WithoutGradient(), square()),
    "student_and_teacher": lambda: on(StudentAndTeacher(), images(size=8)),
    "frozen_trunk": frozen,
    "low_rank_adapters": low_rank,
    "norm_parametrizations": partial(normalised, "parametrized"),
    "norm_hooks": partial(normalised, "hooks"),
    "orthogonal_weight": orthogonal,
}
