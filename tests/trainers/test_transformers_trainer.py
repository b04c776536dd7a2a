"""The Trainer of the transformers library trains planned models as it trains the models themselves, bit by bit."""

import json
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rk_solvers import Limits
from rockmate import CheckpointingWarning, IntegrationError, Rockmate
from tests.module.steps import FEW_ROUNDS, assert_same
from tests.trainers.hugging_face import FAMILIES, train, trainer_of

pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")  # the last batch of an epoch is shorter

slow = pytest.mark.slow
BUDGET = 0.75


def planned_for(model: nn.Module, sample: Any = None) -> Rockmate:
    """Planned within a second: which plan it is does not matter here."""
    return Rockmate(model, sample, BUDGET, limits=FEW_ROUNDS)


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=slow) for name in ("bert", "llama", "t5", "vit"))])
def test_training_is_that_of_the_model_itself_resumed_or_not(tmp_path, name):
    """Two epochs, accumulation, a short last batch, evaluation, checkpoints."""
    family = FAMILIES[name]
    expected = train(trainer_of(family.build(), family, tmp_path / "eager"))
    planned = planned_for(family.build())
    trainer = trainer_of(planned, family, tmp_path / "planned")
    assert_same(train(trainer), expected)
    assert len(planned.plans) >= 2
    for plan in planned.plans:
        assert plan.measured_peak_bytes <= plan.budget_bytes

    # What was saved is the model's own, and is loaded as such.
    checkpoints = sorted((tmp_path / "planned").glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-3", "checkpoint-6"]
    assert json.loads((checkpoints[-1] / "config.json").read_text("utf-8"))["architectures"] == [family.model]
    loaded = getattr(transformers, family.model).from_pretrained(checkpoints[-1])
    assert_same(dict(loaded.state_dict()), dict(planned.original.state_dict()))

    # A new planned model that goes on from the first checkpoint ends where the others ended.
    resumed = trainer_of(planned_for(family.build()), family, tmp_path / "resumed")
    if not family.resumes:
        first = str(tmp_path / "eager" / checkpoints[0].name)
        expected = train(trainer_of(family.build(), family, tmp_path / "eager_resumed"), resume_from_checkpoint=first)
    assert_same(train(resumed, resume_from_checkpoint=str(checkpoints[0])), expected)


@pytest.mark.slow
@pytest.mark.ci
def test_mixed_precision_and_a_model_made_by_the_trainer(tmp_path):
    family = FAMILIES["gpt2"]
    settings = {"num_train_epochs": 1, "bf16": True, "save_strategy": "no"}
    eager, planned = (
        trainer_of(None, family, tmp_path, model_init=make, **settings)
        for make in (family.build, lambda: planned_for(family.build()))
    )
    expected = train(eager)
    assert_same(train(planned), expected)
    assert "bfloat16" in planned.model.code


@slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {"neftune_noise_alpha": 5.0}),  # a hook on the embedding adds noise
        ("bert", {"label_smoothing_factor": 0.1}),  # the labels do not come to the model
        ("bert", {"load_best_model_at_end": True, "save_strategy": "epoch"}),
        ("vit", {"optim": "adafactor", "max_grad_norm": 0.0}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
@pytest.mark.filterwarnings("ignore:.*has forward hooks:rkgb.TraceWarning")
def test_what_else_the_trainer_does_is_as_on_the_model_itself(tmp_path, name, settings):
    family, settings = FAMILIES[name], {"save_strategy": "no", **settings}
    expected = train(trainer_of(family.build(), family, tmp_path / "eager", **settings))
    found = train(trainer_of(planned_for(family.build()), family, tmp_path / "planned", **settings))
    assert_same(found, expected)


@slow
def test_a_run_that_moves_data_is_that_of_the_model_itself(tmp_path, quick_disk):
    family, settings = FAMILIES["gpt2"], {"num_train_epochs": 1, "save_strategy": "no"}
    limits = Limits(search_s=0.5, extra_s=0.0, rounds=1)
    planned = Rockmate(family.build(), budget=0.7, limits=limits, offload="auto")
    expected = train(trainer_of(family.build(), family, tmp_path / "eager", **settings))
    assert_same(train(trainer_of(planned, family, tmp_path / "planned", **settings)), expected)
    assert any(plan.moves for plan in planned.plans)


@slow
@pytest.mark.parametrize("shapes", ["nearest", "eager"])
def test_sentences_of_every_length_train_alike(tmp_path, shapes):
    """Batches are cut to their longest sentence: nearly every one has a shape of its own."""

    def cut(rows):
        longest = max(int(row["attention_mask"].sum()) for row in rows)
        return {
            name: torch.stack([row[name][:longest] for row in rows])
            for name in ("input_ids", "attention_mask", "labels")
        }

    family, settings = FAMILIES["llama"], {"num_train_epochs": 1, "save_strategy": "no"}
    results = []
    for model in (family.build(), Rockmate(family.build(), budget=BUDGET, limits=FEW_ROUNDS, shapes=shapes)):
        trainer = trainer_of(model, family, tmp_path, **settings)
        trainer.data_collator = cut
        results.append(train(trainer))
    assert_same(results[1], results[0])
    assert (len(model.plans) > 2) == (shapes == "nearest")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
@pytest.mark.slow
def test_batches_padded_to_their_own_longest_row_train_alike_and_few_lengths_are_planned(tmp_path, name):
    """What the library's collators do: from the fourth length on, none is traced or measured."""
    lengths = iter([*(12, 6, 9), *(7, 11, 10, 8, 12, 6, 9, 5) * 8])

    def cut(rows):
        longest = next(lengths)
        cells = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        return {key: cell[:, :longest].contiguous() if cell.dim() > 1 else cell for key, cell in cells.items()}

    family, settings = FAMILIES[name], {"num_train_epochs": 4, "save_strategy": "no", "eval_strategy": "no"}
    results, kept = [], list(lengths)
    for model in (family.build(), Rockmate(family.build(), budget=0.85, limits=FEW_ROUNDS)):
        lengths = iter(kept)
        trainer = trainer_of(model, family, tmp_path, **settings)
        trainer.data_collator = cut
        results.append(train(trainer))
    assert_same(results[1], results[0])
    measured = [plan for plan in model.plans if plan.planning_peak_bytes is not None]
    assert len(measured) <= 8 < len(model.plans)
    assert not model.fallbacks


# ---- the library's own checkpointing -------------------------------------------------------------------------


def checkpointed_before(model):
    model.activation_checkpointing_enable()
    return planned_for(model)


def checkpointed_after(model):
    planned = planned_for(model)
    planned.activation_checkpointing_enable()
    return planned


def checkpointed_by_the_trainer(model):
    return planned_for(model)


@pytest.mark.filterwarnings("ignore:.*has forward hooks:rkgb.TraceWarning")  # the library puts one on the embedding
@pytest.mark.parametrize(
    "make", [pytest.param(checkpointed_before, marks=slow), checkpointed_after, checkpointed_by_the_trainer]
)
@pytest.mark.ci
def test_the_librarys_own_checkpointing_is_left_out_and_told_of(tmp_path, make):
    family, settings = FAMILIES["bert"], {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
    expected = train(trainer_of(family.build(), family, tmp_path, **settings))
    planned = make(family.build())
    if make is checkpointed_by_the_trainer:
        settings["activation_checkpointing"] = True
    with pytest.warns(CheckpointingWarning, match=r"gradient_checkpointing of .*gradient_checkpointing_disable\(\)"):
        found = train(trainer_of(planned, family, tmp_path, **settings))
    assert_same(found, expected)
    assert planned.is_activation_checkpointing, "the user's switch is left alone"
    assert "checkpoint" not in planned.code


# ---- what the Trainer asks a model ---------------------------------------------------------------------------


def test_columns_labels_and_loss_arguments_are_found_as_on_the_model(tmp_path):
    family = FAMILIES["gpt2"]
    eager, planned = (trainer_of(model, family, tmp_path) for model in (family.build(), planned_for(family.build())))
    for trainer in (eager, planned):
        trainer._set_signature_columns_if_needed()
    assert planned._signature_columns == eager._signature_columns
    assert planned.label_names == eager.label_names
    assert planned.model_accepts_loss_kwargs == eager.model_accepts_loss_kwargs
    assert planned.can_return_loss == eager.can_return_loss


@slow
def test_a_model_planned_before_its_trainer_is_planned_again_for_the_configuration_that_the_trainer_sets(tmp_path):
    """The Trainer switches `use_cache` off: a plan that still returned the cache would hold its memory."""
    family = FAMILIES["gpt2"]
    settings = {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
    expected = train(trainer_of(family.build(), family, tmp_path, **settings))
    sample = {name: torch.stack([tensor] * 4) for name, tensor in family.row(0).items()}
    planned = planned_for(family.build(), sample)
    assert planned(**sample).past_key_values is not None
    assert_same(train(trainer_of(planned, family, tmp_path, **settings)), expected)
    assert planned(**sample).past_key_values is None


def test_a_planned_model_generates_and_is_saved_as_the_model_itself(tmp_path):
    family = FAMILIES["gpt2"]
    model = family.build()
    planned = planned_for(model)
    prompt = family.row(0)["input_ids"][None, :4]
    for module in (planned, planned.original):
        module.eval()
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(planned.generate(prompt, **settings), model.generate(prompt, **settings))
    planned.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.mark.ci
def test_replicas_for_several_devices_in_one_process_are_refused():
    """What the Trainer would do on a machine with several GPUs: `torch.nn.DataParallel` makes replicas so."""
    planned = planned_for(FAMILIES["gpt2"].build())
    with pytest.raises(IntegrationError, match=r"Use DistributedDataParallel.*CUDA_VISIBLE_DEVICES=0"):
        planned._replicate_for_data_parallel()
