"""Tiny models of the transformers library with the data that they are trained on, and a Trainer for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.models.factories import PADDING, VOCABULARY
from tests.models.hugging_face import DECODER, SPECIAL_TOKENS, built

WIDTH = 32
LENGTH = 16
Row = dict[str, Tensor]


class Rows(Dataset):
    """Rows that depend on their number alone, with a column that no model knows."""

    def __init__(self, make: Callable[[torch.Generator], Row], count: int) -> None:
        self._rows = []
        for index in range(count):
            row = make(torch.Generator().manual_seed(index))
            self._rows.append({**row, "number": torch.tensor(index)})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def text(generator: torch.Generator) -> Row:
    tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def padded_text(generator: torch.Generator) -> Row:
    """What follows the sentence is masked, and left out of the loss."""
    row = text(generator)
    mask = torch.arange(LENGTH) < int(torch.randint(8, LENGTH - 2, (1,), generator=generator))
    labels = row["labels"].masked_fill(~mask, -100)
    return {"input_ids": row["input_ids"].masked_fill(~mask, PADDING), "attention_mask": mask.long(), "labels": labels}


def classified_text(generator: torch.Generator) -> Row:
    row = padded_text(generator)
    return {**row, "labels": row["input_ids"].sum() % 2}


def translated_text(generator: torch.Generator) -> Row:
    return {**padded_text(generator), "labels": torch.randint(3, VOCABULARY, (8,), generator=generator)}


def image(generator: torch.Generator) -> Row:
    pixels = torch.randn(3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": (pixels.sum() > 0).long()}


ENCODER = {"num_hidden_layers": 1, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
LAYERS_OF_T5 = {"num_layers": 1, "d_model": WIDTH, "d_ff": 2 * WIDTH, "d_kv": 8, "num_heads": 4}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


@dataclass(frozen=True)
class Family:
    """A model, how to make one, and its data."""

    model: str
    config: str
    settings: dict[str, Any]
    rows: Callable[[torch.Generator], Row]
    resumes: bool = True  # the library's own Trainer, on the model itself, goes on from a checkpoint where it was

    def build(self) -> nn.Module:
        """Always with the same weights."""
        torch.manual_seed(0)
        return built(self.model, self.config, **self.settings)

    def row(self, number: int) -> Row:
        """One row of the data, as the model takes it."""
        return self.rows(torch.Generator().manual_seed(number))


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 1, "n_embd": WIDTH, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32, **SPECIAL_TOKENS},
        text,
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {"num_hidden_layers": 1, **DECODER}, padded_text),
    "bert": Family(
        "BertForSequenceClassification", "BertConfig", {"vocab_size": VOCABULARY, **ENCODER}, classified_text
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCABULARY, "decoder_start_token_id": PADDING, **LAYERS_OF_T5},
        translated_text,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {"image_size": 32, "patch_size": 8, **ENCODER, **DROPOUT},
        image,
        resumes=False,  # it writes the names of an older layout, and its Trainer does not find them again
    ),
}


def trainer_of(
    model: nn.Module | None,
    family: Family,
    folder: Path,
    model_init: Callable[[], nn.Module] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **settings: Any,
) -> Trainer:
    """Two epochs of 22 rows: batches of 4 and a last one of 2, two to an optimizer step; evaluated and saved twice."""
    arguments = TrainingArguments(
        str(folder),
        **{
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **settings,
        },
    )
    rows, held_out = Rows(family.rows, 22), Rows(family.rows, 6)
    data = {"train_dataset": rows, "eval_dataset": held_out}
    return Trainer(model=model, model_init=model_init, args=arguments, callbacks=list(callbacks), **data)


def train(trainer: Trainer, **settings: Any) -> dict[str, Any]:
    """What training leaves: losses, parameters, buffers and the random stream."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`")
        trainer.train(**settings)
    return result_of(trainer)


def result_of(trainer: Trainer) -> dict[str, Any]:
    result: dict[str, Any] = {
        f"{key} at {entry['step']}": torch.tensor(entry[key])
        for entry in trainer.state.log_history
        for key in ("loss", "grad_norm", "eval_loss")
        if key in entry
    }
    result |= {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return {**result, "random stream": torch.get_rng_state()}
