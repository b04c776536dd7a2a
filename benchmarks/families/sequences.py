"""Encoders with decoders, mixtures of experts, state spaces, time series."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.families.core import BATCH, BEGIN, LENGTH, Batch, Family, config, floats, model, padded, tokens
from benchmarks.families.text import decoder

# `<stem>ForConditionalGeneration`
TRANSLATORS: dict[str, dict[str, Any]] = {
    "Bart": {},
    "BigBirdPegasus": {"attention_type": "original_full"},
    "Blenderbot": {},
    "BlenderbotSmall": {},
    "LED": {"attention_window": 16, "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128},
    "LongT5": {"local_radius": 8, "encoder_attention_type": "local"},
    "M2M100": {},
    "MBart": {},
    "MT5": {},
    "Mvp": {},
    "Pegasus": {},
    "PegasusX": {"block_size": 16, "num_global_tokens": 4},
    "PLBart": {},
    "ProphetNet": {"ngram": 2, "num_buckets": 8},
    "T5": {},
    "UMT5": {},
}

EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.0},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
    },
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
    },
    "GraniteMoe": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "sliding_window": 32},
    "JetMoe": {"num_local_experts": 4, "kv_channels": 16, "num_key_value_heads": 4},
    "Phimoe": {"num_local_experts": 4},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_layer_start_index": 1},
    "Glm4Moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
}

STATES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "FalconMamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "n_groups": 1, "num_heads": 8, "head_dim": 16, "chunk_size": 16},
    "Bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "attn_layer_indices": [1],
    },
    "FalconH1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "mamba_d_ssm": 128,
    },
    "RecurrentGemma": {"lru_width": 64, "attention_window_size": 32, "num_hidden_layers": 3},
    "Rwkv": {},
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "Jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "Qwen3Next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}


def sequence_families() -> Iterator[Family]:
    """Every one of this module."""
    for stem, own in TRANSLATORS.items():
        yield Family(stem, "encoder-decoder", partial(translator, stem, own))
    yield Family("Marian", "encoder-decoder", partial(translator, "Marian", {}, "MarianMTModel"))
    yield Family("T5Gemma", "encoder-decoder", _t5gemma)
    yield Family("SwitchTransformers", "experts", _switch)
    for stem, own in EXPERTS.items():
        yield Family(stem, "experts", partial(decoder, stem, own))
    for stem, own in STATES.items():
        yield Family(stem, "state space", partial(decoder, stem, own))
    yield Family("Dbrx", "experts", _dbrx)
    yield Family("PatchTST", "time series", _patchtst)
    yield Family("TimeSeriesTransformer", "time series", partial(_forecaster, "TimeSeriesTransformer"))
    yield Family("Informer", "time series", partial(_forecaster, "Informer"))
    yield Family("Autoformer", "time series", partial(_forecaster, "Autoformer"))


def translator(stem: str, own: dict[str, Any], name: str | None = None) -> tuple[torch.nn.Module, Batch]:
    """Text to text."""
    made = model(
        name or f"{stem}ForConditionalGeneration", config(f"{stem}Config", **{"decoder_start_token_id": BEGIN, **own})
    )
    return made, {**padded(), "labels": tokens(length=LENGTH // 2)}


def _t5gemma() -> tuple[torch.nn.Module, Batch]:
    half = config("T5GemmaModuleConfig", num_hidden_layers=2, sliding_window=32, query_pre_attn_scalar=16).to_dict()
    return translator("T5Gemma", {"encoder": half, "decoder": half})


def _switch() -> tuple[torch.nn.Module, Batch]:
    own = {"num_experts": 4, "expert_capacity": 64, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    return translator("SwitchTransformers", own)


def _dbrx() -> tuple[torch.nn.Module, Batch]:
    experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
    return decoder(
        "Dbrx",
        {
            "attn_config": {"attn_pdrop": 0.1, "kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": experts,
        },
    )


def _patchtst() -> tuple[torch.nn.Module, Batch]:
    settings = config("PatchTSTConfig", num_input_channels=3, context_length=64, patch_length=8, prediction_length=8)
    return model("PatchTSTForPrediction", settings), {"past_values": floats(8, 64, 3), "future_values": floats(8, 8, 3)}


def _forecaster(stem: str) -> tuple[torch.nn.Module, Batch]:
    batch, length, lag = 2 * BATCH, 48, 4
    settings = config(
        f"{stem}Config", prediction_length=16, context_length=length, lags_sequence=[1, 2, lag], num_time_features=1
    )
    past, future = length + lag, 16
    sample = {
        "past_values": floats(batch, past),
        "past_time_features": floats(batch, past, 1),
        "past_observed_mask": torch.ones(batch, past),
        "future_values": floats(batch, future),
        "future_time_features": floats(batch, future, 1),
    }
    return model(f"{stem}ForPrediction", settings), sample
