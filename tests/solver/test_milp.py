"""The builder of programs and its back ends: Gurobi by a stand-in that hands the program to SciPy."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import sys
import types

import numpy as np
import pytest
from scipy import sparse

from rk_solvers.intervals.solver import Intervals
from rk_solvers.milp import BACKENDS, BackendLimits, BackendUnavailable, Model, Outcome, relaxation_bound, solve
from tests.solver.instances import chain_of


class GurobiError(Exception):
    pass


class Env:
    seen: list[dict] = []  # noqa: RUF012 - what every test's environment was given

    def __init__(self, params):
        Env.seen.append(params)
        if params.get("LicenseID") == 0:
            raise GurobiError("No Gurobi license found")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Variables:
    X: np.ndarray


class Program(Env):
    """Keeps rows as Gurobi is given them, and solves with SciPy."""

    def __init__(self, env):
        self.model, self.SolCount, self.answer = Model(), 0, Variables()

    def addMVar(self, shape, lb, ub, obj, vtype):  # noqa: N802
        for index in range(shape):
            self.model.add_variable(obj[index], lower=lb[index], upper=ub[index], integer=vtype[index] == "I")
        return self.answer

    def addMConstr(self, matrix, variables, sense, limits):  # noqa: N802
        assert sparse.isspmatrix_csr(matrix)
        assert variables is self.answer
        for row, limit in enumerate(limits):
            part = matrix[[row]].tocoo()
            low, high = {"<": (-math.inf, limit), ">": (limit, math.inf), "=": (limit, limit)}[sense]
            self.model.add_row(zip(part.col.tolist(), part.data.tolist(), strict=True), lower=low, upper=high)

    def optimize(self):
        if len(self.model.cost) > 2000:
            raise GurobiError("Model too large for size-limited license")
        result = solve(self.model)
        self.Status = {Outcome.OPTIMAL: 2, Outcome.INFEASIBLE: 3, Outcome.LIMIT: 9}[result.outcome]
        self.ObjBound = result.bound
        if result.values is not None:
            self.SolCount, self.ObjVal, self.answer.X = 1, result.objective, result.values


@pytest.fixture
def stand_in(monkeypatch):
    """A module that looks like gurobipy."""
    module = types.ModuleType("gurobipy")
    module.Env, module.Model, module.GurobiError = Env, Program, GurobiError
    module.GRB = types.SimpleNamespace(
        INTEGER="I", CONTINUOUS="C", OPTIMAL=2, INFEASIBLE=3, INF_OR_UNBD=4, TIME_LIMIT=9, INTERRUPTED=11
    )
    monkeypatch.setitem(sys.modules, "gurobipy", module)
    Env.seen.clear()


def random_model(seed: int) -> Model:
    """Up to six binaries and a few rows of all senses, some of them impossible together."""
    rng = random.Random(seed)
    model = Model()
    count = rng.randint(1, 6)
    for _ in range(count):
        model.add_variable(rng.randint(-5, 5), integer=True)
    for _ in range(rng.randint(0, 4)):
        terms = [(variable, rng.randint(-4, 4)) for variable in rng.choices(range(count), k=3)]
        low = rng.choice([-math.inf, -2, 0, 1])
        model.add_row(terms, lower=low, upper=rng.choice([max(low, 0), max(low, 2), math.inf]))
    return model


def best_by_hand(model: Model) -> float:
    """The least objective over all points, by enumeration; infinite if none is allowed."""
    matrix = model.matrix().toarray()
    best = math.inf
    for point in itertools.product((0, 1), repeat=len(model.cost)):
        rows = matrix @ np.array(point)
        if np.all(rows >= np.array(model.row_lower)) and np.all(rows <= np.array(model.row_upper)):
            best = min(best, float(np.dot(model.cost, point)))
    return best


@pytest.mark.parametrize("backend", BACKENDS)
def test_back_ends_find_the_optimum(backend, stand_in):
    outcomes = set()
    for seed in range(120):
        model = random_model(seed)
        best, result = best_by_hand(model), solve(model, backend)
        outcomes.add(result.outcome)
        assert result.objective == pytest.approx(best)
        assert result.bound == pytest.approx(best)
        assert (result.outcome is Outcome.INFEASIBLE) == math.isinf(best)
    assert outcomes == {Outcome.OPTIMAL, Outcome.INFEASIBLE}


def test_the_relaxation_is_never_above_the_optimum():
    for seed in range(120):
        model = random_model(seed)
        if model.row_lower:
            assert relaxation_bound(model).bound <= best_by_hand(model) + 1e-9


def test_a_program_without_variables():
    assert solve(Model()).outcome is Outcome.OPTIMAL
    impossible = Model()
    impossible.add_row([], upper=-1.0)
    assert solve(impossible).outcome is Outcome.INFEASIBLE


def test_parameters_are_passed_through(stand_in):
    solve(random_model(1), "gurobi", BackendLimits(7.0, 0.5, {"Seed": 3, "Threads": 1}))
    assert Env.seen[0] == {"OutputFlag": 0, "TimeLimit": 7.0, "MIPGap": 0.5, "Seed": 3, "Threads": 1}
    with pytest.warns(Warning, match="no_such_option"):  # SciPy names what it does not know
        solve(random_model(1), "scipy", BackendLimits(parameters={"no_such_option": 1}))


def test_a_missing_licence_says_what_to_do(stand_in):
    with pytest.raises(BackendUnavailable, match="select the back end 'scipy'"):
        solve(random_model(1), "gurobi", BackendLimits(parameters={"LicenseID": 0}))


def test_a_licence_that_is_too_small_says_so(stand_in):
    model = Model()
    for _ in range(2001):
        model.add_variable()
    with pytest.raises(BackendUnavailable, match="2001 variables.*too large.*'scipy'"):
        solve(model, "gurobi")


def test_a_missing_package_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    with pytest.raises(BackendUnavailable, match="not installed: install it, or select the back end 'scipy'"):
        solve(random_model(1), "gurobi")


def test_an_unknown_back_end_names_those_there_are():
    with pytest.raises(ValueError, match="use one of scipy, gurobi"):
        solve(Model(), "cplex")


def test_without_ortools_intervals_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="pip install ortools"):
        Intervals().solve(chain_of(5), 12)
