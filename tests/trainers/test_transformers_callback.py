"""The callback for Trainers: training is theirs, to the bit, within the budget, with the largest batch, too."""

from typing import Any

import pytest
import torch
from torch import nn

from rockmate import ArgumentError, BudgetError, IntegrationError, Rockmate
from tests.module.steps import FEW_ROUNDS, assert_same
from tests.trainers.hugging_face import FAMILIES, train, trainer_of

pytest.importorskip("accelerate")
integration = pytest.importorskip("rockmate.integrations.transformers")

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")  # the last batch of an epoch is shorter
slow = pytest.mark.slow


def callback(budget: Any = 0.75, **said: Any) -> Any:
    return integration.RockmateCallback(budget, limits=FEW_ROUNDS, **said)


def trainer_with(mine: Any, family: Any, folder: Any, model: nn.Module | None = None, **settings: Any) -> Any:
    """A trainer that was made with the callback."""
    model = family.build() if model is None and "model_init" not in settings else model
    return trainer_of(model, family, folder, callbacks=[mine], **settings)


@pytest.mark.parametrize(
    ("name", "budget"),
    [("gpt2", 0.75), *(pytest.param(name, "auto", marks=slow) for name in ("bert", "llama", "t5", "vit"))],
)
def test_one_line_trains_as_without_it(tmp_path, name, budget):
    """Two epochs, accumulation, a short last batch, evaluation, checkpoints, and on from one."""
    family = FAMILIES[name]
    expected = train(trainer_of(family.build(), family, tmp_path / "eager"))
    mine = callback(budget)
    trainer = trainer_with(mine, family, tmp_path / "planned")
    assert_same(train(trainer), expected)
    assert trainer.model is mine.planned
    assert len(mine.planned.plans) >= 2
    for plan in mine.planned.plans:
        assert plan.measured_peak_bytes <= plan.budget_bytes
    if family.resumes:
        first = min((tmp_path / "planned").glob("checkpoint-*"))
        resumed = trainer_with(callback(budget), family, tmp_path / "resumed")
        assert_same(train(resumed, resume_from_checkpoint=str(first)), expected)


def test_what_is_free_leaves_room_for_the_state_of_the_optimizer(tmp_path):
    family, mine = FAMILIES["gpt2"], callback("auto")
    trainer = trainer_with(mine, family, tmp_path, save_strategy="no", max_steps=1, num_train_epochs=1)
    train(trainer)
    trained_bytes = sum(parameter.nbytes for parameter in mine.planned.parameters())
    assert mine.planned.memory_split.residents.optimizer_bytes >= 2 * trained_bytes  # two moments of Adam


@slow
@pytest.mark.parametrize("budget", [0.75, "auto"])
def test_a_model_made_by_the_trainer_is_planned(tmp_path, budget):
    family, settings = FAMILIES["gpt2"], {"num_train_epochs": 1, "save_strategy": "no", "bf16": True}
    eager = trainer_of(None, family, tmp_path, model_init=family.build, **settings)
    mine = callback(budget)
    planned = trainer_with(mine, family, tmp_path, model_init=family.build, **settings)
    assert_same(train(planned), train(eager))
    assert planned.model is mine.planned
    assert "bfloat16" in mine.planned.code


def test_a_second_training_keeps_the_plans(tmp_path):
    family, mine = FAMILIES["gpt2"], callback()
    trainer = trainer_with(mine, family, tmp_path, save_strategy="no", eval_strategy="no", max_steps=1)
    train(trainer)
    planned, plans = mine.planned, mine.planned.plans
    train(trainer)
    assert (mine.planned, mine.planned.plans) == (planned, plans)


