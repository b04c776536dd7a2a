"""Smaller calls that are cut out of a second one, so that a family need not wait for a third."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from rkgb import Sample
from rockmate import Rockmate
from rockmate.errors import ReplanWarning
from rockmate.families.siblings import siblings
from rockmate.guards.inputs import CallPattern
from tests.families.test_lengths import WIDTH, Attention
from tests.module.steps import assert_same_step, squares


def sample(*sizes, **others):
    return Sample(tuple(torch.arange(float(torch.Size(size).numel())).view(size) for size in sizes), others)


@pytest.mark.parametrize(
    ("measured", "call", "count", "cut"),
    [
        (96, 60, 2, []),  # 12 is the only smaller multiple of what both sizes are
        (95, 60, 2, [20, 10]),
        (95, 60, 1, [20]),
        (512, 256, 2, []),  # no smaller multiple of 256
        (224, 192, 2, [64, 32]),
        (60, 95, 2, []),  # beyond what was measured
        (64, 20, 2, []),  # too small to be cut
    ],
)
def test_sizes_have_the_factors_that_both_have(measured, call, count, cut):
    found = siblings(sample((2, call)), CallPattern.of(sample((2, measured))), count)
    assert [one.tensors[0].shape[1] for one in found] == cut


def test_every_so_many_elements_are_taken_where_sizes_differ():
    (found,) = siblings(sample((60,), (2, 60, 3), (2, 3)), CallPattern.of(sample((95,), (2, 95, 3), (2, 3))), 1)
    first, second, third = found.tensors
    assert first.tolist()[:3] == [0, 3, 6]
    assert first[-1] == 59
    assert second.shape == (2, 20, 3)
    assert torch.equal(third, sample((2, 3)).tensors[0])


def test_sizes_of_two_kinds_and_other_strides_are_left():
    assert siblings(sample((3, 60)), CallPattern.of(sample((4, 95))), 1) == []
    assert siblings(Sample((torch.ones(60, 2).t(),), {}), CallPattern.of(sample((2, 95))), 1) == []


def test_a_second_length_has_a_plan_by_its_size_and_is_told_of_once():
    model = Attention(positions=128).train()
    planned = Rockmate(copy.deepcopy(model), torch.randn(2, 96, WIDTH), 0.6, loss=squares)
    with pytest.warns(ReplanWarning, match="is called with other sizes than its plan is for") as told:
        assert_same_step(planned, model, torch.randn(2, 61, WIDTH))
    assert len(told) == 1
    with warnings.catch_warnings(action="error"):
        for length in (35, 80, 12):
            assert_same_step(planned, model, torch.randn(2, length, WIDTH))
    assert len(planned._family.members) == 1
    assert len(list(planned._family._by_size)) == 4


class Refusing(nn.Module):
    """Takes no short calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        if x.shape[1] < 32:
            raise ValueError("too short")
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_where_the_module_takes_no_smaller_calls_each_is_planned_by_itself():
    model = Refusing().train()
    planned = Rockmate(copy.deepcopy(model), torch.randn(2, 96, WIDTH), 0.9, loss=squares)
    with warnings.catch_warnings(action="ignore"):
        for length in (61, 50):
            assert_same_step(planned, model, torch.randn(2, length, WIDTH))
    assert len(planned._family.members) == 3
    with pytest.raises(ValueError, match="too short"):
        planned(torch.randn(2, 20, WIDTH))
