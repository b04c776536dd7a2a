"""The anytime search and its parts: the process aside, the combination of plans, gaps, limits and interruption."""

from __future__ import annotations

import math
import os
import random
import sys
import threading
import time
from dataclasses import replace

import pytest

from rk_solvers import Auto, Oracle, Problem, Status, check, evaluate, peak_and_time, smallest_budget
from rk_solvers.anytime.search import FAR, Search
from rk_solvers.bounds.narrowing import Narrowing
from rk_solvers.exact.combine import combination
from rk_solvers.exact.oracle import least_peak
from rk_solvers.groups import normalise
from rk_solvers.limits import Limits
from rk_solvers.liveness import schedule_of
from rk_solvers.milp import BackendLimits, solve
from rk_solvers.side_process import SideProcess, SideProcessWarning
from tests.solver.instances import gpt2, random_plan, random_problem, resnet50


def budget_of(problem: Problem, share: float) -> int:
    return int(share * evaluate(problem, problem.no_recompute).peak_bytes)


def middle(problem: Problem) -> int:
    return (peak_and_time(problem, least_peak(problem))[0] + peak_and_time(problem, problem.no_recompute)[0]) // 2


# ---- the process aside ----


def test_calls_are_answered_in_turn():
    with SideProcess() as process:
        for number in (4, 9, 16):
            process.start(30.0, math.sqrt, number)
            assert process.wait(None) == math.sqrt(number)


def test_what_it_prints_goes_nowhere_and_is_no_answer(capfd):
    with SideProcess() as process:
        process.start(30.0, os.write, 1, b"noise\n" * 100)
        assert process.wait(None) == 600
    assert capfd.readouterr().out == ""


def test_it_is_known_whether_a_call_is_answered():
    with SideProcess() as process:
        process.start(60.0, time.sleep, 0.5)
        assert not process.answered()
        while not process.answered():
            time.sleep(0.01)
        assert process.wait("failed") is None
        process.start(0.2, time.sleep, 60)
        time.sleep(0.3)
        assert process.answered()  # `wait` has given it up


def test_it_is_given_up_at_its_limit_and_serves_again():
    with SideProcess() as process:
        start = time.monotonic()
        process.start(0.3, time.sleep, 60)
        assert process.wait("too late") == "too late"
        assert time.monotonic() - start < 10
        process.start(30.0, math.sqrt, 4)
        assert process.wait(None) == 2.0


def test_a_call_that_raises_gives_the_alternative_and_tells_the_exception_once():
    with SideProcess() as process:
        process.start(30.0, math.sqrt, -1)
        with pytest.warns(SideProcessWarning, match=r"call of sqrt .* raised ValueError: math domain error"):
            assert process.wait("failed") == "failed"
        process.start(30.0, math.sqrt, -1)
        assert process.wait("failed") == "failed"  # a second warning would fail the test
        process.start(30.0, math.sqrt, 4)
        assert process.wait(None) == 2.0


def test_a_call_that_kills_the_process_gives_the_alternative_and_says_so():
    with SideProcess() as process:
        process.start(30.0, os._exit, 3)
        with pytest.warns(SideProcessWarning, match="ended the process with status 3"):
            assert process.wait("failed") == "failed"
        process.start(30.0, math.sqrt, 4)
        assert process.wait(None) == 2.0


def test_an_answer_that_cannot_be_sent_is_told():
    with SideProcess() as process:
        process.start(30.0, threading.Lock)
        with pytest.warns(SideProcessWarning, match="TypeError: the answer cannot be sent"):
            assert process.wait("failed") == "failed"


