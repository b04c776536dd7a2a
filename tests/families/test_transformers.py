"""Families of models of transformers beside those of the trainers' tests: padding masks, two lengths, resolutions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rkgb.devices.allocation_log import AllocationLog
from rockmate import Rockmate
from tests.module.steps import CPU

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ci

WORDS = 50
NARROW: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Case:
    make: Callable[[], torch.nn.Module]
    batch: Callable[..., dict[str, torch.Tensor]]
    first: tuple[Any, ...]  # sizes that may be traced
    others: tuple[Any, ...]  # and that may not


def words(length, rows=3):
    return torch.randint(1, WORDS, (rows, length))


def padded(length, rows=3):
    lengths = torch.tensor([[length], *([length // 2 + 1],) * (rows - 1)])
    mask = (torch.arange(length) < lengths).long()
    given = words(length, rows) * mask
    return {"input_ids": given, "attention_mask": mask, "labels": given.masked_fill(mask == 0, -100)}


def translation(lengths):
    source, target = lengths
    return {"input_ids": words(source), "labels": words(target)}


def images(size):
    height, width = size
    return {
        "pixel_values": torch.randn(2, 3, height, width),
        "labels": torch.randint(0, 2, (2,)),
        "interpolate_pos_encoding": True,
    }


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**NARROW, intermediate_size=64))


def t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=WORDS, **sizes, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit():
    sizes = {name: value for name, value in NARROW.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**sizes, intermediate_size=64, image_size=32, patch_size=8, num_labels=2)
    return transformers.ViTForImageClassification(config)


CASES = {
    "bert-padded": Case(bert, padded, (96, 61), (50, 83, 34, 95)),
    "t5": Case(t5, translation, ((48, 32), (33, 25), (40, 20), (25, 29), (37, 23), (30, 31)), ((41, 27), (29, 30))),
    "vit": Case(vit, images, ((64, 64), (48, 48), (40, 56), (56, 40), (48, 40)), ((56, 56), (40, 64), (64, 40))),
}


def gradients(model, batch, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("name", CASES)
def test_other_sizes_are_exact_within_the_budget_and_not_traced(name):
    case = CASES[name]
    torch.manual_seed(0)
    eager = case.make().train()
    planned = Rockmate(copy.deepcopy(eager), budget=0.8, loss=lambda output: output.loss)

    def step(size, seed):
        batch = case.batch(size)
        for mine, theirs in zip(gradients(planned, batch, seed), gradients(eager, batch, seed), strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)

    with warnings.catch_warnings(action="ignore"):
        for seed, size in enumerate(case.first):
            step(size, seed)
    traced = len(planned._family.members)
    with warnings.catch_warnings(action="error", category=UserWarning):
        for seed, size in enumerate(case.others):
            step(size, seed)
    assert len(planned._family.members) == traced
    for size in (*case.first, *case.others):
        batch = case.batch(size)
        planned.zero_grad()
        with AllocationLog(CPU) as log:
            planned(**batch).loss.backward()
        assert log.peak_bytes <= planned.plans[0].budget_bytes
