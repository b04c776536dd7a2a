"""Limits of a search, said by a user of a module."""

from __future__ import annotations

import pytest
import torch

from rockmate import Limits, Rockmate, SolverError, max_batch, smallest_budget

MODEL = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.GELU())])
SAMPLE = torch.ones(64, 16)


def test_a_search_of_rounds_gives_a_plan_within_the_budget():
    planned = Rockmate(MODEL, SAMPLE, 0.8, limits=Limits(rounds=2))
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert planned.plan.recomputations
    assert torch.equal(planned(SAMPLE), MODEL(SAMPLE))


@pytest.mark.parametrize("short", [{"time_limit": 1.0}, {"gap": 0.1}])
@pytest.mark.parametrize("ask", [Rockmate, max_batch, lambda *_, **said: smallest_budget(MODEL, SAMPLE, 1.1, **said)])
def test_limits_and_their_short_forms_are_not_given_at_once(ask, short):
    with pytest.raises(SolverError, match="not both"):
        ask(MODEL, SAMPLE, 1 << 20, limits=Limits(), **short)
