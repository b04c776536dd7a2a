"""Another budget for a module that was measured: nothing is traced or measured anew."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from rkgb.devices.allocation_log import AllocationLog
from rockmate import BudgetError, BudgetTooSmall, Rockmate
from rockmate.plan_files import cache, reuse
from tests.module.steps import CPU, FEW_ROUNDS, assert_trains_exactly, squares


def network():
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def batch(rows=64):
    return torch.randn(rows, 32)


@pytest.fixture
def nothing_measured(monkeypatch):
    """From when it is called on."""

    def begin(traced=True):
        def refused(*_, **__):
            raise AssertionError("measured anew")

        monkeypatch.setattr(reuse, "measure_traced", refused)
        if traced:
            monkeypatch.setattr(reuse, "trace_model", refused)

    return begin


def planned(model, sample=None, budget=0.8, **more):
    return Rockmate(model, sample, budget, **{"loss": squares, "limits": FEW_ROUNDS, **more})


def assert_within(module, x):
    module.zero_grad()
    with AllocationLog(CPU) as log:
        squares(module(x)).backward()
    assert log.peak_bytes <= module.plan.budget_bytes


def test_a_second_module_is_planned_by_what_the_first_one_measured(nothing_measured):
    model = network()
    first = planned(model, batch())
    nothing_measured()
    second = planned(model, batch(), 0.5)
    assert second.plan.budget_bytes < first.plan.budget_bytes
    assert second.plan.recomputations > first.plan.recomputations
    assert_within(second, batch())
    assert_trains_exactly(second, [batch() for _ in range(3)])


def test_a_module_trains_within_another_budget_from_the_next_batch_on(nothing_measured):
    module = planned(network(), batch())
    before = module.plan
    nothing_measured()
    module.replan(0.5)
    assert module.plans == ()
    squares(module(batch())).backward()
    assert module.plan.budget_bytes < before.budget_bytes
    assert_within(module, batch())
    module.zero_grad()
    module.replan(before.budget_bytes, batch())
    assert module.plan.schedule == before.schedule
    assert_trains_exactly(module, [batch() for _ in range(3)])


def test_a_budget_that_is_none_changes_nothing():
    module = planned(network(), batch())
    before = module.plans
    with pytest.raises(BudgetError):
        module.replan("many")
    assert module.plans == before


def test_a_budget_that_is_too_small_says_so():
    module = planned(network(), batch())
    with pytest.raises(BudgetTooSmall, match="smallest"):
        module.replan(1000, batch())
    module.replan(0.9)
    assert_trains_exactly(module, [batch() for _ in range(2)])


@pytest.mark.parametrize("change", ["rows", "mode", "frozen", "loss", "threads"])
def test_what_was_measured_otherwise_is_measured_anew(change, nothing_measured):
    model, x, loss = network(), batch(), squares
    first = planned(model, x)
    if change == "rows":
        x = batch(128)
    elif change == "mode":
        model[2].eval()
    elif change == "frozen":
        model[0].requires_grad_(requires_grad=False)
    elif change == "loss":
        loss = lambda output: output.abs().sum()  # noqa: E731
    else:
        torch.set_num_threads(torch.get_num_threads() + 1)
    nothing_measured()
    try:
        with pytest.raises(AssertionError, match="measured anew"):
            planned(model, x, 0.5, loss=loss)
    finally:
        if change == "threads":
            torch.set_num_threads(torch.get_num_threads() - 1)
    del first


@pytest.mark.slow
def test_nothing_is_remembered_of_modules_that_are_gone():
    model = network()
    module = planned(model, batch())
    gone = weakref.ref(module)
    twin = planned(model, batch(), 0.5)
    del module
    gc.collect()
    assert gone() is None
    model = weakref.ref(model)
    del twin
    gc.collect()
    assert model() is None


def test_the_cache_serves_another_budget_in_another_process(nothing_measured, monkeypatch, tmp_path):
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path))
    model = network()
    planned(copy.deepcopy(model), batch())
    nothing_measured(traced=False)
    module = planned(model, batch(), 0.5)
    assert_within(module, batch())
    assert_trains_exactly(module, [batch() for _ in range(2)])
    assert len(cache.entries()) == 2
