"""TRL's SFTTrainer with the callback: losses and weights to the bit; packing, adapters, experts, bf16."""

import random
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.module.steps import FEW_ROUNDS, assert_same
from tests.trainers.hugging_face import train

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
integration = pytest.importorskip("rockmate.integrations.transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning"),
    pytest.mark.filterwarnings("ignore::rkgb.TraceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of TRL, of packing without fused attention
]
slow = pytest.mark.slow

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": len(WORDS) + len(SPECIAL),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokenizer() -> Any:
    words = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def sentences(count: int = 24) -> Any:
    generator = random.Random(0)
    lengths = [generator.choice((10, 20, 30)) for _ in range(count)]
    return datasets.Dataset.from_list(
        [{"text": " ".join(generator.choice(WORDS) for _ in range(length))} for length in lengths]
    )


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def trainer_for(model: Any, folder: Any, *callbacks: Any, adapters: Any = None, **settings: Any) -> Any:
    arguments = trl.SFTConfig(
        str(folder),
        **{
            "num_train_epochs": 1,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "max_length": 48,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **settings,
        },
    )
    data = {"train_dataset": sentences(), "processing_class": tokenizer(), "peft_config": adapters}
    return trl.SFTTrainer(model, args=arguments, callbacks=list(callbacks), **data)


def callback(budget: Any, **said: Any) -> Any:
    return integration.RockmateCallback(budget, limits=FEW_ROUNDS, **said)


def lora() -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (llama, {}),
        pytest.param(llama, {"packing": True, "packing_strategy": "wrapped"}, marks=slow),
        pytest.param(llama, {"adapters": lora}, marks=slow),
        pytest.param(llama, {"bf16": True}, marks=slow),
        pytest.param(mixtral, {}, marks=slow),
    ],
    ids=["padded", "packed", "lora", "bf16", "experts"],
)
def test_fine_tuning_is_that_of_the_trainer_itself(tmp_path, make, settings):
    made = {**settings, "adapters": settings["adapters"]()} if "adapters" in settings else settings
    expected = train(trainer_for(make(), tmp_path, **made))
    mine = callback("auto")
    found = train(trainer_for(make(), tmp_path, mine, **made))
    assert_same(found, expected)
    assert mine.planned.plans
    assert not mine.planned.fallbacks


@slow
@pytest.mark.parametrize("settings", [{}, {"packing": True, "packing_strategy": "wrapped"}], ids=["padded", "packed"])
def test_the_largest_batch_is_found_within_the_budget(tmp_path, settings):
    step = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    whole = callback("1GiB")
    train(trainer_for(llama(), tmp_path, whole, **step, **settings))
    peak_bytes = max(plan.measured_peak_bytes for plan in whole.planned.plans)
    mine = callback(int(0.7 * peak_bytes), batch="largest")
    found = train(trainer_for(llama(), tmp_path, mine, **step, **settings))
    rows, times = mine.batches.rows, mine.batches.times
    assert 1 <= rows < 12
    assert rows * times == 12
    for plan in mine.planned.plans:
        assert plan.measured_peak_bytes <= plan.budget_bytes
    same = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": times}
    assert_same(found, train(trainer_for(llama(), tmp_path, **same, **settings)))
