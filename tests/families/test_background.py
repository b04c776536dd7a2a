"""A search in a process of its own: never waited for, and nothing is left of it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from rk_solvers import Data, ForwardOp, Limits, Problem, Solver, solver_named
from rk_solvers.problem import BackwardOp
from rk_solvers.side_process import SideProcessWarning
from rockmate import PlanOptions, Rockmate
from rockmate.calls.improvements import Better
from rockmate.planning import background
from rockmate.planning.background import BackgroundSearch, is_wanted
from rockmate.planning.fixed_plan import FixedPlan, PortablePlan
from rockmate.planning.request import PlanRequest
from tests.module.steps import FEW_ROUNDS, assert_same_step, squares


def problem_of(count=6):
    data = tuple(Data(f"d{k}", 100, k) for k in range(count))
    forward = tuple(ForwardOp(f"f{k}", 1.0, (k - 1,) if k else (), (k,)) for k in range(count))
    backward = tuple(BackwardOp(f"b{k}", 1.0, (k,), 10, 20) for k in reversed(range(count)))
    return Problem(data, forward, backward)


class Raises(Solver):
    name = "raises"

    def solve(self, problem, budget_bytes):
        raise RuntimeError("no")


class Ends(Solver):
    name = "ends"

    def solve(self, problem, budget_bytes):
        os._exit(3)


class Sleeps(Solver):
    name = "sleeps"

    def solve(self, problem, budget_bytes):
        time.sleep(600)


PATIENCE_S = 240  # what is idle by policy waits for as long as all cores have something else to do


def answer_of(search, seconds=PATIENCE_S):
    ends = time.monotonic() + seconds
    while (found := search.finished()) is None:
        assert time.monotonic() < ends
        time.sleep(0.02)
    return found


def test_what_is_found_comes_with_its_key():
    search, problem = BackgroundSearch(), problem_of()
    assert search.finished() is None
    search.begin("here", solver_named("greedy"), problem, 450, PATIENCE_S)
    assert search.is_busy
    found = answer_of(search)
    assert found.key == "here"
    assert found.solution.status.fits
    assert found.solution.peak_bytes <= 450
    search.close()
    assert not search.is_busy


class TellsHowItRuns(Solver):
    name = "tells"

    def solve(self, problem, budget_bytes):
        raise RuntimeError(f"{os.sched_getscheduler(0) == os.SCHED_IDLE} {os.getsid(0)} {os.getpgid(0)}")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has processes that are idle by policy")
def test_the_process_runs_when_nothing_else_has_to_be_done():
    # In a session of its own, it would have half of the cores beside a training with as many threads as cores.
    search = BackgroundSearch()
    search.begin(1, TellsHowItRuns(), problem_of(), 450, PATIENCE_S)
    process = search._process
    ends = time.monotonic() + PATIENCE_S
    while not process.answered():
        assert time.monotonic() < ends
        time.sleep(0.02)
    with pytest.warns(SideProcessWarning, match=f"True {os.getsid(0)} (?!{os.getpgid(0)} )"):
        process.wait(None)
    search.close()


@pytest.mark.parametrize("solver", [Raises(), Ends()])
def test_a_search_that_fails_is_no_failure_of_training(solver):
    search = BackgroundSearch()
    search.begin(1, solver, problem_of(), 450, PATIENCE_S)
    assert answer_of(search).solution is None
    search.begin(2, solver_named("greedy"), problem_of(), 450, PATIENCE_S)
    assert answer_of(search).solution is not None
    search.close()


def test_a_search_that_is_closed_ends_its_process():
    search = BackgroundSearch()
    search.begin(1, Sleeps(), problem_of(), 450, 600)
    process = search._process._process
    assert process.poll() is None
    search.close()
    assert process.poll() is not None


def test_a_fork_has_no_search(monkeypatch):
    search = BackgroundSearch()
    search.begin(1, Sleeps(), problem_of(), 450, 600)
    process = search._process._process
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        assert not search.is_busy
        assert search.finished() is None
    assert process.poll() is None  # it is the other one's
    search.close()


def test_python_ends_while_a_search_goes_on():
    code = (
        "from tests.families.test_background import *\n"
        "search = BackgroundSearch(); search.begin(1, Sleeps(), problem_of(), 450, 600)\n"
        "print(search._process._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    pid = int(done.stdout)
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_where_it_is_not_wanted(monkeypatch):
    monkeypatch.setattr(background.os, "cpu_count", lambda: 4)
    monkeypatch.delenv("ROCKMATE_BACKGROUND", raising=False)
    assert is_wanted(PlanRequest(0.5))
    assert not is_wanted(PlanOptions(plan_in_background=False).request(0.5))
    assert not is_wanted(PlanRequest(0.5, limits=Limits(rounds=2)))
    monkeypatch.setenv("ROCKMATE_BACKGROUND", "0")
    assert not is_wanted(PlanRequest(0.5))
    monkeypatch.delenv("ROCKMATE_BACKGROUND")
    monkeypatch.setattr(background.os, "cpu_count", lambda: 1)
    assert not is_wanted(PlanRequest(0.5))
    monkeypatch.setattr(background.os, "cpu_count", lambda: 2)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_wanted(PlanRequest(0.5))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def wanted(monkeypatch):
    monkeypatch.delenv("ROCKMATE_BACKGROUND")
    monkeypatch.setattr(background.os, "cpu_count", lambda: 2)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))))


def test_training_begins_with_a_quick_plan_and_a_better_one_takes_its_place(wanted, monkeypatch):
    monkeypatch.setattr(background, "_HURRIED_S", 0.0)
    model = model_of()
    eager = copy.deepcopy(model)
    module = Rockmate(model, torch.randn(64, 32), 0.45, loss=squares, gap=0.0, time_limit=4.0)
    quick, searched = module.plan, module._family._by_size.improvements
    for number in range(6):
        batch = torch.randn(64, 32)
        while number == 2 and searched._search.is_busy and not searched._search._process.answered():
            time.sleep(0.05)
        assert_same_step(module, eager, batch)
    assert module.plan.time_ms <= quick.time_ms
    assert module.plan.measured_peak_bytes <= module.plan.budget_bytes == quick.budget_bytes
    assert len(module.plans) == 1
    assert not searched.is_busy


def test_a_better_plan_that_takes_more_than_the_budget_is_left(wanted, monkeypatch):
    model = model_of()
    module = Rockmate(model, torch.randn(64, 32), 0.45, loss=squares, plan_in_background=False, limits=FEW_ROUNDS)
    (member,) = module._family.members
    least = solver_named("keep-all").solve(member.measured.problem, 1 << 40)
    better = Better(member, FixedPlan(PortablePlan.of(least.schedule, least.solver)))
    module._family._by_size.improvements._found[member.measured.pattern.key] = better
    assert_same_step(module, copy.deepcopy(model), torch.randn(64, 32))
    assert module._family.members[0] is member
    assert not module._family._by_size.improvements._found
