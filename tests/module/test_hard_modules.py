"""Modules with what makes recomputation hard: views, state, randomness, opaque operations. All plans are exact."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.module.models import ROWS, WIDTH, TwoInputs, built, images, rows, tokens
from tests.module.random_modules import random_plan
from tests.module.steps import (
    assert_same,
    assert_trains_exactly,
    following,
    keep_nothing,
    measured_for,
    peak_of_step,
    recomputing,
    squares,
)


class Recurrent(nn.Module):
    """An LSTM, which is one operation of several outputs, and a cell unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.1)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        sequence, (last, _) = self.layers(hidden.view(32, -1, WIDTH))
        state = last[-1]
        for step in range(4):
            state = self.cell(sequence[:, step], state)
        return sequence.tanh().square(), state


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden.view(32, -1, WIDTH))


class ViewsOut(nn.Module):
    """Outputs that share one storage, an input that is an output, and a parameter that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        inner = F.gelu(self.layer(hidden))
        result = torch.tanh(inner).square()
        return result.t(), result[:5], inner, hidden, self.layer.weight


class Vision(nn.Module):
    """Group and instance normalisation, in-place leaky ReLU, pooling with indices, channel dropout."""

    def __init__(self, track_running_stats: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.groups = nn.GroupNorm(2, 8)
        self.instances = nn.InstanceNorm2d(8, affine=True, track_running_stats=track_running_stats)
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.groups(self.convolution(pixels)), 0.1, inplace=True)
        hidden = F.dropout2d(F.silu(self.instances(hidden)), 0.2, self.training)
        return self.up(F.max_pool2d(hidden, 2)).square()


class VisionWithStatistics(Vision):
    """Running statistics of instances, which torch computes in other operations than those of batches."""

    def __init__(self) -> None:
        super().__init__(track_running_stats=True)


class Parametrised(nn.Module):
    """Spectral norm writes buffers that the forward then reads; weight norm computes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(hidden))).sin()


class Indexing(nn.Module):
    """Masks, gathers and cumulative sums of integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        high = (indices > WIDTH // 2)[:, None]
        hidden = self.layer(self.embedding(indices))
        hidden = torch.where(high, hidden.exp(), hidden.sin()).masked_fill(high, 0.5)
        return hidden[indices].gather(1, indices[:, None]), F.softmax(hidden, dim=-1).cumsum(dim=-1)


class Spectrum(nn.Module):
    """Complex values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(F.gelu(self.layer(hidden)))
        return torch.fft.irfft(spectrum * spectrum.conj()).tanh()


class Noisy(nn.Module):
    """Every kind of random operation, in and out of the graph of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = F.alpha_dropout(F.rrelu(self.layer(hidden), training=True), 0.1, training=True)
        noise = torch.randn_like(hidden) * torch.bernoulli(torch.sigmoid(hidden.detach()))
        return torch.tanh(mixed + noise * self.layer(mixed)).square()


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.exp()

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return gradient * value.exp()


class Custom(nn.Module):
    """An autograd function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return Exponential.apply(F.gelu(self.layer(hidden)).tanh()).square()


class Counting(nn.Module):
    """Buffers of its own, written in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        hidden = F.gelu(self.layer(hidden))
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return (hidden - self.average).tanh().square() + self.count


class InPlace(nn.Module):
    """Writes into fresh storages, into slices of them, and through views of views."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        value = self.norm(F.dropout(self.layer(hidden), 0.3, self.training, inplace=True)).mul_(2)
        value[: ROWS // 4] = 0
        other = value.clone()
        other.view(2, -1, WIDTH)[0, :, 0].add_(value[: ROWS // 2, 1])
        return F.relu_(other).log_softmax(-1)


class WithoutGradient(nn.Module):
    """A branch without gradients beside one with, and a parameter that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(self.teacher(hidden), dim=-1)
        found = self.student(hidden)
        return (wanted * found.sin() * found.detach().exp()).tanh()


class BroadcastTarget(nn.Module):
    """One operation gives a view of what the module computed and, for a later block's backward, one of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("target", torch.randn(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        found, wanted = torch.broadcast_tensors(hidden, self.target)
        return torch.tanh((found * wanted).exp()).sum(0)


MODULES: dict[str, tuple[Callable[..., nn.Module], Tensor]] = {
    "recurrent": (Recurrent, rows()),
    "encoder": (Encoder, rows()),
    "views-out": (ViewsOut, rows()),
    "vision": (Vision, images()),
    "vision-with-statistics": (VisionWithStatistics, images()),
    "parametrised": (Parametrised, rows()),
    "indexing": (Indexing, tokens()),
    "spectrum": (Spectrum, rows()),
    "noisy": (Noisy, rows()),
    "custom": (Custom, rows()),
    "counting": (Counting, rows()),
    "in-place": (InPlace, rows()),
    "without-gradient": (WithoutGradient, rows()),
    "broadcast-target": (BroadcastTarget, rows()),
}
every_module = pytest.mark.parametrize(("make", "sample"), MODULES.values(), ids=MODULES)


@every_module
def test_demanding_and_random_plans_are_exact(make, sample):
    network = built(make)
    measured = measured_for(network, sample)
    for plan in [keep_nothing(measured), *(random_plan(measured.problem, seed) for seed in range(4))]:
        model = following(measured, copy.deepcopy(network), plan)
        assert_trains_exactly(model, [sample] * 2)
        model.zero_grad()
        assert peak_of_step(model, (sample,)) <= model.plan.peak_bytes * 1.02 + (64 << 10)


@every_module
def test_two_forwards_before_their_backwards_are_exact(make, sample):
    model = recomputing(built(make), sample)
    records = []
    for module in (copy.deepcopy(model.original), model):
        torch.manual_seed(1)
        losses = [squares(module(sample)) for _ in range(2)]
        losses[0].backward()
        losses[1].backward()
        records.append({name: parameter.grad for name, parameter in module.named_parameters()})
        records[-1]["random stream"] = torch.get_rng_state()
    assert_same(records[1], records[0])


def test_one_tensor_may_be_given_twice():
    sample = rows(1)
    assert_trains_exactly(recomputing(built(TwoInputs), (sample, sample)), [(sample, sample), (rows(2), rows(3))])


def test_a_module_that_takes_options_is_planned_for_these():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden, mask=None, *, scale=1.0, names=("a", "b")):
            hidden = F.gelu(self.layer(hidden)) * scale
            return {names[0]: hidden.tanh(), names[1]: hidden if mask is None else hidden * mask}

    sample = {"hidden": rows(1), "mask": None, "scale": 3.0, "names": ("x", "y")}
    model = recomputing(built(Optional), sample)
    output = model(**sample)
    assert list(output) == ["x", "y"]
    expected = model.original(**sample)
    assert all(torch.equal(output[name], expected[name]) for name in expected)
    assert model.plan.recomputations > 0
