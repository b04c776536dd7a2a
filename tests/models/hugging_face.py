"""Models of the transformers library, small and with random weights; every dropout that a model has is on."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from tests.models.factories import PADDING, VOCABULARY, Factories, Model, images, on, padded_tokens, tokens

BEGIN, END = 1, 2
SPECIAL_TOKENS = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PADDING}


def built(model: str, config: str, **settings: Any) -> torch.nn.Module:
    """An instance of the library's class `model`, in training mode, as its configuration class describes it."""
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).train()


# ---- text ----------------------------------------------------------------------------------------------


def gpt2(**settings: Any) -> torch.nn.Module:
    """Dropout is 0.1 everywhere by the library's own choice."""
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    return built("GPT2LMHeadModel", "GPT2Config", **sizes, **SPECIAL_TOKENS, **settings)


def gpt2_with_labels() -> Model:
    return on(gpt2(), tokens(2, 16), labels=tokens(2, 16))


def gpt2_checkpointed() -> Model:
    """The library's own recomputation of every block is switched on."""
    module = gpt2(use_cache=False)
    module.activation_checkpointing_enable()
    return on(module, tokens(2, 16), labels=tokens(2, 16))


def gpt2_eager_padded() -> Model:
    return on(gpt2(attn_implementation="eager"), **padded_tokens(16, 11, width=16))


DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    **SPECIAL_TOKENS,
}


def llama(padded: bool = False, **settings: Any) -> Model:
    """Llama without its cache, with labels; or with its cache, which is then a part of the output."""
    module = built("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=3, **DECODER, **settings)
    text = padded_tokens(16, 9, width=16) if padded else {"input_ids": tokens(2, 16)}
    return on(module, **text, labels=tokens(2, 16))


def mixtral(**settings: Any) -> Model:
    """A mixture of experts: the router's choice decides which rows each expert sees."""
    module = built(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_hidden_layers=2,
        num_local_experts=4,
        use_cache=False,
        output_router_logits=True,
        **DECODER,
        **settings,
    )
    return on(module, **padded_tokens(16, 13, width=16), labels=tokens(2, 16))


ENCODER = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def bert(*lengths: int, **settings: Any) -> Model:
    """A classifier of sentences of those lengths: equal ones make a mask of ones."""
    module = built("BertForSequenceClassification", "BertConfig", vocab_size=VOCABULARY, **ENCODER, **settings)
    return on(module, **padded_tokens(*lengths, width=16), labels=torch.arange(len(lengths)) % 2)


def t5(padded: bool = False) -> Model:
    """Encoder and decoder that share embeddings and a bias of positions."""
    module = built(
        "T5ForConditionalGeneration",
        "T5Config",
        num_layers=2,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=PADDING,
    )
    text = padded_tokens(12, 7, width=12) if padded else {"input_ids": tokens(2, 12)}
    labels = tokens(2, 8)
    if padded:
        labels[1, 5:] = -100  # what the loss leaves out
    return on(module, **text, labels=labels)


# ---- speech --------------------------------------------------------------------------------------------


def whisper() -> Model:
    """Speech to text."""
    module = built(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=32,
        max_target_positions=16,
        num_mel_bins=8,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        decoder_start_token_id=BEGIN,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **SPECIAL_TOKENS,
    )
    return on(module, torch.randn(2, 8, 64), labels=tokens(2, 8))


# ---- images --------------------------------------------------------------------------------------------


def vit() -> Model:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    module = built("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, **ENCODER, **dropout)
    return on(module, images(), labels=torch.tensor([0, 1]))


STAGES = {"hidden_sizes": [16, 32, 48, 64], "embedding_size": 8}


def resnet() -> Model:
    return on(built("ResNetForImageClassification", "ResNetConfig", depths=[2, 2, 2, 2], **STAGES), images(size=64))


def regnet() -> Model:
    settings = {"depths": [1, 2, 2, 1], "groups_width": 8, **STAGES}
    return on(built("RegNetForImageClassification", "RegNetConfig", **settings), images(size=64))


def mobilenet() -> Model:
    settings = {"image_size": 64, "depth_multiplier": 0.35}
    return on(built("MobileNetV2ForImageClassification", "MobileNetV2Config", **settings), images(size=64))


def convnext() -> Model:
    """Whole residual branches are dropped at random, sample by sample."""
    settings = {"depths": [2, 2, 2, 2], "hidden_sizes": [8, 16, 24, 32], "drop_path_rate": 0.1}
    return on(built("ConvNextForImageClassification", "ConvNextConfig", **settings), images(size=64))


def swin() -> Model:
    settings = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    return on(built("SwinForImageClassification", "SwinConfig", **settings), images())


def segformer() -> Model:
    settings = {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 24, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 16,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    return on(built("SegformerForSemanticSegmentation", "SegformerConfig", **settings), images(size=64))


HUGGING_FACE: Factories = {
    "hf_gpt2": gpt2_with_labels,
    "hf_gpt2_eager_padded": gpt2_eager_padded,
    "hf_gpt2_without_cache": lambda: on(gpt2(use_cache=False), tokens(2, 16)),
    "hf_gpt2_checkpointed": gpt2_checkpointed,
    "hf_llama": partial(llama, use_cache=False),
    "hf_llama_cache": partial(llama, use_cache=True),
    "hf_llama_padded": partial(llama, padded=True, use_cache=False),
    "hf_llama_padded_cache": partial(llama, padded=True, use_cache=True),
    "hf_mixtral": mixtral,
    "hf_bert": partial(bert, 16, 16),
    "hf_bert_padded": partial(bert, 16, 9, 12),
    "hf_bert_eager_padded": partial(bert, 16, 9, attn_implementation="eager"),
    "hf_t5": t5,
    "hf_t5_padded": partial(t5, padded=True),
    "hf_whisper": whisper,
    "hf_vit": vit,
    "hf_resnet": resnet,
    "hf_regnet": regnet,
    "hf_mobilenet": mobilenet,
    "hf_convnext": convnext,
    "hf_swin": swin,
    "hf_segformer": segformer,
}
