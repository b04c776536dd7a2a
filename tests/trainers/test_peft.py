"""PEFT with planned modules: adapters over a frozen model train as they do without a plan, bit by bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rockmate import Rockmate
from tests.module.steps import FEW_ROUNDS, assert_same
from tests.trainers.hugging_face import FAMILIES, train, trainer_of
from tests.where import placed, random_stream

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks so
]

BUDGET = 0.75
TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "up_proj"], "bert": ["query", "value"]}
TASKS = {"gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "bert": "SEQ_CLS"}


def adapted(name: str, **settings: Any) -> nn.Module:
    """A frozen model with adapters that have dropout; always with the same weights."""
    model = FAMILIES[name].build()
    gpt2 = {"fan_in_fan_out": True} if name == "gpt2" else {}
    config = peft.LoraConfig(
        task_type=TASKS[name], r=4, lora_alpha=8, lora_dropout=0.1, target_modules=TARGETS[name], **gpt2, **settings
    )
    torch.manual_seed(1)
    return placed(peft.get_peft_model(model, config))


def planned_for(model: nn.Module) -> Rockmate:
    """Planned within a second: which plan it is does not matter here."""
    return Rockmate(model, budget=BUDGET, limits=FEW_ROUNDS)


def batch(name: str, rows: int = 4) -> dict[str, torch.Tensor]:
    found = [FAMILIES[name].row(number) for number in range(rows)]
    return {key: placed(torch.stack([row[key] for row in found])) for key in found[0]}


def trained(model: nn.Module, inputs: dict[str, torch.Tensor], steps: int = 3) -> dict[str, Any]:
    """Losses, adapters, gradients and the random stream after a few steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {**state, **gradients, "losses": torch.stack(losses), "random stream": random_stream()}


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama", "bert"])
@pytest.mark.ci
def test_adapters_over_a_frozen_model_need_no_inputs_with_gradients(name):
    """Its inputs are integers and its first layers frozen: no gradient reaches them, and the plan knows."""
    inputs = batch(name)
    expected = trained(adapted(name), inputs)
    planned = planned_for(adapted(name))
    assert_same(trained(planned, inputs), expected)
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert planned.plan.recomputations
    # The model that was planned is a PEFT model for whoever asks.
    assert isinstance(planned, peft.PeftModel)
    assert planned.get_nb_trainable_parameters() == planned.original.get_nb_trainable_parameters()


@pytest.mark.ci
def test_a_model_planned_before_it_gets_its_adapters_is_planned_again():
    inputs = batch("llama")
    expected = trained(adapted("llama"), inputs)
    planned = planned_for(FAMILIES["llama"].build())
    planned(**inputs)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.1, target_modules=TARGETS["llama"]
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(planned, config)
    assert_same(trained(model, inputs), expected)
    assert len(planned.plans) == 2


def disabled(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    with model.disable_adapter():
        return model(**inputs, output_hidden_states=False).logits


def another_adapter(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    torch.manual_seed(5)
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["o_proj"]))
    model.set_adapter("other")
    return model(**inputs).logits


def merged(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    model.merge_adapter()
    logits = model(**inputs).logits
    model.unmerge_adapter()
    return torch.stack([logits, model(**inputs).logits])


def scaled(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(0.5)
    return model(**inputs).logits


@pytest.mark.parametrize(
    "use", [disabled, merged, *(pytest.param(use, marks=pytest.mark.slow) for use in (another_adapter, scaled))]
)
@pytest.mark.ci
def test_what_is_done_to_adapters_after_planning_is_seen(use: Callable[..., Any]):
    """Flags, lists and numbers in the adapters decide what their forward computes."""
    inputs = batch("llama", 2)
    results = []
    for model in (adapted("llama"), planned_for(adapted("llama"))):
        trained(model, inputs, steps=2)
        torch.manual_seed(3)
        logits = use(model, inputs)
        results.append({"logits": logits.detach(), "random stream": random_stream()})
    assert_same(results[1], results[0])


def test_adapters_are_saved_loaded_and_merged_as_those_of_the_model_itself(tmp_path):
    inputs = batch("llama")
    eager, planned = adapted("llama"), planned_for(adapted("llama"))
    trained(eager, inputs)
    trained(planned, inputs)
    planned.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    loaded = placed(peft.PeftModel.from_pretrained(FAMILIES["llama"].build(), tmp_path))
    assert_same(dict(loaded.state_dict()), dict(eager.state_dict()))
    whole = planned.merge_and_unload()
    expected = eager.merge_and_unload()
    assert type(whole) is type(expected)
    assert_same(dict(whole.state_dict()), dict(expected.state_dict()))
    whole.eval()
    expected.eval()
    assert torch.equal(whole(**inputs).logits, expected(**inputs).logits)


@pytest.mark.slow
def test_the_trainer_trains_adapters_and_goes_on_from_their_checkpoint(tmp_path):
    family = FAMILIES["llama"]
    expected = train(trainer_of(adapted("llama"), family, tmp_path / "eager"))
    assert_same(train(trainer_of(planned_for(adapted("llama")), family, tmp_path / "planned")), expected)
    checkpoint = str(tmp_path / "planned" / "checkpoint-3")
    resumed = trainer_of(planned_for(adapted("llama")), family, tmp_path / "resumed")
    assert_same(train(resumed, resume_from_checkpoint=checkpoint), expected)


@pytest.mark.filterwarnings("ignore:.*has forward hooks:rkgb.TraceWarning")
@pytest.mark.ci
@pytest.mark.slow
def test_inputs_made_to_require_gradients_change_nothing():
    """What users of checkpointing do for adapters. It is not needed, and does no harm."""
    inputs = batch("llama")
    models = [adapted("llama"), adapted("llama")]
    for model in models:
        model.config.use_cache = False  # as the Trainer does: else keys of the cache would require gradients, too
    models[1].enable_input_require_grads()
    expected = trained(models[0], inputs)
    assert_same(trained(planned_for(models[1]), inputs), expected)
