"""Rockmate 1's stages: each can be called alone, for one budget after another, and what trains trains exactly."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import rockmate.queries.measured_rockmate
from rkgb.kernels import bernoulli
from rockmate import BudgetTooSmall, NotPlanned, PlanFileMismatch, PlanFileWarning, SolverError
from rockmate.compat import Rockmate
from rockmate.plan_files import load
from tests.module.steps import assert_same_training, peak_of_step, squares, train
from tests.where import placed

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
STAGES = {"solve": False, "get_sequence": False, "get_compiled_fct": False, "time_limit": 1, "loss": squares}


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = (nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        return placed(nn.Sequential(*layers))


def rows() -> torch.Tensor:
    return placed(torch.randn(128, 8, generator=torch.Generator().manual_seed(7)))


@pytest.fixture(scope="module")
def chained() -> Rockmate:
    """Measured as if PyTorch drew its mask, and its blocks solved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bernoulli, "quicker", lambda: None)
        module = Rockmate(network(), rows(), **STAGES)
        module.get_chain(nb_budget_save=2, nb_budget_peak=2)
    return module


@pytest.fixture(scope="module")
def most_bytes(chained) -> int:
    chained.get_sequence(1 << 30)
    return chained.expect_mem(overhead=True)


@pytest.fixture
def no_measuring(monkeypatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(rockmate.queries.measured_rockmate, "measure", refuse)


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_one_chain_serves_many_budgets(chained, most_bytes, no_measuring, share):
    budget = int(share * most_bytes)
    chained.get_sequence(budget)
    chained.get_compiled_fct()
    assert chained.expect_mem() <= chained.expect_mem(overhead=True) <= budget
    assert chained.expect_time() == chained.simulation_time == chained.plan.time_ms
    assert chained.simulation_overhead > 1
    assert chained.DP_solve_time > 0
    assert chained.plan.solver == "rockmate"
    assert chained.plan.recomputations > 0
    module = copy.deepcopy(chained)
    batches = [rows()] * 2
    assert_same_training(train(module, batches), train(network(), batches))
    module.zero_grad()
    assert peak_of_step(module, (rows(),)) <= budget


def test_a_sequence_is_followed_once_it_is_compiled(chained, most_bytes):
    chained.get_sequence(1 << 30)
    chained.get_compiled_fct()
    before = chained.plan
    chained.get_sequence(int(0.8 * most_bytes))
    assert chained.plan is before
    assert chained.simulation_overhead > 1
    chained.get_compiled_fct()
    assert chained.plan.recomputations > 0
    with pytest.raises(BudgetTooSmall):
        chained.get_sequence(1000)
    assert chained.plan.recomputations > 0


def test_a_stage_without_the_one_before_is_refused():
    module = Rockmate(network(), rows(), **STAGES)
    with pytest.raises(NotPlanned, match="call get_chain"):
        module.get_sequence(1 << 30)
    for call in (module.get_compiled_fct, module.expect_time, module.expect_mem):
        with pytest.raises(NotPlanned, match="call get_sequence"):
            call()


def test_all_stages_at_once_train_with_the_calls_of_old_code():
    model = network()
    module = Rockmate(model, [rows()], 0.85, mem_unit=1024, nb_budget_save=2, nb_budget_peak=2, time_limit=1)
    assert module.original_mod is model
    module.reinit()
    loss = squares(module(rows()))
    loss.backward()
    module.backward()
    assert module.ILP_solve_time > 0
    assert all(parameter.grad.any() for parameter in model.parameters())
    module.reinit()
    assert not any(parameter.grad.any() for parameter in model.parameters())
    module.reinit(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_float_is_bytes_as_it_was(chained, most_bytes):
    chained.get_sequence(float(int(0.8 * most_bytes)))
    assert chained._stage_there().planned.plan.budget_bytes == int(0.8 * most_bytes)


def test_a_sequence_goes_through_a_file_without_measuring(chained, most_bytes, no_measuring, tmp_path):
    chained.get_sequence(int(0.8 * most_bytes))
    chained.save_to_file(tmp_path, "small")
    assert load(tmp_path / "small.json").plan.schedule == chained._stage_there().planned.plan.schedule
    module = Rockmate(network(), rows(), **STAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanFileWarning)  # made here: taken over as it is
        module.load_from_file(tmp_path, "small")
    assert module.plan.schedule == chained._stage_there().planned.plan.schedule
    assert module.expect_time() == chained.expect_time()
    assert module.expect_mem() == chained.expect_mem()
    module.save_to_file(tmp_path, "again")
    assert load(tmp_path / "again.json").plan.schedule == module.plan.schedule
    assert_same_training(train(module, [rows()] * 2), train(network(), [rows()] * 2))


def test_a_file_of_another_module_changes_nothing(chained, tmp_path):
    chained.get_sequence(1 << 30)
    chained.save_to_file(tmp_path, "small")
    module = Rockmate(network().append(nn.Tanh()), rows(), **STAGES)
    with pytest.raises(PlanFileMismatch):
        module.load_from_file(tmp_path, "small")
    assert module.plans == ()
    with pytest.raises(ValueError, match="without its folder"):
        module.load_from_file(tmp_path, "../small")


def test_copies_and_pickles_train_by_the_same_sequence(chained, most_bytes):
    chained.get_sequence(int(0.8 * most_bytes))
    chained.get_compiled_fct()
    twin = pickle.loads(pickle.dumps(chained))
    assert_same_training(train(twin, [rows()]), train(network(), [rows()]))
    assert twin.plan.schedule == chained.plan.schedule
    with pytest.raises(NotPlanned, match="make it anew"):
        twin.get_chain()


@pytest.mark.parametrize(
    ("options", "told"), [({"ilp_solver": "cbc"}, "ilp_solver is 'cbc'"), ({"mem_unit": 0}, "mem_unit is 0")]
)
def test_what_cannot_be_done_is_refused(options, told):
    with pytest.raises(SolverError, match=told):
        Rockmate(network(), rows(), **STAGES, **options)


def test_a_unit_of_memory_that_is_too_small_is_refused():
    module = Rockmate(network(), rows(), mem_unit=1, **STAGES)
    module.get_chain(1, 1)
    with pytest.raises(SolverError, match="mem_unit is 1 bytes"):
        module.get_sequence(0.8)


def test_bounds_must_be_positive(chained):
    with pytest.raises(SolverError, match="nb_budget_save 0"):
        chained.get_chain(nb_budget_save=0)
