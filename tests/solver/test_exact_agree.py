"""All exact solvers find the same least time on the same problem: they share the judge of plans, and nothing else."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import Auto, BackwardOp, Intervals, Oracle, Problem, Solution, Status, check, peak_and_time
from rk_solvers.exact.checkmate import Checkmate, build, saved_bytes_of
from rk_solvers.exact.oracle import least_peak
from rk_solvers.liveness import recompute_of
from rk_solvers.milp import BackendUnavailable
from rk_solvers.solver import SAME
from tests.solver.instances import gpt2, random_problem, random_step

SOLVERS = ("scipy", "gurobi", "sweep", "intervals", "auto")
NEEDS = {"gurobi": "gurobipy", "intervals": "ortools"}


pytestmark = pytest.mark.usefixtures("one_process")


def drawn(seed: int, count: int) -> Problem:
    """Any numbers, or a step as autograd makes one."""
    return random_step(seed, max(3, count))[0] if seed % 2 else random_problem(seed, count, plain=seed % 3 == 0)


def budgets_of(problem: Problem) -> list[int]:
    """Below the least peak, at it, one byte above, and between it and what keep-all takes."""
    low = peak_and_time(problem, least_peak(problem))[0]
    high = peak_and_time(problem, problem.no_recompute)[0]
    return sorted({low - 1, low, low + 1, (3 * low + high) // 4, (low + high) // 2, high})


def saving_at_most(problem: Problem, budget: int, saved_bytes: int) -> Problem:
    """The problem that says the same as a limit on the bytes saved: a first backward operation takes all the rest."""
    rest = max(0, budget - problem.base_bytes - saved_bytes)
    return replace(problem, backward=(BackwardOp("limit", 0.0, (), 0, rest), *problem.backward))


def solved(name: str, problem: Problem, budget: int) -> Solution | None:
    """The solution of the solver of that name; None where the licence at hand refuses the size."""
    if name == "auto":
        return Auto(gap=0.0).solve(problem, budget)
    if name == "intervals":
        return Intervals(computations=len(problem.backward) + 1).solve(problem, budget)
    if name == "sweep":
        return Checkmate().solve(problem, budget)
    try:
        return Checkmate(backend=name, most_states=0).solve(problem, budget)
    except BackendUnavailable as refusal:
        if "licen" not in str(refusal.__cause__):  # of Gurobi itself
            raise
        return None


def assert_equal(name: str, problem: Problem, budget: int) -> bool:
    """Whether the solver took the problem; if so, it said what the oracle says."""
    found, best = solved(name, problem, budget), Oracle(max_forward=12).solve(problem, budget)
    if found is None:
        return False
    assert found.status is best.status
    if best.status.fits:
        assert found.time_ms == pytest.approx(best.time_ms, rel=SAME)
        assert check(problem, found.schedule, budget).time_ms == pytest.approx(found.time_ms)
    elif name in ("scipy", "gurobi", "sweep"):
        assert found.smallest_budget_bytes == best.smallest_budget_bytes
    else:
        assert found.smallest_budget_bytes >= best.smallest_budget_bytes
    return True


def agree(name: str, seed: int, count: int) -> bool:
    """Whether the solver took the problem under all budgets, with and without a limit on the bytes saved."""
    problem = drawn(seed, count)
    budgets = budgets_of(problem)
    taken = True
    for budget in budgets:
        taken &= assert_equal(name, problem, budget)
    budget = budgets[-2]
    most = saved_bytes_of(problem, problem.no_recompute)
    for saved in sorted({most // 3, 2 * most // 3}):
        limited = saving_at_most(problem, budget, saved)
        taken &= assert_equal(name, limited, budget)
        if name in ("scipy", "gurobi"):  # which have the limit as an option
            assert_the_pair(name, problem, limited, budget, saved)
    return taken


def assert_the_pair(name: str, problem: Problem, limited: Problem, budget: int, saved: int) -> None:
    """The option `saved_bytes` gives what the problem with the limit in it does."""
    best = Oracle(max_forward=12).solve(limited, budget)
    try:
        found = Checkmate(backend=name, saved_bytes=saved).solve(problem, budget)
    except BackendUnavailable:
        return
    assert found.status is best.status
    if found.status.fits:
        assert found.time_ms == pytest.approx(best.time_ms, rel=SAME)
        assert saved_bytes_of(problem, recompute_of(problem, found.schedule)) <= saved


def require(name: str) -> None:
    """Skip the test where the package is not installed."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.ci
def test_costs_and_statuses_are_equal(name):
    require(name)
    taken = [agree(name, seed, 2 + seed % 5) for seed in range(24)]
    assert sum(taken) > 12


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVERS)
@given(st.integers(0, 10**9), st.integers(2, 7))
@settings(max_examples=200, deadline=None)
def test_costs_and_statuses_are_equal_on_hundreds_of_problems(name, seed, count):
    require(name)
    agree(name, seed, count)


def test_the_real_gurobi_says_what_to_do_with_a_program_too_large_for_its_licence():
    gurobipy = pytest.importorskip("gurobipy")
    problem, _ = gpt2(layers=3, vocabulary=2000)
    high = peak_and_time(problem, problem.no_recompute)[0]
    assert len(build(problem, high // 2).model.cost) > 2000
    with gurobipy.Env(params={"OutputFlag": 0}) as environment, gurobipy.Model(env=environment) as program:
        try:
            program.addMVar(2001)
            program.optimize()
            pytest.skip("a licence without that limit is installed")
        except gurobipy.GurobiError:
            pass
    with pytest.raises(BackendUnavailable, match=r"variables and .* rows: .*licen[cs]e.*select the back end 'scipy'"):
        Checkmate(backend="gurobi").solve(problem, high // 2)
    assert Checkmate(backend="gurobi").solve(problem, high).status is Status.OPTIMAL  # keep-all needs no program


def test_the_real_gurobi_without_a_licence_says_what_to_do(monkeypatch, tmp_path):
    pytest.importorskip("gurobipy")
    missing = tmp_path / "gurobi.lic"  # a file that is named but not there stands for no licence at all
    monkeypatch.setenv("GRB_LICENSE_FILE", str(missing))
    problem = drawn(1, 6)
    budget = budgets_of(problem)[1]
    with pytest.raises(BackendUnavailable, match=r"licence is missing.*select the back end 'scipy'"):
        Checkmate(backend="gurobi").solve(problem, budget)
