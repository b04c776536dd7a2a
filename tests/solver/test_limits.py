"""Limits as a record, and a search that ends by rounds instead of by a clock."""

from __future__ import annotations

import pytest

from rk_solvers import Auto, Limits, check, peak_and_time
from rk_solvers.side_process import SideProcess
from tests.solver.instances import random_problem


@pytest.mark.parametrize("wrong", [{"search_s": -1}, {"bound_s": float("nan")}, {"gap": 1.0}, {"rounds": -1}])
def test_what_is_no_limit_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


def test_a_time_limit_bounds_one_search_in_all():
    assert Limits().within(None) == Limits()
    assert Limits(seed=3).within(2.0) == Limits(search_s=2.0, extra_s=0.0, seed=3)
    assert Limits().within(2.0).longest_s == 2.0


def test_a_search_that_ends_by_rounds_starts_no_process_and_repeats_itself(monkeypatch):
    monkeypatch.setattr(SideProcess, "_launch", lambda _: pytest.fail("a process was started"))
    fitted = 0
    for seed in range(6):
        problem = random_problem(seed, 8)
        budget = int(0.8 * peak_and_time(problem, problem.no_recompute)[0])
        found = [Auto(limits=Limits(rounds=3, search_s=1e4)).solve(problem, budget) for _ in range(2)]
        assert found[0] == found[1]
        fitted += found[0].status.fits
        if found[0].status.fits:
            check(problem, found[0].schedule, budget)
    assert fitted
