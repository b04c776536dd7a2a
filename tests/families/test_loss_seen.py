"""What a loss takes that nobody gave: seen in first steps, where the allocator keeps statistics."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.caching_allocator import AllocatorLevels
from rkgb.devices.cpu import Cpu
from rockmate import ReplanWarning, Rockmate
from rockmate.memory.loss_window import LossWindow
from rockmate.planning.costs import assumed_loss_cost
from tests.families.test_lengths import WIDTH, Attention
from tests.module.steps import CPU, FEW_ROUNDS, assert_same_step

ROWS, NARROW, CLASSES = 512, 32, 256
OUTPUT_BYTES = ROWS * CLASSES * 4
HEAD = 400
MORE_BYTES = 3 * OUTPUT_BYTES + OUTPUT_BYTES // 4  # than a cross-entropy takes


class Statistics:
    """Stands for an allocator's: the test says what a loss takes."""

    def __init__(self):
        self.allocated_bytes = 1000
        self.most_bytes = 10**12
        self.restarts = 0

    def levels(self):
        return AllocatorLevels(self.allocated_bytes, self.most_bytes, 0)

    def restart(self):
        self.restarts += 1
        self.most_bytes = self.allocated_bytes

    def takes(self, size_bytes):
        self.most_bytes = max(self.most_bytes, self.allocated_bytes + size_bytes)


@pytest.fixture
def watched(monkeypatch):
    """How many steps were looked at."""
    found, after = [], LossWindow.after
    monkeypatch.setattr(LossWindow, "after", lambda *given: found.append(given) or after(*given))
    return found


@pytest.fixture
def statistics(monkeypatch):
    found = Statistics()
    monkeypatch.setattr(Cpu, "levels", lambda _: found.levels())
    monkeypatch.setattr(Cpu, "restart_levels", lambda _: found.restart())
    return found


class Taking(torch.autograd.Function):
    """Takes so many bytes in its backward, as the statistics have it."""

    @staticmethod
    def forward(ctx, x, statistics, size_bytes):
        ctx.taken = statistics, size_bytes
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        statistics, size_bytes = ctx.taken
        statistics.takes(size_bytes)
        return gradient, None, None


class Classifier(nn.Module):
    """Small layers and many classes: what a cross-entropy takes is most of the step."""

    def __init__(self, depth=6):
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(NARROW, NARROW), nn.GELU())))
        self.head = nn.Linear(NARROW, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x))


def taking(statistics, size_bytes):
    return lambda output: Taking.apply(output.sum(), statistics, size_bytes)


def planned_classifier(budget=0.85, depth=6, **options):
    torch.manual_seed(0)
    model = Classifier(depth).train()
    return model, Rockmate(copy.deepcopy(model), budget=budget, limits=FEW_ROUNDS, **options)


def batch():
    return torch.randn(ROWS, NARROW)


def test_a_window_is_from_the_end_of_the_forward_to_the_first_of_its_backward(statistics):
    leaf = torch.randn(3, requires_grad=True)
    inside = Taking.apply(leaf, statistics, 900)  # of the model's own backward
    output = inside * 2
    window = LossWindow.after([output], CPU)
    assert window.peak_bytes is None
    statistics.takes(300)
    loss = Taking.apply(Taking.apply(output, statistics, 500), statistics, 400).sum()
    assert window.peak_bytes is None
    loss.backward(retain_graph=True)
    assert window.peak_bytes == 500
    statistics.takes(5000)
    loss.backward()
    assert window.peak_bytes == 500
    assert statistics.restarts == 1


def test_there_is_none_where_nothing_is_counted():
    output = torch.randn(3, requires_grad=True) * 2
    assert LossWindow.after([output], CPU) is None
    assert LossWindow.after([output.detach()], CPU) is None


def test_a_plan_is_corrected_for_a_loss_that_takes_less_than_a_cross_entropy(statistics, watched):
    model, planned = planned_classifier()
    loss = taking(statistics, 64)
    assert_same_step(planned, model, batch(), loss=loss)
    first = planned.plan
    assert first.recomputations > 0
    for seed in range(3):
        assert_same_step(planned, model, batch(), seed, loss=loss)
    then = planned.plan
    assert planned._family.members[0].measured.loss.peak_bytes == 64
    assert then.recomputations < first.recomputations
    assert then.time_ms < first.time_ms
    assert then.budget_bytes == first.budget_bytes
    assert len(planned.plans) == 1
    planned.zero_grad()
    with AllocationLog(CPU) as log:
        planned(batch()).sum().backward()
    assert log.peak_bytes <= then.budget_bytes
    assert len(watched) == 1  # of what was corrected, nothing is assumed any more


def test_what_takes_as_much_as_a_cross_entropy_changes_nothing(statistics, watched):
    model, planned = planned_classifier()
    for seed in range(3):
        assert_same_step(planned, model, batch(), seed, loss=taking(statistics, 3 * OUTPUT_BYTES))
    assumes_a_cross_entropy(planned)
    assert len(watched) == 1


