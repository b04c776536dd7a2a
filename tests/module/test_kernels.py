"""Plans whose operations run by kernels of our own: exact, within their budgets, and compared with eager's time."""

import copy

import pytest
import torch
from torch import nn

from rkgb.kernels import bernoulli
from rockmate import Rockmate
from rockmate.planning import measured as measured_module
from tests.module.steps import assert_same_training, measured_for, peak_of_step, squares, train

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(bernoulli.quicker() is None, reason="this PyTorch draws otherwise")


class Dropping(nn.Module):
    """Masks of several kinds, some of which are drawn by our loops."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.attention = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.2, self.training)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        kept = torch.empty_like(x).bernoulli_(0.7)
        return x * kept + torch.rand_like(x)


def batch(seed):
    return torch.randn(4, 48, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("budget", [1.0, 0.6])
@pytest.mark.parametrize("least", [1, bernoulli.LEAST_ELEMENTS])
def test_a_plan_draws_with_our_loops_and_trains_as_eager_does(our_draws, monkeypatch, budget, least):
    monkeypatch.setattr(bernoulli, "LEAST_ELEMENTS", least)
    torch.manual_seed(0)
    eager = Dropping()
    module = Rockmate(copy.deepcopy(eager), batch(0), budget, loss=squares, cache=False)
    batches = [batch(1), batch(2)]
    our_draws.clear()
    assert_same_training(train(module, batches), train(eager, batches))
    assert len(our_draws) >= 6 * len(batches)  # more where one is drawn again, from the state that the generator had
    module.zero_grad()
    peak_bytes = peak_of_step(module, (batches[0],))
    assert peak_bytes == module.plan.measured_peak_bytes <= module.plan.budget_bytes


def test_the_eager_step_is_told_with_the_time_that_pytorchs_draws_take(monkeypatch):
    monkeypatch.setattr(measured_module, "saved_ms", lambda elements, device: 1e-3 * elements)
    found = measured_for(Dropping(), batch(0), squares)
    drawn = 5 * 4 * 48 * 64 + 4 * 2 * 48 * 48
    assert found.eager_time_ms == pytest.approx(found.problem.keep_all_time_ms + 1e-3 * drawn)
    without = measured_for(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(48, 64), squares)
    assert without.eager_time_ms == without.problem.keep_all_time_ms
