"""How images lie, and what is copied for that: told without data as the CPU's kernels have it."""

import pytest
import torch
from torch import Tensor, nn

from rkgb.ir.sample import make_sample
from rkgb.shapes.dataless import Dataless
from rkgb.shapes.device import standing_for
from rkgb.shapes.watch import Clock, StorageWatch
from rkgb.torch_private.operations import safe_softmax
from rockmate import PeakMemory, estimate
from tests.forecast.test_eager_step import CPU, measured_bytes, observed

CHANNELS_LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format


def told(module: nn.Module, given: Tensor, run):
    """What `run(module, given)` makes by shapes alone."""
    dataless = Dataless(CPU)
    with standing_for(CPU, dataless.values), dataless.module(module), dataless.values.on():
        return run(module, dataless.sample(make_sample(module, given)).args[0])


def strides(tensors):
    """Of dimensions that have any."""
    return [[stride for size, stride in zip(one.shape, one.stride(), strict=True) if size != 1] for one in tensors]


def trained(module: nn.Module, given: Tensor):
    """The output, and the gradients of what is given and of the weight, as they are made."""
    given = given.detach().requires_grad_()
    output = module(given)
    return [output, *torch.autograd.grad(output, (given, module.weight), torch.ones_like(output))]


def images(dim: int, form: str, dtype: torch.dtype) -> Tensor:
    """Of 8 channels, which lie in that form."""
    sizes = (2, 8, 6, 10, 4)[: dim + 2]
    if form == "tokens":  # rows of channels, as attention has them
        return torch.randn(2, *sizes[2:], 8, dtype=dtype).movedim(-1, 1)
    if form == "cut":
        return torch.randn(2, 16, *sizes[2:], dtype=dtype)[:, :8]
    if form == "expanded":
        return torch.randn(2, 1, *sizes[2:], dtype=dtype).expand(sizes)
    dense = torch.randn(sizes, dtype=dtype)
    formats = {2: CHANNELS_LAST, 3: torch.channels_last_3d}
    return dense.contiguous(memory_format=formats[dim]) if form == "channels last" and dim in formats else dense


KINDS = {
    "plain": lambda dim, dtype: of(dim)(8, 16, 3, padding=1, dtype=dtype),
    "product": lambda dim, dtype: of(dim)(8, 16, 1, dtype=dtype),
    "steps": lambda dim, dtype: of(dim)(8, 16, 2, stride=2, bias=False, dtype=dtype),
    "depthwise": lambda dim, dtype: of(dim)(8, 8, 3, padding=1, groups=8, dtype=dtype),
    "groups": lambda dim, dtype: of(dim)(8, 16, 3, groups=2, dtype=dtype),
    "dilated": lambda dim, dtype: of(dim)(8, 16, 2, dilation=2, dtype=dtype),
    "transposed": lambda dim, dtype: of(dim, transposed=True)(8, 4, 2, stride=2, dtype=dtype),
}


def of(dim: int, transposed: bool = False) -> type[nn.Module]:
    return getattr(nn, f"Conv{'Transpose' if transposed else ''}{dim}d")


# In three dimensions it depends on the processor what computes with bfloat16.
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*((dim, dtype) for dim in (1, 2, 3) for dtype in (torch.float32, torch.float64)), (2, torch.bfloat16)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_convolutions_make_lies_as_it_does(kind, dim, dtype):
    for form in ("dense", "channels last", "tokens", "cut", "expanded"):
        for weights in (CONTIGUOUS, CHANNELS_LAST) if dim == 2 else (CONTIGUOUS,):
            module = KINDS[kind](dim, dtype).to(memory_format=weights)
            given = images(dim, form, dtype)
            made = trained(module, given)
            assert strides(told(module, given, trained)) == strides(made), (form, weights)


def scratch_bytes(run, *given: Tensor) -> int:
    """What an operation takes beside what it makes."""
    run(*given)
    with PeakMemory() as memory:
        made = run(*given)
    return memory.peak_bytes - sum(one.untyped_storage().nbytes() for one in made)


def told_scratch_bytes(run, *given: Tensor) -> int:
    dataless = Dataless(CPU)
    with standing_for(CPU, dataless.values), dataless.module(nn.Identity()):
        there = [dataless.twin(one) for one in given]
        with StorageWatch(CPU, Clock()) as watch:
            made = run(*there)
        held = most = 0
        for event in watch.stop():
            held += event.size_bytes
            most = max(most, held)
        return most - sum(one.untyped_storage().nbytes() for one in made)