def test_what_takes_more_than_that_has_a_plan_once_two_steps_agree(statistics, watched):
    model, planned = planned_classifier()
    loss = taking(statistics, MORE_BYTES)
    assert_same_step(planned, model, batch(), loss=loss)
    first = planned.plan
    assert_same_step(planned, model, batch(), 1, loss=loss)
    assert planned.plan is first
    for seed in (2, 3):
        assert_same_step(planned, model, batch(), seed, loss=loss)
    then = planned.plan
    assert planned._family.members[0].measured.loss.peak_bytes == MORE_BYTES
    assert then.recomputations > first.recomputations
    assert then.peak_bytes <= then.budget_bytes == first.budget_bytes
    assert len(planned.plans) == 1
    assert len(watched) == 2


@pytest.mark.parametrize("taken", [[MORE_BYTES, 64, 64], [MORE_BYTES, *[3 * OUTPUT_BYTES] * 3]])
def test_what_took_more_once_is_not_the_loss(statistics, taken):
    """It may have been the step of another module, between this one's forward and backward."""
    model, planned = planned_classifier()
    for seed, size_bytes in enumerate(taken):
        assert_same_step(planned, model, batch(), seed, loss=taking(statistics, size_bytes))
    if taken[-1] == 64:
        assert planned._family.members[0].measured.loss.peak_bytes == 64
    else:
        assumes_a_cross_entropy(planned)


def test_what_is_never_the_same_is_looked_at_a_few_times(statistics, watched):
    model, planned = planned_classifier()
    for seed in range(10):
        assert_same_step(planned, model, batch(), seed, loss=taking(statistics, (seed + 4) * OUTPUT_BYTES))
    assumes_a_cross_entropy(planned)
    assert len(watched) == 6


def test_where_no_plan_fits_what_the_loss_takes_it_is_told_once_and_training_goes_on(statistics):
    model, planned = planned_classifier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(6):
            assert_same_step(planned, model, batch(), seed, loss=taking(statistics, 10**9))
    texts = [str(one.message) for one in told if issubclass(one.category, ReplanWarning)]
    assert len(texts) == 1
    assert "take more than their budget" in texts[0]
    assert "954 MiB are taken between forward and backward, where 1.50 MiB were assumed" in texts[0]
    assert len(planned.plans) == 1


def test_a_budget_of_all_that_eager_takes_stays_eager_s(statistics):
    model, planned = planned_classifier(budget=1.0)
    for seed in range(4):
        assert_same_step(planned, model, batch(), seed, loss=taking(statistics, MORE_BYTES))
    assert planned.plan.recomputations == 0


def assumes_a_cross_entropy(planned):
    measured = planned._family.members[0].measured
    assert measured.loss is None
    assert measured.problem.backward[0].peak_bytes == assumed_loss_cost(measured.graphs.K_graph).peak_bytes


def test_a_loss_that_is_given_is_not_looked_for(statistics, watched):
    model, planned = planned_classifier(loss=lambda output: output.sum())
    for seed in range(3):
        assert_same_step(planned, model, batch(), seed, loss=taking(statistics, 64))
    assert not watched


def test_a_forward_without_a_backward_shows_nothing_and_a_later_one_does(statistics):
    model, planned = planned_classifier()
    planned(batch())
    statistics.takes(10**9)
    for seed in range(3):
        assert_same_step(planned, model, batch(), seed, loss=taking(statistics, 64))
    assert planned._family.members[0].measured.loss.peak_bytes == 64


class Wide(Attention):
    def __init__(self):
        super().__init__(positions=128)
        self.head = nn.Linear(WIDTH, HEAD)

    def forward(self, x):
        return self.head(super().forward(x))


def steps_of_lengths(statistics, budget, taken_bytes):
    """Plans of calls of 90, one after the other, where losses take so much by length."""
    torch.manual_seed(0)
    model = Wide().train()
    planned = Rockmate(copy.deepcopy(model), budget=budget, limits=FEW_ROUNDS)
    found = []
    for seed, length in enumerate((96, 90, 60, 40, 30, 90, 95, 90)):
        loss = taking(statistics, taken_bytes(length))
        assert_same_step(planned, model, torch.randn(2, length, WIDTH), seed, loss=loss)
        if length == 90:
            found.append(next(one for one in planned.plans if f"[2, {length}, {WIDTH}]" in one.calls))
    return planned, found


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_three_sizes_show_it_for_all(statistics):
    planned, found = steps_of_lengths(statistics, 0.75, lambda length: 64)
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in planned.plans)
    assert found[-1].recomputations < found[0].recomputations


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_three_sizes_show_that_it_takes_more(statistics):
    planned, found = steps_of_lengths(statistics, 0.9, lambda length: 4 * length * 2 * HEAD * 4)
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in planned.plans)
    assert found[-1].recomputations > found[0].recomputations


def test_where_no_schedule_fits_that_either_it_is_told_once(statistics):
    with pytest.warns(ReplanWarning) as told:
        steps_of_lengths(statistics, 0.6, lambda length: 12 * length * 2 * HEAD * 4)
    texts = [str(one.message) for one in told if "take more than their budget" in str(one.message)]
    assert len(set(texts)) == len(texts)
    assert texts
