"""Code that rounds otherwise is told from code that is wrong, at kinks, too."""

import pytest
import torch
from torch import nn

from rkgb import Sample
from rockmate import CompileWarning, Rockmate
from rockmate.families.control import _are_near
from rockmate.regions import build, rounding, trial
from rockmate.regions.rounding import CLOSE, distance, is_close, is_close_but_for_few
from tests.regions.conftest import interpreted_graph
from tests.regions.test_choose import COMPILED, compiled_parts


def moved(tensor, seed):
    return rounding.moved(Sample((tensor,), {}), seed).tensors[0]


@pytest.mark.parametrize("dtype", CLOSE)
def test_what_is_moved_is_close_and_random_numbers_stay(dtype):
    given = torch.randn(300, 40).to(dtype).t()
    state = torch.get_rng_state()
    found = moved(given, 3)
    assert 0 < distance(given, found) <= 5e-3
    assert is_close(given, found)
    assert found.stride() == given.stride()
    assert torch.equal(found, moved(given, 3))
    assert not torch.equal(found, moved(given, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_nothing_to_round_is_not_moved():
    tokens = torch.arange(5)
    assert torch.equal(moved(tokens, 0), tokens)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(moved(sparse, 0).to_dense(), sparse.to_dense())
    x = torch.randn(4, requires_grad=True)
    sample = rounding.moved(Sample((tokens, x), {}), 0)
    assert torch.equal(sample.tensors[0], tokens)
    assert is_close(x, sample.tensors[1])
    assert not torch.equal(x, sample.tensors[1])


def test_few_elements_of_a_large_tensor_may_be_others():
    one = torch.randn(200, 200)
    for differing, near in ((4, True), (5, False)):
        other = one.clone()
        other.view(-1)[:differing] += 10.0
        assert not is_close(one, other)
        assert is_close_but_for_few(one, other) is near
    assert is_close_but_for_few(one, one * (1 + 1e-6))
    assert not is_close_but_for_few(one, one * 1.01)
    assert not is_close_but_for_few(one, torch.full_like(one, float("nan")))


def test_each_element_of_a_small_tensor_counts():
    one = torch.randn(90, 90)
    other = one.clone()
    other[0, 0] += 10.0
    assert not is_close_but_for_few(one, other)


def test_what_is_expanded_is_moved_as_it_lies():
    row = torch.randn(1, 40)
    found = moved(row.expand(30, 40), 0)
    assert found.stride() == (0, 1)
    assert 0 < distance(row.expand(30, 40), found) < 1e-5


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_in_both_are_no_difference(number):
    one = torch.randn(200, 200)
    one[:, 0] = number
    assert is_close_but_for_few(one, one * (1 + 1e-6))
    assert not is_close_but_for_few(one, one * 1.01)


class Kinked(nn.Module):
    """Values of either sign, some of which lie so near to zero that rounding changes the gradient."""

    spreads = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        rows = torch.relu(torch.sin(100 * self.first(x)))
        return self.last(torch.nn.functional.layer_norm(rows, (16,)) if self.spreads else rows + torch.tanh(rows))


class Spreading(Kinked):
    """Where one value changes, a whole row does."""

    spreads = True


def rounded_otherwise(graph, is_backward):
    """An interpreter that reads all that it is given moved by rounding."""
    run = interpreted_graph(graph, is_backward)
    return lambda given: run([moved(one, 5) if isinstance(one, torch.Tensor) else one for one in given])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("part", [Kinked, Spreading])
def test_a_part_whose_kinks_are_passed_by_rounding_is_compiled(part, monkeypatch):
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(part() for _ in range(4))), torch.randn(2048, 16)
    far = []
    monkeypatch.setattr(build, "compiled", rounded_otherwise)
    monkeypatch.setattr(trial, "is_close_but_for_few", lambda *pair: far.append(not is_close(*pair)) or few(*pair))
    few = is_close_but_for_few
    found = compiled_parts(Rockmate(model, batch, 0.8, options=COMPILED))
    assert any(far)  # by the norm alone it would be refused
    assert found.chosen
    assert not any(one.refused for one in found.trials)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("part", [Kinked, Spreading])
def test_a_wrong_gradient_at_kinks_is_refused(part, monkeypatch):
    def compiled(graph, is_backward):
        run = interpreted_graph(graph, is_backward)
        return lambda given: [one * 1.3 if is_backward and torch.is_tensor(one) else one for one in run(given)]

    torch.manual_seed(0)
    model, batch = nn.Sequential(*(part() for _ in range(4))), torch.randn(2048, 16)
    monkeypatch.setattr(build, "compiled", compiled)
    with pytest.warns(CompileWarning, match="numbers are others"):
        found = compiled_parts(Rockmate(model, batch, 0.8, options=COMPILED))
    assert not found.chosen


def found_of(gradient, value=1.0):
    return [torch.full((4,), value)], [torch.tensor(gradient)], [[7]]


@pytest.mark.parametrize(
    ("gradient", "value", "of_moved", "near"),
    [
        ([1.0, 2.0, 3.0], 1.0, [1.0, 2.0, 3.0], True),
        ([1.0, 2.0, 3.1], 1.0, [1.0, 2.0, 3.0], False),
        ([1.0, 2.0, 3.1], 1.0, [1.0, 1.9, 3.0], True),  # as far as moved inputs change it
        ([1.0, 2.0, 4.0], 1.0, [1.0, 1.9, 3.0], False),
        ([1.0, 2.0, 3.1], 1.1, [1.0, 1.9, 3.0], False),  # values have no kinks here
    ],
)
def test_steps_are_near_where_rounding_explains_it(gradient, value, of_moved, near):
    expected, calls = found_of([1.0, 2.0, 3.0]), []
    given = found_of(gradient, value)
    assert _are_near(given, expected, lambda seed: calls.append(seed) or found_of(of_moved)) is near
    assert bool(calls) == (given[1][0].tolist() != [1.0, 2.0, 3.0])


def test_a_step_with_other_gradients_or_streams_is_not_near():
    expected = found_of([1.0, 2.0])
    assert not _are_near((expected[0], [None], expected[2]), expected, found_of)
    assert not _are_near((expected[0], expected[1], [[8]]), expected, found_of)
