"""The Trainer of the transformers library trains planned models as it trains the models themselves, bit by bit."""

import json

import pytest
import transformers

from rockmate import Rockmate
from tests.module.steps import assert_same
from tests.trainers.hugging_face import FAMILIES, train, trainer_of

pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")  # the last batch of an epoch is shorter

slow = pytest.mark.slow
BUDGET = 0.75


@pytest.mark.parametrize("name", ["gpt2", "bert", *(pytest.param(name, marks=slow) for name in ("llama", "t5", "vit"))])
def test_training_is_that_of_the_model_itself_resumed_or_not(tmp_path, name):
    """Two epochs, accumulation, a short last batch, evaluation, checkpoints."""
    family = FAMILIES[name]
    expected = train(trainer_of(family.build(), family, tmp_path / "eager"))
    planned = Rockmate(family.build(), budget=BUDGET)
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
    resumed = trainer_of(Rockmate(family.build(), budget=BUDGET), family, tmp_path / "resumed")
    if not family.resumes:
        first = str(tmp_path / "eager" / checkpoints[0].name)
        expected = train(trainer_of(family.build(), family, tmp_path / "eager_resumed"), resume_from_checkpoint=first)
    assert_same(train(resumed, resume_from_checkpoint=str(checkpoints[0])), expected)
