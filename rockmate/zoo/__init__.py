"""Reference models in plain PyTorch: they know nothing of Rockmate, and serve its demo, benchmarks and tests.

entry = zoo.get("gpt2-demo")
entry.loss(entry.model(*entry.sample)).backward()
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from rockmate.zoo.entry import Task, ZooEntry, build_entry
from rockmate.zoo.language.bert import BERT, BERTConfig
from rockmate.zoo.language.gpt2 import GPT2, GPT2Config
from rockmate.zoo.language.llama import Llama, LlamaConfig
from rockmate.zoo.language.transformer import TransformerConfig, TranslationTransformer
from rockmate.zoo.tasks import (
    classification_task,
    language_task,
    masked_language_task,
    segmentation_task,
    translation_task,
)
from rockmate.zoo.vision.densenet import DenseNet, DenseNetConfig
from rockmate.zoo.vision.googlenet import GoogLeNet, GoogLeNetConfig
from rockmate.zoo.vision.mixer import Mixer, MixerConfig
from rockmate.zoo.vision.mobilenet import MobileNetV2, MobileNetV2Config
from rockmate.zoo.vision.regnet import RegNet, RegNetConfig
from rockmate.zoo.vision.resnet import ResNet, resnet18, resnet50, resnet101
from rockmate.zoo.vision.unet import UNet, UNetConfig
from rockmate.zoo.vision.vgg import VGG, VGGConfig
from rockmate.zoo.vision.vit import ViT, ViTConfig

__all__ = [
    "BERT",
    "GPT2",
    "VGG",
    "BERTConfig",
    "DenseNet",
    "DenseNetConfig",
    "GPT2Config",
    "GoogLeNet",
    "GoogLeNetConfig",
    "Llama",
    "LlamaConfig",
    "Mixer",
    "MixerConfig",
    "MobileNetV2",
    "MobileNetV2Config",
    "RegNet",
    "RegNetConfig",
    "ResNet",
    "TransformerConfig",
    "TranslationTransformer",
    "UNet",
    "UNetConfig",
    "VGGConfig",
    "ViT",
    "ViTConfig",
    "ZooEntry",
    "get",
    "names",
    "resnet18",
    "resnet50",
    "resnet101",
]


# The sizes named "demo" are chosen such that a step takes a second or two on two CPU cores, and such that the
# activations are several times larger than the gradients of the parameters, which no schedule can forget.
ENTRIES: dict[str, tuple[Callable[[], nn.Module], Task]] = {
    "bert-demo": (lambda: BERT(BERTConfig.demo()), masked_language_task(4, 256, 4096)),
    "bert-tiny": (lambda: BERT(BERTConfig.tiny()), masked_language_task(8, 16, 64)),
    "densenet121-demo": (lambda: DenseNet(DenseNetConfig()), classification_task(4, 224, 1000)),
    "densenet-tiny": (lambda: DenseNet(DenseNetConfig.tiny()), classification_task(8, 32, 10)),
    "googlenet-demo": (lambda: GoogLeNet(GoogLeNetConfig()), classification_task(8, 224, 1000)),
    "googlenet-tiny": (lambda: GoogLeNet(GoogLeNetConfig.tiny()), classification_task(8, 64, 10)),
    "gpt2-demo": (lambda: GPT2(GPT2Config.demo()), language_task(4, 256, 4096)),
    "gpt2-small": (lambda: GPT2(GPT2Config.small()), language_task(1, 1024, 50_257)),
    "gpt2-tiny": (lambda: GPT2(GPT2Config.tiny()), language_task(8, 16, 64)),
    "gpt2-tiny-sdpa": (lambda: GPT2(GPT2Config.tiny("sdpa")), language_task(8, 16, 64)),
    "llama-demo": (lambda: Llama(LlamaConfig.demo()), language_task(4, 256, 4096)),
    "llama-tiny": (lambda: Llama(LlamaConfig.tiny()), language_task(8, 16, 64)),
    "mixer-demo": (lambda: Mixer(MixerConfig.demo()), classification_task(8, 224, 1000)),
    "mixer-tiny": (lambda: Mixer(MixerConfig.tiny()), classification_task(8, 16, 10)),
    "mobilenet-v2-demo": (lambda: MobileNetV2(MobileNetV2Config()), classification_task(8, 224, 1000)),
    "mobilenet-v2-tiny": (lambda: MobileNetV2(MobileNetV2Config.tiny()), classification_task(8, 32, 10)),
    "regnet-demo": (lambda: RegNet(RegNetConfig()), classification_task(8, 224, 1000)),
    "regnet-tiny": (lambda: RegNet(RegNetConfig.tiny()), classification_task(8, 64, 10)),
    "resnet50-demo": (resnet50, classification_task(8, 224, 1000)),
    "resnet101-demo": (resnet101, classification_task(8, 224, 1000)),
    "resnet18-tiny": (lambda: resnet18(classes=10, width=8), classification_task(8, 64, 10)),
    "resnet101-tiny": (lambda: resnet101(classes=10, width=8), classification_task(8, 64, 10)),
    "resnet50-tiny": (lambda: resnet50(classes=10, width=8), classification_task(8, 64, 10)),
    "transformer-tiny": (
        lambda: TranslationTransformer(TransformerConfig.tiny()),
        translation_task(8, 12, 64),
    ),
    "unet-demo": (lambda: UNet(UNetConfig.demo()), segmentation_task(4, 128, 4)),
    "unet-tiny": (lambda: UNet(UNetConfig.tiny()), segmentation_task(2, 32, 4)),
    "vgg16-demo": (lambda: VGG(VGGConfig.demo()), classification_task(4, 224, 1000)),
    "vgg-tiny": (lambda: VGG(VGGConfig.tiny()), classification_task(8, 32, 10)),
    "vit-demo": (lambda: ViT(ViTConfig.demo()), classification_task(8, 224, 1000)),
    "vit-tiny": (lambda: ViT(ViTConfig.tiny()), classification_task(8, 16, 10)),
}


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(ENTRIES)


def get(name: str, seed: int = 0, device: torch.device | str = "cpu", *, batch: int | None = None) -> ZooEntry:
    """The entry of this name, freshly built; weights and data depend on the seed alone.

    `batch` is how many examples its sample and its batches have, where not as many as the entry says; the weights are
    the same for each.

    Raises:
        KeyError: no such entry; the message lists those there are.
        ValueError: the batch is not positive.
    """
    if name not in ENTRIES:
        raise KeyError(f"the zoo has no {name!r}; it has {', '.join(ENTRIES)}")
    if batch is not None and batch < 1:
        raise ValueError(f"a batch of {batch} examples cannot be trained on; give at least 1")
    build_model, task = ENTRIES[name]
    return build_entry(name, build_model, replace(task, batch=batch or task.batch), seed, device)
