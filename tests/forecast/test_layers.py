"""Layers that people write, told by shapes alone and measured: attention with masks, Fourier transforms, LSTMs."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rockmate import estimate
from tests.forecast.test_eager_step import measured_bytes

ROWS, TOKENS, WIDTH = 8, 96, 64


class Given(nn.Module):
    """A function of what is given and of one layer."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer = layer
        self.function = function

    def forward(self, *given):
        return self.function(self.layer, *given)


def tokens():
    return torch.randn(ROWS, TOKENS, WIDTH)


def padding():
    return torch.arange(TOKENS).expand(ROWS, TOKENS) > TOKENS - 16


def attended(layer, x, mask=None):
    return layer(x, x, x, key_padding_mask=mask, need_weights=False)[0]


def grouped(layer, x):
    heads = layer(x).view(ROWS, TOKENS, 4, 16).transpose(1, 2)
    return scaled_dot_product_attention(heads, heads[:, :2], heads[:, 2:], is_causal=True, enable_gqa=True)


def mixed_by_frequency(dim):
    def run(layer, x):
        return torch.fft.irfft(torch.fft.rfft(layer(x), dim=dim), n=x.shape[dim], dim=dim)

    return run


def packed(layer, x):
    lengths = torch.tensor([TOKENS - 8 * row for row in range(ROWS)])
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(layer(rows)[0], batch_first=True)[0]


def indices():
    return torch.randint(50, (4 * ROWS, TOKENS))


def bagged(layer, given):
    return layer(given).sin()


def columns(layer, x):
    return nn.functional.unfold(layer(x)[:, None], (3, 5), padding=(1, 2))


def added(found):
    return nn.functional.fold(found, (TOKENS, WIDTH), (3, 5), padding=(1, 2)).sin()


def labelled(layer, x, labels):
    odds = layer(x).log_softmax(-1).transpose(0, 1)
    rows = len(labels)
    return nn.functional.ctc_loss(odds, labels, torch.full((rows,), TOKENS), torch.full((rows,), labels.shape[1]))


def multihead(**said):
    return nn.MultiheadAttention(WIDTH, 4, batch_first=True, **said)


def lstm(*said, **settings):
    return nn.LSTM(WIDTH, WIDTH, *said, batch_first=True, **settings)


# A thread's part of the kernels' memory is told for all threads, few bytes of each are not.
EXACT = 2e-4
ABOUT = 0.25  # oneDNN chooses by the processor what it computes with; one step after the other, an LSTM took half
# That of PyTorch 2.9 keeps nearly twice as much on processors with AVX-512; which release was the last is not known.
LSTM = 0.5 if torch.__version__ < "2.13" and torch.backends.cpu.get_cpu_capability().startswith("AVX512") else ABOUT
LAYERS = {
    "a mask of padding": (lambda: Given(multihead(), attended), lambda: (tokens(), padding()), EXACT),
    "no mask": (lambda: Given(multihead(), attended), lambda: (tokens(),), EXACT),
    "weights and dropout": (
        lambda: Given(multihead(dropout=0.1), lambda a, x: a(x, x, x)[0]),
        lambda: (tokens(),),
        EXACT,
    ),
    "an encoder": (
        lambda: Given(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True), 2),
            lambda layer, x, mask: layer(x, src_key_padding_mask=mask),
        ),
        lambda: (tokens(), padding()),
        EXACT,
    ),
    "heads in groups": (lambda: Given(nn.Linear(WIDTH, WIDTH), grouped), lambda: (tokens(),), EXACT),
    "frequencies of tokens": (
        lambda: Given(nn.Linear(WIDTH, WIDTH), mixed_by_frequency(1)),
        lambda: (tokens(),),
        EXACT,
    ),
    "frequencies of channels": (
        lambda: Given(nn.Linear(WIDTH, WIDTH), mixed_by_frequency(2)),
        lambda: (tokens(),),
        EXACT,
    ),
    "distances": (
        lambda: Given(nn.Linear(WIDTH, WIDTH), lambda layer, x: torch.cdist(layer(x), x)),
        lambda: (tokens(),),
        EXACT,
    ),
    "an LSTM": (lambda: Given(lstm(2, dropout=0.1), lambda layer, x: layer(x)[0]), lambda: (tokens(),), LSTM),
    "both ways": (lambda: Given(lstm(bidirectional=True), lambda layer, x: layer(x)[0]), lambda: (tokens(),), LSTM),
    "no biases": (lambda: Given(lstm(bias=False), lambda layer, x: layer(x)[0]), lambda: (tokens(),), LSTM),
    "bags": (lambda: Given(nn.EmbeddingBag(50, WIDTH, mode="sum"), bagged), lambda: (indices(),), EXACT),
    "means of bags": (lambda: Given(nn.EmbeddingBag(50, WIDTH), bagged), lambda: (indices(),), EXACT),
    "maxima of bags": (lambda: Given(nn.EmbeddingBag(50, WIDTH, mode="max"), bagged), lambda: (indices(),), EXACT),
    "padded bags": (
        lambda: Given(nn.EmbeddingBag(50, WIDTH, mode="sum", padding_idx=0), bagged),
        lambda: (indices(),),
        EXACT,
    ),
    "mish": (
        lambda: Given(nn.Linear(WIDTH, WIDTH), lambda layer, x: nn.functional.mish(layer(x)).sin()),
        lambda: (tokens(),),
        EXACT,
    ),
    "columns": (lambda: Given(nn.Linear(WIDTH, WIDTH), columns), lambda: (tokens(),), EXACT),
    "columns and back": (
        lambda: Given(nn.Linear(WIDTH, WIDTH), lambda layer, x: added(columns(layer, x))),
        lambda: (tokens(),),
        EXACT,
    ),
    "paths of labels": (
        lambda: Given(nn.Linear(WIDTH, 32), labelled),
        lambda: (tokens(), torch.randint(1, 32, (ROWS, 8))),
        EXACT,
    ),
    "odds of what lies otherwise": (
        lambda: Given(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x).transpose(1, 2).softmax(-1)),
        lambda: (tokens(),),
        EXACT,
    ),
    "strides": (
        lambda: nn.Sequential(nn.Conv1d(WIDTH, 64, 5, padding=2), nn.GELU(), nn.Conv1d(64, 64, 5, 2, 2), nn.GELU()),
        lambda: (tokens().transpose(1, 2).contiguous(),),
        ABOUT,
    ),
}


