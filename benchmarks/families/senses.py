"""Images, video, sound, and models of several of them with text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.families.core import (
    BATCH,
    END,
    LENGTH,
    Batch,
    Family,
    classes,
    config,
    floats,
    images,
    model,
    padded,
    tokens,
)

_STAGES = {"depths": [2, 2, 2, 2], "hidden_sizes": [8, 16, 24, 32]}

# `<stem>ForImageClassification` of 64 x 64 pixels.
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "Beit": {"image_size": 64, "patch_size": 8},
    "Bit": {"embedding_size": 8, "num_groups": 4, **_STAGES},
    "ConvNext": _STAGES,
    "ConvNextV2": _STAGES,
    "Cvt": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "Data2VecVision": {"image_size": 64, "patch_size": 8},
    "DeiT": {"image_size": 64, "patch_size": 8},
    "Dinov2": {"image_size": 64, "patch_size": 8},
    "EfficientNet": {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "FocalNet": {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "Hiera": {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8]},
    "IJepa": {"image_size": 64, "patch_size": 8},
    "Levit": {
        "image_size": 64,
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 3, 4],
        "depths": [2, 2, 2],
        "drop_path_rate": 0,
    },
    "MobileNetV1": {"image_size": 64, "depth_multiplier": 0.25},
    "MobileNetV2": {"image_size": 64, "depth_multiplier": 0.35},
    "MobileViT": {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 16, 24, 32, 32, 32, 64]},
    "MobileViTV2": {"image_size": 64, "width_multiplier": 0.25},
    "PoolFormer": {"depths": [2, 2, 2, 2], "hidden_sizes": [8, 16, 24, 32]},
    "Pvt": {
        "image_size": 64,
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [16, 32, 48, 64],
        "num_attention_heads": [1, 2, 3, 4],
    },
    "PvtV2": {
        "image_size": 64,
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [16, 32, 48, 64],
        "num_attention_heads": [1, 2, 3, 4],
    },
    "RegNet": {"embedding_size": 8, "groups_width": 8, **_STAGES},
    "ResNet": {"embedding_size": 8, "depths": [6, 3, 2, 2], "hidden_sizes": [8, 16, 24, 32]},
    "Segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4]},
    "Siglip": {
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "image_size": 64,
            "num_attention_heads": 4,
            "patch_size": 8,
            "attention_dropout": 0.1,
        }
    },
    "SwiftFormer": {"image_size": 64, "depths": [1, 1, 2, 1], "embed_dims": [16, 24, 32, 48]},
    "Swin": {
        "image_size": 64,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "Swinv2": {
        "image_size": 64,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "ViT": {"image_size": 64, "patch_size": 8},
    "ViTMSN": {"image_size": 64, "patch_size": 8},
}

_MOSTLY_WEIGHTS = ("Hiera", "Levit")  # they take larger batches

# `<stem>ForCTC` on raw sound.
_CONVOLUTIONS = {"conv_dim": (16, 16, 16), "conv_stride": (4, 4, 2), "conv_kernel": (8, 4, 4)}
_SOUND = {
    **_CONVOLUTIONS,
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
HEARERS: dict[str, dict[str, Any]] = {
    "Hubert": _SOUND,
    "SEW": {**_SOUND, "squeeze_factor": 2},
    "UniSpeech": _SOUND,
    "UniSpeechSat": _SOUND,
    "Wav2Vec2": _SOUND,
    "Wav2Vec2Conformer": {**_SOUND, "position_embeddings_type": "relative", "conv_depthwise_kernel_size": 7},
    "WavLM": _SOUND,
    "Data2VecAudio": {**_SOUND, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 7},
}


def sense_families() -> Iterator[Family]:
    """Every one of this module."""
    for stem, own in CLASSIFIERS.items():
        yield Family(stem, "vision", partial(_classifier, stem, own))
    for stem, own in HEARERS.items():
        yield Family(stem, "audio", partial(_hearer, stem, own))
    yield Family("AST", "audio", _ast)
    yield Family("Whisper", "audio", _whisper)
    yield Family("Speech2Text", "audio", _speech2text)
    yield Family("VideoMAE", "vision", partial(_video, "VideoMAE", {"tubelet_size": 2}))
    yield Family("Vivit", "vision", partial(_video, "Vivit", {"tubelet_size": [2, 16, 16]}))
    yield Family("Timesformer", "vision", partial(_video, "Timesformer", {"drop_path_rate": 0}))
    yield Family("DPT", "vision", _dpt)
    yield Family("GLPN", "vision", _glpn)
    yield Family("Yolos", "vision", _yolos)
    yield Family("CLIP", "multimodal", partial(_pair, "CLIP"))
    yield Family("SiglipPair", "multimodal", partial(_pair, "Siglip"), "SiglipConfig")
    yield Family("ChineseCLIP", "multimodal", partial(_pair, "ChineseCLIP"))
    yield Family("Blip", "multimodal", partial(_pair, "Blip"))
    yield Family("AltCLIP", "multimodal", partial(_pair, "AltCLIP"))
    yield Family("Vilt", "multimodal", _vilt)
    yield Family("VisualBert", "multimodal", _visual_bert)
    yield Family("Lxmert", "multimodal", _lxmert)
    yield Family("LayoutLM", "multimodal", _layoutlm)
    yield Family("Llava", "multimodal", _llava)
    yield Family("Git", "multimodal", _git)
    yield Family("VisionEncoderDecoder", "multimodal", _captioner)
    yield Family("TrOCR", "multimodal", _trocr)


def _classifier(stem: str, own: dict[str, Any]) -> tuple[torch.nn.Module, Batch]:
    batch = 4 * BATCH if stem in _MOSTLY_WEIGHTS else BATCH
    sample = {"pixel_values": images(batch=batch), "labels": classes(batch)}
    return model(f"{stem}ForImageClassification", config(f"{stem}Config", **own)), sample


def _hearer(stem: str, own: dict[str, Any]) -> tuple[torch.nn.Module, Batch]:
    made = model(f"{stem}ForCTC", config(f"{stem}Config", ctc_zero_infinity=True, **own))
    return made, {"input_values": floats(BATCH, 2048), "labels": tokens(length=8, limit=32)}


def _ast() -> tuple[torch.nn.Module, Batch]:
    settings = config("ASTConfig", patch_size=8, num_mel_bins=32, max_length=64, frequency_stride=8, time_stride=8)
    return model("ASTForAudioClassification", settings), {"input_values": floats(8, 64, 32), "labels": classes(8)}


def _whisper() -> tuple[torch.nn.Module, Batch]:
    settings = config(
        "WhisperConfig",
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    sample = {"input_features": floats(BATCH, 16, 128), "labels": tokens(length=32)}
    return model("WhisperForConditionalGeneration", settings), sample


def _speech2text() -> tuple[torch.nn.Module, Batch]:
    settings = config("Speech2TextConfig", input_feat_per_channel=16, conv_channels=64, max_source_positions=256)
    sample = {"input_features": floats(BATCH, 256, 16), "labels": tokens(length=32)}
    return model("Speech2TextForConditionalGeneration", settings), sample


def _video(stem: str, own: dict[str, Any]) -> tuple[torch.nn.Module, Batch]:
    settings = config(f"{stem}Config", image_size=64, patch_size=16, num_frames=8, **own)
    return model(f"{stem}ForVideoClassification", settings), {
        "pixel_values": floats(8, 8, 3, 64, 64),
        "labels": classes(8),
    }


def _dpt() -> tuple[torch.nn.Module, Batch]:
    settings = config(
        "DPTConfig",
        image_size=64,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        is_hybrid=False,
        neck_hidden_sizes=[8, 16, 24, 32],
        fusion_hidden_size=16,
    )
    labels = torch.randint(2, (BATCH, 64, 64))
    return model("DPTForSemanticSegmentation", settings), {"pixel_values": images(), "labels": labels}


def _glpn() -> tuple[torch.nn.Module, Batch]:
    settings = config(
        "GLPNConfig",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        decoder_hidden_size=16,
        num_attention_heads=[1, 2, 2, 4],
    )
    return model("GLPNForDepthEstimation", settings), {"pixel_values": images(), "labels": floats(BATCH, 64, 64).abs()}


def _yolos() -> tuple[torch.nn.Module, Batch]:
    settings = config("YolosConfig", image_size=[64, 64], patch_size=8, num_detection_tokens=8)
    return model("YolosForObjectDetection", settings), {"pixel_values": images()}


_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 72,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.1,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "projection_dim": 32,
}
_SIGHT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
    "attention_dropout": 0.1,
    "projection_dim": 32,
}


def _pair(stem: str) -> tuple[torch.nn.Module, Batch]:
    """Images and texts that belong together."""
    settings = config(f"{stem}Config", text_config=dict(_TEXT), vision_config=dict(_SIGHT), projection_dim=32)
    text = tokens()
    text[:, -1] = END
    sample = {"input_ids": text, "pixel_values": images(), "return_loss": True}
    return model(f"{stem}Model", settings), sample


def _vilt() -> tuple[torch.nn.Module, Batch]:
    settings = config("ViltConfig", image_size=64, patch_size=8, max_image_length=-1)
    sample = {**padded(), "pixel_values": images(), "labels": torch.rand(BATCH, 2)}
    return model("ViltForQuestionAnswering", settings), sample


def _visual_bert() -> tuple[torch.nn.Module, Batch]:
    settings = config("VisualBertConfig", visual_embedding_dim=32)
    return model("VisualBertForVisualReasoning", settings), {
        **padded(length=32),
        "visual_embeds": floats(BATCH, 16, 32),
        "labels": classes(),
    }


def _lxmert() -> tuple[torch.nn.Module, Batch]:
    settings = config("LxmertConfig", visual_feat_dim=32, l_layers=2, x_layers=2, r_layers=2, num_qa_labels=4)
    return model("LxmertForQuestionAnswering", settings), {
        **padded(length=32),
        "visual_feats": floats(BATCH, 16, 32),
        "visual_pos": torch.rand(BATCH, 16, 4),
        "labels": classes(count=4),
    }


def _layoutlm() -> tuple[torch.nn.Module, Batch]:
    settings = config("LayoutLMConfig", max_2d_position_embeddings=128)
    boxes = torch.randint(1, 60, (BATCH, LENGTH, 2))
    sample = {**padded(), "bbox": torch.cat([boxes, boxes + 20], -1), "labels": classes()}
    return model("LayoutLMForSequenceClassification", settings), sample


def _llava() -> tuple[torch.nn.Module, Batch]:
    image_token, patches = 3, (32 // 8) ** 2
    settings = config(
        "LlavaConfig",
        text_config={**_TEXT, "model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 128},
        vision_config={**_SIGHT, "model_type": "clip_vision_model", "image_size": 32},
        image_token_index=image_token,
    )
    text = tokens()
    text[:, 4 : 4 + patches] = image_token
    return model("LlavaForConditionalGeneration", settings), {
        "input_ids": text,
        "pixel_values": images(32),
        "attention_mask": torch.ones_like(text),
        "labels": tokens(),
    }


def _git() -> tuple[torch.nn.Module, Batch]:
    settings = config("GitConfig", vision_config={**_SIGHT, "image_size": 32})
    return model("GitForCausalLM", settings), {"input_ids": tokens(), "pixel_values": images(32), "labels": tokens()}


def _captioner() -> tuple[torch.nn.Module, Batch]:
    sight = config("ViTConfig", image_size=64, patch_size=8)
    text = config("GPT2Config", add_cross_attention=True, is_decoder=True)
    settings = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(sight, text)
    settings.decoder_start_token_id, settings.pad_token_id = 1, 0
    return model("VisionEncoderDecoderModel", settings), {"pixel_values": images(), "labels": tokens(length=32)}


def _trocr() -> tuple[torch.nn.Module, Batch]:
    sight = config("DeiTConfig", image_size=64, patch_size=8)
    text = config("TrOCRConfig", is_decoder=True, add_cross_attention=True, cross_attention_hidden_size=64)
    settings = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(sight, text)
    settings.decoder_start_token_id, settings.pad_token_id = 1, 0
    return model("VisionEncoderDecoderModel", settings), {"pixel_values": images(), "labels": tokens(length=32)}