# ---- the largest batch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_of_a_step", [8, pytest.param(12, marks=slow)])
def test_the_largest_batch_trains_as_if_it_had_been_given(tmp_path, rows_of_a_step):
    family = FAMILIES["gpt2"]
    settings = {"num_train_epochs": 1, "save_strategy": "no", "eval_strategy": "no"}
    whole = callback("1GiB", batch="largest")
    train(trainer_with(whole, family, tmp_path, **settings))
    assert (whole.batches.rows, whole.batches.times) == (8, 1), "four rows twice, which fit at once"

    # So little memory that some of the rows fit, and not all.
    budget_bytes = int(0.6 * whole.planned.plans[0].measured_peak_bytes * rows_of_a_step / 8)
    mine = callback(budget_bytes, batch="largest")
    given = {"per_device_train_batch_size": rows_of_a_step, "gradient_accumulation_steps": 1}
    trainer = trainer_with(mine, family, tmp_path, **settings, **given)
    found = train(trainer)
    batches = mine.batches
    assert 1 <= batches.rows < rows_of_a_step
    assert batches.rows * batches.times == rows_of_a_step
    refused = min((trial.batch for trial in batches.search.trials if not trial.fits), default=None)
    assert refused == min(rows for rows in batches.may_be() if rows > batches.rows), "the next larger was tried"
    assert len(batches.search.trials) <= 5
    for plan in mine.planned.plans:
        assert plan.measured_peak_bytes <= plan.budget_bytes == budget_bytes

    same = {"per_device_train_batch_size": batches.rows, "gradient_accumulation_steps": batches.times}
    assert_same(found, train(trainer_of(family.build(), family, tmp_path, **settings, **same)))


def test_the_longest_rows_are_looked_at():
    lengths = [3, 9, 1, 7]
    rows = [{"input_ids": list(range(length)), "label": 1} for length in lengths]
    found = integration._longest_rows(rows)
    assert [len(row["input_ids"]) for row in found] == [9, 7, 3, 1]
    streamed = integration._longest_rows(row for row in rows)
    assert [len(row["input_ids"]) for row in streamed] == [9, 7, 3, 1]


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({"batch": 8}, ArgumentError, 'batch is 8: give "largest", or None'),
        ({"budget": 0.5, "batch": "largest"}, ArgumentError, "which grows with the batch"),
        ({"budget": "much"}, BudgetError, "cannot be read"),
        ({"bugdet": 1}, ArgumentError, "has no argument 'bugdet'; it takes"),
    ],
)
def test_bad_arguments_are_refused_at_once(said, error, words):
    with pytest.raises(error, match=words):
        integration.RockmateCallback(**said)


def test_a_callback_that_comes_late_is_told_what_to_do(tmp_path):
    family, settings = FAMILIES["gpt2"], {"save_strategy": "no", "eval_strategy": "no", "max_steps": 1}
    trainer = trainer_of(family.build(), family, tmp_path, **settings)
    mine = callback()
    trainer.add_callback(mine)
    with pytest.raises(IntegrationError, match=r"too late to learn which one.*attach\(trainer\)"):
        train(trainer)
    mine.attach(trainer)
    train(trainer)
    assert mine.planned.plans


def test_a_model_that_is_planned_already_is_refused(tmp_path):
    family = FAMILIES["gpt2"]
    trainer = trainer_with(callback(), family, tmp_path, Rockmate(family.build(), budget=0.75))
    with pytest.raises(IntegrationError, match="planned already"):
        trainer.train()


def test_a_trainer_that_calls_a_part_of_its_model_is_refused(tmp_path):
    family, mine = FAMILIES["gpt2"], callback()
    trainer = trainer_with(mine, family, tmp_path, save_strategy="no", eval_strategy="no")

    def compute_loss(model: Any, inputs: Any, **_: Any) -> torch.Tensor:
        return model.transformer(inputs["input_ids"]).last_hidden_state.square().mean()

    trainer.compute_loss = compute_loss
    with pytest.raises(IntegrationError, match="did not call its GPT2LMHeadModel"):
        trainer.train()
    trainer = trainer_with(callback("1GiB", batch="largest"), family, tmp_path)
    trainer.compute_loss = lambda model, inputs, **_: inputs["input_ids"].float().sum()
    with pytest.raises(IntegrationError, match="the largest batch cannot be looked for"):
        trainer.train()
