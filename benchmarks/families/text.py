"""Decoders and encoders of text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.families.core import LENGTH, Batch, Family, classes, config, model, padded, tokens

# Families whose configuration is `<stem>Config` and whose model is `<stem>ForCausalLM`; settings beside the sizes.
DECODERS: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "Bloom": {},
    "CodeGen": {"rotary_dim": 8},
    "Cohere": {},
    "Cohere2": {},
    "DiffLlama": {"attention_dropout": 0.0},  # refuses any
    "Ernie4_5": {},
    "Exaone4": {"sliding_window": 32, "layer_types": None},
    "Falcon": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "GPTBigCode": {},
    "GPTJ": {"rotary_dim": 8},
    "GPTNeo": {"attention_types": [[["global", "local"], 2]], "window_size": 32},
    "GPTNeoX": {},
    "Glm": {},
    "Glm4": {},
    "Granite": {},
    "Helium": {},
    "HunYuanDenseV1": {},
    "Llama": {},
    "Mistral": {"sliding_window": 32},
    "ModernBertDecoder": {"local_attention": 32},
    "Mpt": {},
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "OPT": {},
    "Persimmon": {},
    "Phi": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": {},
    "SeedOss": {},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
    "XGLM": {"attention_heads": 4},
}

# Families of `<stem>ForSequenceClassification`.
ENCODERS: dict[str, dict[str, Any]] = {
    "Albert": {},
    "Bert": {},
    "BigBird": {"attention_type": "original_full"},
    "Camembert": {},
    "Canine": {"num_hash_buckets": 128, "max_position_embeddings": 256},
    "ConvBert": {},
    "Data2VecText": {},
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DistilBert": {},
    "Electra": {},
    "Ernie": {},
    "Esm": {"position_embedding_type": "rotary", "token_dropout": False},
    "Flaubert": {},
    "FNet": {},
    "Funnel": {"block_sizes": [2, 2]},
    "IBert": {},
    "Longformer": {"attention_window": 16},
    "MegatronBert": {},
    "MobileBert": {"num_hidden_layers": 2, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "ModernBert": {"local_attention": 32},
    "MPNet": {},
    "Nystromformer": {"num_landmarks": LENGTH, "segment_means_seq_len": LENGTH},
    "Reformer": {
        "axial_pos_embds": False,
        "feed_forward_size": 128,
        "attn_layers": ["local", "local"],
        "is_decoder": False,
    },
    "RemBert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "Roberta": {},
    "RobertaPreLayerNorm": {},
    "RoCBert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    "RoFormer": {},
    "SqueezeBert": {},
    "XLMRoberta": {},
    "XLM": {},
    "XLNet": {},
    "Xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "Yoso": {"expectation": True},
}


def text_families() -> Iterator[Family]:
    """Every one of this module."""
    for stem, own in DECODERS.items():
        yield Family(stem, "decoder", partial(decoder, stem, own))
    yield Family("GPT2", "decoder", _gpt2)
    yield Family("CTRL", "decoder", partial(decoder, "CTRL", {"dff": 128}, "CTRLLMHeadModel"))
    yield Family("OpenAIGPT", "decoder", partial(decoder, "OpenAIGPT", {}, "OpenAIGPTLMHeadModel"))
    yield Family("Gemma3", "decoder", _gemma3)
    for stem, own in ENCODERS.items():
        yield Family(stem, "encoder", partial(encoder, stem, own))


def decoder(stem: str, own: dict[str, Any], name: str | None = None) -> tuple[torch.nn.Module, Batch]:
    """A language model of the library and text to predict."""
    made = model(name or f"{stem}ForCausalLM", config(f"{stem}Config", **own))
    return made, {"input_ids": tokens(), "labels": tokens()}


def _gpt2() -> tuple[torch.nn.Module, Batch]:
    return decoder("GPT2", {}, "GPT2LMHeadModel")


def _gemma3() -> tuple[torch.nn.Module, Batch]:
    settings = config("Gemma3TextConfig", sliding_window=32, query_pre_attn_scalar=16)
    return model("Gemma3ForCausalLM", settings), {"input_ids": tokens(), "labels": tokens()}


def encoder(stem: str, own: dict[str, Any]) -> tuple[torch.nn.Module, Batch]:
    """A classifier of sentences of several lengths."""
    return model(f"{stem}ForSequenceClassification", config(f"{stem}Config", **own)), {**padded(), "labels": classes()}
