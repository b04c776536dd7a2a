"""The loss and its gradients beside those of a layer and a loss, and how little is allocated for them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from rockmate import ArgumentError, PeakMemory, Rockmate, verify
from rockmate.nn import ChunkedCrossEntropy
from rockmate.nn.chunked_cross_entropy import rows_at_a_time

ROWS, WIDTH, CLASSES = 300, 16, 40


def given(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(3, ROWS // 3, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, dtype=dtype, requires_grad=True)
    offset = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if bias else None
    target = torch.randint(CLASSES, (3, ROWS // 3))
    target[0, :7] = -100
    return hidden, weight, target, offset


def gradients_of(loss, tensors):
    return torch.autograd.grad(loss * 3, [tensor for tensor in tensors if tensor is not None and tensor.requires_grad])


@pytest.mark.parametrize("rows", [None, 1, 7, 100, 1000])
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"label_smoothing": 0.2}, {"ignore_index": 5}])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_two_calls(rows, settings, bias):
    hidden, weight, target, offset = given(bias=bias)
    target = target.clamp(min=0) if "ignore_index" in settings else target
    ours = ChunkedCrossEntropy(rows, **settings)(hidden, weight, target, offset)
    theirs = cross_entropy(linear(hidden, weight, offset).flatten(0, 1), target.flatten(), **settings)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        gradients_of(ours, (hidden, weight, offset)), gradients_of(theirs, (hidden, weight, offset)), strict=True
    ):
        torch.testing.assert_close(mine, other)  # sums in another order, in float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_parts_are_no_less_exact_than_of_one_product(dtype):
    hidden, weight, target, _ = given(dtype, bias=False)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = gradients_of(cross_entropy(linear(*exact).flatten(0, 1), target.flatten()), exact)
    theirs = cross_entropy(linear(hidden, weight).flatten(0, 1), target.flatten())
    ours = ChunkedCrossEntropy(32)(hidden, weight, target)
    errors = [
        [
            float((one - true).norm() / true.norm())
            for one, true in zip(gradients_of(loss, (hidden, weight)), truth, strict=True)
        ]
        for loss in (ours, theirs)
    ]
    for mine, other in zip(*errors, strict=True):
        assert mine <= 1.5 * other  # rounded as often, in another order


def test_parts_that_are_frozen_get_no_gradient():
    hidden, weight, target, offset = given()
    loss = ChunkedCrossEntropy(64)(hidden, weight.detach(), target, offset.detach())
    (mine,) = torch.autograd.grad(loss, hidden)
    (other,) = torch.autograd.grad(
        cross_entropy(linear(hidden, weight, offset).flatten(0, 1), target.flatten()), hidden
    )
    torch.testing.assert_close(mine, other)


def test_without_gradients_it_is_the_loss_alone():
    hidden, weight, target, offset = given()
    with torch.no_grad():
        loss = ChunkedCrossEntropy(64)(hidden, weight, target, offset)
        torch.testing.assert_close(loss, cross_entropy(linear(hidden, weight, offset).flatten(0, 1), target.flatten()))
    assert not loss.requires_grad


def test_under_autocast_products_are_of_sixteen_bits():
    hidden, weight, target, _ = given(torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        ours = ChunkedCrossEntropy(64)(hidden, weight, target)
        theirs = cross_entropy(linear(hidden, weight).flatten(0, 1), target.flatten())
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-2, atol=1e-2)  # of bfloat16
    mine, _ = gradients_of(ours, (hidden, weight))
    other, _ = gradients_of(theirs, (hidden, weight))
    assert mine.dtype is torch.float32
    torch.testing.assert_close(mine, other, rtol=0.1, atol=1e-3)


def test_where_no_row_counts_it_is_no_number_as_eager_s():
    hidden, weight, target, _ = given()
    loss = ChunkedCrossEntropy()(hidden, weight, torch.full_like(target, -100))
    assert loss.isnan()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ChunkedCrossEntropy(0), "rows is 0"),
        (lambda: ChunkedCrossEntropy(reduction="none"), "a loss for each row is no number"),
        (lambda: ChunkedCrossEntropy(label_smoothing=2.0), "a share from 0 to 1"),
        (lambda: ChunkedCrossEntropy()(torch.ones(2, 3), torch.ones(5, 4), torch.zeros(2).long()), "a column for each"),
        (lambda: ChunkedCrossEntropy()(torch.ones(2, 3), torch.ones(5, 3), torch.zeros(3).long()), "a target for each"),
    ],
)
def test_what_does_not_fit_is_told(make, told):
    with pytest.raises(ArgumentError, match=told):
        make()


def test_as_many_rows_as_make_the_logits_no_larger_than_what_is_given():
    assert rows_at_a_time(4096, 512, 32000) == 128
    assert rows_at_a_time(65536, 4096, 32000) == -(-65536 * 4096 // 32000)
    assert rows_at_a_time(10, 4096, 32000) == 10


class Language(nn.Module):
    """A few layers over words, whose head is the embedding: with the loss within, as in Hugging Face's."""

    def __init__(self, words, is_chunked):
        super().__init__()
        self.embedding = nn.Embedding(words, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.chunked = ChunkedCrossEntropy(64) if is_chunked else None

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        if self.chunked is None:
            return cross_entropy(linear(hidden, self.embedding.weight).flatten(0, 1), labels.flatten())
        return self.chunked(hidden, self.embedding.weight, labels)


def test_logits_never_exist_whole():
    tokens = torch.randint(4000, (4, 128))
    peaks = []
    for is_chunked in (False, True):
        torch.manual_seed(0)
        model = Language(4000, is_chunked)
        with PeakMemory() as memory:
            model(tokens, tokens).backward()
        peaks.append(memory.peak_bytes)
    assert peaks[1] < 0.4 * peaks[0]


def test_it_is_planned_as_anything_else_and_is_exact():
    tokens = torch.randint(500, (4, 64))
    model = Language(500, True)
    planned = Rockmate(copy.deepcopy(model), (tokens, tokens), 0.7, loss=lambda loss: loss, time_limit=2)
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert verify(planned, (tokens, tokens), loss=lambda loss: loss, steps=2).exact