def test_the_exception_of_a_call_made_here_is_told_as_well(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with SideProcess() as process:
        process.start(30.0, math.sqrt, -1)
        with pytest.warns(SideProcessWarning, match="math domain error"):
            assert process.wait("failed") == "failed"


def test_a_relaxation_that_raises_is_told_once_and_the_search_ends_with_a_valid_plan(monkeypatch):
    monkeypatch.setattr("rk_solvers.bounds.refinement.Refinement.advanced", refuse_to_advance)
    monkeypatch.setattr("rk_solvers.anytime.auto._is_small", lambda problem: False)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # another process would not know of the patch
    problem, _ = gpt2(2)
    budget = budget_of(problem, 0.8)
    with pytest.warns(SideProcessWarning, match="raised") as told:
        solution = Auto(time_limit_s=3.0).solve(problem, budget)
    assert len(told) == 1
    check(problem, solution.schedule, budget)
    assert solution.status.fits


def refuse_to_advance(*_: object) -> None:
    raise ZeroDivisionError("what nobody expected")


def test_calls_are_made_here_where_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with SideProcess() as process:
        process.start(30.0, os.getpid)
        assert process.wait(None) == os.getpid()


# ---- the best of several plans ----


def test_the_combination_is_as_fast_as_any_plan_and_made_of_them():
    rng = random.Random(0)
    found = 0
    for seed in range(60):
        problem = random_problem(seed, 4 + seed % 5)
        budget = middle(problem)
        drawn = (normalise(problem, random_plan(problem, rng.randrange(10**6), 0.4)) for _ in range(60))
        plans = {plan for plan in drawn if peak_and_time(problem, plan)[0] <= budget}
        fitting = sorted(plans, key=lambda plan: (peak_and_time(problem, plan)[1], plan))
        if len(fitting) < 2:
            continue
        program = combination(problem, budget, fitting)
        if program is None:
            continue
        result = solve(program.model, "scipy", BackendLimits(20))
        if result.values is None:
            continue
        plan = program.plan(result.values)
        union = [set().union(*(plan[stage] for plan in fitting)) for stage in range(len(problem.backward))]
        assert all(set(group) <= allowed for group, allowed in zip(plan, union, strict=True))
        peak, time_ms = peak_and_time(problem, plan)
        assert peak <= budget
        assert Oracle().solve(problem, budget).time_ms - 1e-6 <= time_ms < peak_and_time(problem, fitting[0])[1]
        found += 1
    assert found >= 5


# ---- the search ----


@pytest.mark.parametrize(
    ("build", "share"), [(gpt2, 0.5), pytest.param(gpt2, 0.35, marks=pytest.mark.slow), (resnet50, 0.6)]
)
def test_the_gap_asked_for_is_reached_and_proven(build, share):
    problem, chain = build(layers=6, vocabulary=3000) if build is gpt2 else build(layers=(2, 2, 2, 2))
    solution = Auto(chain, gap=0.01, time_limit_s=60).solve(problem, budget_of(problem, share))
    check(problem, solution.schedule, budget_of(problem, share))
    assert solution.gap is not None
    assert solution.gap <= 0.01
    assert problem.keep_all_time_ms <= solution.lower_bound_ms <= solution.time_ms


def test_small_problems_are_solved_to_the_optimum():
    for seed in range(60):
        problem = random_problem(seed, 3 + seed % 5)
        budget = middle(problem)
        solution, best = Auto(gap=0.0).solve(problem, budget), Oracle().solve(problem, budget)
        assert solution.time_ms == pytest.approx(best.time_ms, rel=1e-5)
        assert solution.status is Status.OPTIMAL


@pytest.mark.ci
@pytest.mark.slow
def test_what_cannot_fit_is_proven_and_the_least_is_named():
    proven = 0
    for seed in range(30):
        problem = random_problem(seed, 3 + seed % 5)
        least = peak_and_time(problem, least_peak(problem))[0]
        solution = Auto().solve(problem, least - 1)
        assert not solution.status.fits
        assert solution.smallest_budget_bytes >= least
        proven += solution.lower_bound_ms == math.inf
    assert proven == 30


@pytest.mark.ci
def test_no_search_is_longer_than_its_limit():
    problem, chain = resnet50(layers=(3, 4, 23, 3))
    start = time.monotonic()
    solution = Auto(chain, gap=0.0, time_limit_s=3.0).solve(problem, budget_of(problem, 0.35))
    assert time.monotonic() - start < 3 + 40  # far below what the gap would take, far above the limit on a busy machine
    assert solution.status.fits


@pytest.mark.ci
@pytest.mark.slow
def test_the_second_wind_follows_where_a_plan_may_be_far_from_the_best(caplog):
    problem, chain = resnet50(layers=(3, 4, 23, 3))
    budget = budget_of(problem, 0.3)
    news: list[str] = []
    hasty = Auto(chain, time_limit_s=1.0)
    first = hasty.solve(problem, budget)
    assert first.gap is not None
    assert first.gap > FAR
    assert first.out_of_time
    start = time.monotonic()
    second = replace(hasty, extra_s=15.0, progress=news.append).solve(problem, budget)
    check(problem, second.schedule, budget)
    assert any("goes on for 15 s" in line for line in news)
    assert "the search goes on for 15 s at most. A time limit bounds it" in caplog.text
    assert second.lower_bound_ms <= second.time_ms
    assert second.gap < first.gap
    assert second.gap <= FAR or time.monotonic() - start < 16 + 40  # as above
    other = replace(hasty, time_limit_s=60.0, gap=FAR, extra_s=15.0, progress=news.append)
    news.clear()
    caplog.clear()
    enough = other.solve(problem, budget_of(problem, 0.8))
    assert enough.gap <= FAR
    assert not enough.out_of_time
    assert not any("goes on" in line for line in news)
    assert not caplog.records


@pytest.mark.ci
@pytest.mark.slow
def test_the_second_wind_of_small_problems_ends_when_there_is_nothing_more_to_do(monkeypatch):
    monkeypatch.setattr("rk_solvers.anytime.search.FAR", 0.0)
    entered = 0
    for seed in range(8):
        problem = random_problem(seed, 6 + seed % 3)
        budget = middle(problem)
        with SideProcess() as process, SideProcess() as aside:
            limits = Limits(gap=0.0, search_s=60.0, extra_s=600.0)
            search = Search(problem, budget, None, limits, lambda line: None, process, aside, improvements=4)
            search.run()
        entered += search.second_wind
        assert search.bound_ms <= Oracle().solve(problem, budget).time_ms * (1 + 1e-6)
        assert search.plans[0].time_ms == pytest.approx(Oracle().solve(problem, budget).time_ms, rel=0.05)
    assert entered


@pytest.mark.ci
def test_with_a_wide_gap_the_second_wind_begins_at_once(caplog):
    problem, chain = gpt2(layers=4, vocabulary=3000)
    budget = int(1.02 * smallest_budget(problem, chain, 3.0).budget_bytes)
    with SideProcess() as process, SideProcess() as aside:
        search = Search(problem, budget, chain, Limits().within(8.0), lambda line: None, process, aside)
        search.run()
    assert isinstance(search.refinement, Narrowing)
    assert search.refinement.coarse.rounds == 1
    assert search.refinement.rounds > 0
    assert search.bound_ms <= search.plans[0].time_ms
    check(problem, schedule_of(problem, search.plans[0].recompute), budget)
    assert not caplog.records  # nobody waits longer for it


@pytest.mark.ci
def test_once_the_gap_is_reached_no_bound_is_waited_for(monkeypatch):
    monkeypatch.setattr("rk_solvers.anytime.search.WIDE", 0.0)
    problem, chain = gpt2(layers=4, vocabulary=3000)
    budget = int(1.02 * smallest_budget(problem, chain, 3.0).budget_bytes)
    limits = replace(Limits().within(600.0), gap=0.0)
    with SideProcess() as process, SideProcess() as aside:
        search = Search(problem, budget, chain, limits, lambda line: None, process, aside)

        def added(self: Search, *arguments: object) -> None:
            self.enough = 1.0  # any gap

        monkeypatch.setattr(Search, "_improve_in_window", added)
        search.run()
        left_s = search.first_deadline - time.monotonic()
    assert search.second_wind
    assert left_s > 300  # a round would have taken two fifths of the time


@pytest.mark.ci
@pytest.mark.slow
def test_news_tell_of_better_plans_and_bounds():
    problem, chain = gpt2(layers=3, vocabulary=3000)
    news: list[str] = []
    Auto(chain, gap=0.0, time_limit_s=20, progress=news.append).solve(problem, budget_of(problem, 0.5))
    overheads = [float(line.split()[0]) for line in news]
    gaps = [float(line.split()[-2]) for line in news]
    assert overheads == sorted(overheads, reverse=True)
    assert gaps == sorted(gaps, reverse=True)


def test_interrupted_it_keeps_the_best_plan(monkeypatch):
    problem, chain = resnet50(layers=(2, 2, 2, 2))
    budget = budget_of(problem, 0.5)

    def interrupted(search: Search) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_combine", interrupted)
    news: list[str] = []
    solution = Auto(chain, gap=0.0, progress=news.append).solve(problem, budget)
    check(problem, solution.schedule, budget)
    assert "interrupted" in news[-1]
    assert solution.interrupted


def test_interrupted_before_any_plan_it_stops(monkeypatch):
    problem, chain = resnet50(layers=(2, 2, 2, 2))

    def interrupted(search: Search, parts: int = 1) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "work", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Auto(chain).solve(problem, budget_of(problem, 0.5))


def test_where_nothing_takes_time_every_plan_that_fits_is_best():
    for seed in range(20):
        problem = random_problem(seed)
        problem = replace(
            problem,
            forward=tuple(replace(op, time_ms=0.0, repeat_ms=None) for op in problem.forward),
            backward=tuple(replace(op, time_ms=0.0) for op in problem.backward),
        )
        lowest, highest = (peak_and_time(problem, plan)[0] for plan in (least_peak(problem), problem.no_recompute))
        for budget in {lowest, (lowest + highest) // 2}:
            found = Auto(gap=0.0, limits=Limits(search_s=2, extra_s=0, gap=0.0)).solve(problem, budget)
            assert found.status.fits
            assert found.time_ms == 0
