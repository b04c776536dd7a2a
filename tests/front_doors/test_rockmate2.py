"""Rockmate 2's modules plan by the solver of their name; configurations are read as they were written, or refused."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import rockmate
from rk_solvers import SOLVERS
from rockmate import BudgetError, SolverError
from rockmate.compat import (
    Config,
    ConfigError,
    Hiremate,
    OffMate,
    PureCheckmate,
    PureRockmate,
    PureRotor,
    from_config,
    generate_config,
    load_config,
    save_config,
)
from rockmate.compat.configured import options_of
from tests.module.steps import assert_same_training, peak_of_step, squares, train
from tests.where import placed


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = (nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        return placed(nn.Sequential(*layers))


def rows() -> torch.Tensor:
    return placed(torch.randn(128, 8, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PureRotor, {}),
        (PureRotor, {"slots": 200, "grid": 2}),
        (PureRockmate, {"steps": 2, "saved_steps": 2}),
        (PureCheckmate, {}),
        (Hiremate, {"leaf": 8}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value) or "usual",
)
def test_modules_are_planned_by_the_solver_of_their_name(kind, options):
    module = kind(network(), rows(), 0.8, solver_options=options, time_limit=2, loss=squares)
    assert kind.__name__.removeprefix("Pure").lower() == module.plan.solver
    assert module.plan.recomputations > 0
    for model in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(model, kind)
        assert_same_training(train(model, [rows()] * 2), train(network(), [rows()] * 2))
    module.zero_grad()
    assert peak_of_step(module, (rows(),)) <= module.plan.budget_bytes


def test_offmate_moves_and_recomputes(quick_disk):
    module = OffMate(network(), rows(), 0.7, time_limit=1, loss=squares)
    assert module.plan.moves > 0
    for model in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(model, OffMate)
        assert_same_training(train(model, [rows()] * 2), train(network(), [rows()] * 2))
    module.zero_grad()
    assert peak_of_step(module, (rows(),)) <= module.plan.budget_bytes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"slot": 3}, "no option 'slot'; it has slots"),
        ({"slots": "many"}, "give int"),
        ({"chain": 3}, "no option 'chain'"),
    ],
)
def test_options_that_a_solver_does_not_have_are_refused(options, told):
    with pytest.raises(SolverError, match=told):
        PureRotor(network(), rows(), 0.8, solver_options=options)
    with pytest.raises(ConfigError, match=told):
        generate_config("rotor", solver_options=options)


# ---- configurations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_a_configuration_of_any_solver_goes_through_a_file(solver, tmp_path):
    config = generate_config(solver, budget="2GiB", shapes="error")
    assert config.solver_options == options_of(solver)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_a_module_is_made_as_a_configuration_says(tmp_path):
    save_config(generate_config("rotor", budget=0.8, solver_options={"slots": 300}), tmp_path / "config.json")
    module = from_config(network(), rows(), load_config(tmp_path / "config.json"), loss=squares)
    assert type(module).__mro__[1] is rockmate.Rockmate
    assert module.plan.solver == "rotor"
    assert module.plan.recomputations > 0
    assert_same_training(train(module, [rows()]), train(network(), [rows()]))
    other = from_config(network(), rows(), load_config(tmp_path / "config.json"), budget="1GiB")
    assert other.plan.recomputations == 0


def test_a_file_may_leave_out_what_is_as_usual(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"format": "rockmate-config", "version": 1, "budget": 0.5}')
    assert load_config(path) == Config(budget=0.5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, '"version": 1'),
        ({"format": "other"}, '"format": "rockmate-config"'),
        ({"budgets": 3}, "unknown field `budgets`"),
        ({"budget": []}, "budget"),
        ({"budget": -1}, "not positive"),
        ({"solver": "best"}, "no solver 'best'"),
        ({"solver_options": {"seeds": 1}}, "no option 'seeds'"),
        ({"time_limit": "long"}, "time_limit"),
        ({"time_limit": -1}, "time_limit is -1"),
        ({"gap": 1}, "gap is 1"),
        ({"scope": "all"}, "scope"),
        ({"shapes": "any"}, "shapes"),
    ],
    ids=str,
)
def test_what_is_no_configuration_is_refused(change, told, tmp_path):
    path = tmp_path / "config.json"
    save_config(Config(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=told) as refusal:
        load_config(path)
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, "\x00"])
def test_what_is_no_json_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.json")


def test_what_cannot_be_asked_for_is_refused_at_once():
    with pytest.raises(ConfigError, match="budgets"):
        generate_config(budgets=3)
    with pytest.raises(ConfigError, match="no solver 'best'"):
        generate_config("best")
    with pytest.raises(BudgetError):
        from_config(network(), rows(), budget="much")