def squares(output):
    return output.pow(2).mean()


@pytest.mark.parametrize("short", [False, True], ids=["float", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_losses_take_what_shapes_tell(loss, reduction, short):
    function = getattr(nn.functional, loss)

    def compared(layer, x, wanted):
        found = torch.sigmoid(layer(x))
        return function(found.bfloat16() if short else found, wanted, reduction=reduction)

    wanted = tokens().sigmoid()
    model, given = Given(nn.Linear(WIDTH, WIDTH), compared), (tokens(), wanted.bfloat16() if short else wanted)
    found = estimate(model, given, loss=torch.Tensor.sum, batches=False, time_limit=0.1)
    assert found.eager.step_peak_bytes == pytest.approx(measured_bytes(model, given, torch.Tensor.sum), rel=EXACT)


REDUCED = {
    "mean of all": lambda x: x.bfloat16().mean().float(),
    "mean of tokens": lambda x: x.bfloat16().mean(1).float(),
    "sum in floats": lambda x: x.bfloat16().sum(-1, dtype=torch.float32),
    "sum in doubles": lambda x: x.sum(-1, dtype=torch.float64),
    "how many": lambda x: x * (x > 0).sum(-1, keepdim=True),
    "places": lambda x: x * (x > 0).cumsum(-1),
    "sum of exponentials": lambda x: x.logsumexp(1),
    "medians": lambda x: x.median(1).values,
}


@pytest.mark.parametrize("reduce", REDUCED.values(), ids=REDUCED)
def test_reductions_take_what_shapes_tell(reduce):
    model, given = Given(nn.Linear(WIDTH, WIDTH), lambda layer, x: reduce(layer(x))), (tokens(),)
    found = estimate(model, given, loss=squares, batches=False, time_limit=0.1)
    assert found.eager.step_peak_bytes == pytest.approx(measured_bytes(model, given, squares), rel=EXACT)


LIKE_OTHERS = {"no mask", "weights and dropout", "frequencies of channels", "both ways", "no biases"}
PARAMETERS = [
    pytest.param(*layer, marks=[pytest.mark.ci] if name in LIKE_OTHERS else [], id=name)
    for name, layer in LAYERS.items()
]


@pytest.mark.parametrize(("make", "given", "tolerance"), PARAMETERS)
def test_a_step_takes_what_shapes_tell(make, given, tolerance):
    model, sample = make(), given()
    found = estimate(model, sample, loss=squares, batches=False, time_limit=0.1)
    assert not found.unplanned
    assert found.eager.step_peak_bytes == pytest.approx(measured_bytes(model, sample, squares), rel=tolerance)


@pytest.mark.parametrize("layer", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.ci)])
def test_rows_of_lengths_that_are_known_are_packed(layer):
    model = Given(layer(WIDTH, WIDTH, batch_first=True), packed)
    found = estimate(model, tokens(), loss=squares, batches=False, time_limit=0.1)
    assert found.eager.step_peak_bytes == pytest.approx(measured_bytes(model, (tokens(),), squares), rel=EXACT)
