"""MONeT's wrapper: a model with a plan from a file, that trains exactly."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from rockmate import PlanFileError, PlanFileMismatch, Rockmate, zoo
from rockmate.compat import MONeTWrapper
from tests.module.steps import assert_same_training, train
from tests.where import here


@pytest.fixture(scope="module")
def plan_of() -> Callable[[str], Rockmate]:
    @cache
    def plan(name: str) -> Rockmate:
        entry = zoo.get(name, device=here())
        return Rockmate(entry.model, entry.sample, 0.8, loss=entry.loss, solver="greedy")

    return plan


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("mixer-tiny", (8, 3, 16, 16), marks=pytest.mark.slow),
        ("gpt2-tiny", (8, 16)),
    ],
)
def test_a_plan_of_a_file_trains_exactly(plan_of, name, shape, tmp_path):
    module = plan_of(name)
    module.save_plan(tmp_path / "solution.json")
    entry, eager = zoo.get(name, device=here()), zoo.get(name, device=here())
    model = MONeTWrapper(entry.model, tmp_path / "solution.json", shape)
    assert model.plan.schedule == module.plan.schedule
    assert model.state_dict().keys() == eager.model.state_dict().keys()  # MONeT's have a prefix
    assert model.train() is model
    assert_same_training(
        train(model, [entry.sample] * 2, entry.loss), train(eager.model, [entry.sample] * 2, entry.loss)
    )
    assert not entry.sample[0].requires_grad


def test_the_caller_s_random_numbers_are_left_alone(plan_of):
    plan_file = plan_of("gpt2-tiny").plan_file()
    state = torch.get_rng_state()
    MONeTWrapper(zoo.get("gpt2-tiny").model, plan_file, [8, 16])
    assert torch.equal(torch.get_rng_state(), state)


def test_another_shape_or_model_is_refused(plan_of, tmp_path):
    plan_file = plan_of("gpt2-tiny").plan_file()
    with pytest.raises(PlanFileMismatch, match=r"int64\[8, 16\].* is \[4, 16\]"):
        MONeTWrapper(zoo.get("gpt2-tiny").model, plan_file, (4, 16))
    with pytest.raises(PlanFileMismatch):
        MONeTWrapper(zoo.get("gpt2-tiny-sdpa").model, plan_file, (8, 16))
    (tmp_path / "solution.json").write_text("{}")
    with pytest.raises(PlanFileError):
        MONeTWrapper(nn.Linear(2, 2), tmp_path / "solution.json", (2, 2))


def test_a_plan_for_two_inputs_is_refused():
    plan_file = Rockmate(nn.Bilinear(4, 4, 4), (torch.randn(2, 4), torch.randn(2, 4)), 1.0).plan_file()
    with pytest.raises(PlanFileMismatch, match="2 tensors"):
        MONeTWrapper(nn.Bilinear(4, 4, 4), plan_file, (2, 4))