ARGUMENTS = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def convolved(given: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.aten.convolution.default(given, weight, *ARGUMENTS),)


def convolved_back(gradient: Tensor, given: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    mask = [True, True, False]
    return torch.ops.aten.convolution_backward.default(gradient, given, weight, *ARGUMENTS, mask)[:2]


def multiplied(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.aten.mm.default(one, other),)


def normalised_back(gradient: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    size, rows = given.shape[-1], given.shape[:-1]
    mean, deviation = (torch.ones(*rows, 1, device=given.device) for _ in range(2))
    weight, bias = (torch.ones(size, device=given.device) for _ in range(2))
    return torch.ops.aten.native_layer_norm_backward.default(
        gradient, given, [size], mean, deviation, weight, bias, [True, True, True]
    )


@pytest.mark.parametrize("form", ["cut", "expanded"])
def test_what_lies_otherwise_than_a_kernel_wants_it_is_copied_first(form):
    """What kernels take beside differs by the processor, but not what is copied."""
    dense, weight, gradient = images(2, "dense", torch.float32), torch.randn(16, 8, 3, 3), torch.randn(2, 16, 6, 10)
    other = images(2, form, torch.float32)
    far = gradient.contiguous(memory_format=CHANNELS_LAST)
    factor, spread = torch.randn(24, 32), torch.randn(1, 1).expand(24, 32)
    rows, scattered = torch.randn(2, 10, 8), torch.randn(2, 8, 10).transpose(1, 2)
    for run, near, moved in (
        (convolved, (dense, weight), (other, weight)),
        (convolved_back, (gradient, dense, weight), (gradient, other, weight)),
        (convolved_back, (gradient, dense, weight), (far, dense, weight)),
        (convolved_back, (gradient, dense, weight), (far, other, weight)),
        (multiplied, (factor, factor.t()), (spread, factor.t())),
        (multiplied, (factor, factor.t()), (factor, torch.randn(32, 48)[:, ::2])),
        (normalised_back, (rows, rows), (scattered, rows)),
        (normalised_back, (rows, rows), (rows, scattered)),
    ):
        more = scratch_bytes(run, *moved) - scratch_bytes(run, *near)
        assert told_scratch_bytes(run, *moved) - told_scratch_bytes(run, *near) == more > 0, run


@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (2, 4, 64, 16), (1, 1, 100, 100), (4, 4, 33, 7)], ids=str)
def test_a_softmax_looks_for_rows_of_nothing(shape):
    def run(given: Tensor) -> tuple[Tensor, ...]:
        return (safe_softmax(given, -1),)

    given = torch.randn(shape)
    assert told_scratch_bytes(run, given) == scratch_bytes(run, given)


class TokensAndImages(nn.Module):
    """A network over tokens with a convolution for each channel in its middle, as PVT and Segformer have them."""

    def __init__(self, width: int = 16, side: int = 16) -> None:
        super().__init__()
        self.side = side
        self.wide = nn.Linear(width, 4 * width)
        self.depthwise = nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.wide(tokens)
        images = hidden.transpose(1, 2).view(len(tokens), -1, self.side, self.side)
        hidden = self.depthwise(images).flatten(2).transpose(1, 2)
        return self.narrow(nn.functional.gelu(hidden))


def test_a_step_over_tokens_and_images_is_told():
    model, tokens = TokensAndImages(), torch.randn(4, 256, 16)
    loss = torch.sum
    found = measured_bytes(model, tokens, loss)
    assert observed(model, tokens, loss).step_peak_bytes == pytest.approx(found, rel=0.01)


def test_a_plan_of_images_in_channels_last_is_told():
    """What oneDNN takes for weights alone is little of these bytes: none of it is a copy of images."""
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 16, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(16, 8, 2, stride=2))
    model = model.to(memory_format=CHANNELS_LAST)
    sample = torch.randn(8, 8, 32, 32).contiguous(memory_format=CHANNELS_LAST)
    found = measured_bytes(model, sample, torch.sum)
    answer = estimate(model, sample, loss=torch.sum, batches=False)
    assert answer.eager.step_peak_bytes == pytest.approx(found, rel=0.05)
