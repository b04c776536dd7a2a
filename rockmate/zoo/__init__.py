"""Reference models in plain PyTorch: they know nothing of Rockmate, and serve its demo, benchmarks and tests.

entry = zoo.get("gpt2-demo")
entry.loss(entry.model(*entry.sample)).backward()
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rockmate.zoo.entry import Inputs, Task, ZooEntry, build_entry
from rockmate.zoo.gpt2 import GPT2, GPT2Config, next_token_loss
from rockmate.zoo.mixer import Mixer, MixerConfig
from rockmate.zoo.regnet import RegNet, RegNetConfig
from rockmate.zoo.resnet import ResNet, resnet18, resnet50, resnet101
from rockmate.zoo.transformer import TransformerConfig, TranslationTransformer
from rockmate.zoo.unet import UNet, UNetConfig

__all__ = [
    "GPT2",
    "GPT2Config",
    "Mixer",
    "MixerConfig",
    "RegNet",
    "RegNetConfig",
    "ResNet",
    "TransformerConfig",
    "TranslationTransformer",
    "UNet",
    "UNetConfig",
    "ZooEntry",
    "get",
    "names",
    "resnet18",
    "resnet50",
    "resnet101",
]


def language_task(batch: int, time: int, vocabulary: int) -> Task:
    """Predict each next one of random tokens [batch, time]."""

    def draw(generator: torch.Generator) -> tuple[Inputs, Tensor]:
        tokens = torch.randint(vocabulary, (batch, time + 1), generator=generator)
        return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()

    return Task(draw, next_token_loss)


def translation_task(batch: int, time: int, vocabulary: int) -> Task:
    """Predict each next one of random target tokens [batch, time] from as many source tokens."""

    def draw(generator: torch.Generator) -> tuple[Inputs, Tensor]:
        source = torch.randint(vocabulary, (batch, time), generator=generator)
        tokens = torch.randint(vocabulary, (batch, time + 1), generator=generator)
        return (source, tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous()

    return Task(draw, next_token_loss)


def classification_task(batch: int, size: int, classes: int) -> Task:
    """Name the class of random images [batch, 3, size, size]."""

    def draw(generator: torch.Generator) -> tuple[Inputs, Tensor]:
        images = torch.randn(batch, 3, size, size, generator=generator)
        return (images,), torch.randint(classes, (batch,), generator=generator)

    return Task(draw, F.cross_entropy)


def segmentation_task(batch: int, size: int, classes: int) -> Task:
    """Name the class of each pixel of random images [batch, 3, size, size]."""

    def draw(generator: torch.Generator) -> tuple[Inputs, Tensor]:
        images = torch.randn(batch, 3, size, size, generator=generator)
        return (images,), torch.randint(classes, (batch, size, size), generator=generator)

    return Task(draw, F.cross_entropy)


# The sizes named "demo" are chosen such that a step takes a second or two on two CPU cores, and such that the
# activations are several times larger than the gradients of the parameters, which no schedule can forget.
ENTRIES: dict[str, tuple[Callable[[], nn.Module], Task]] = {
    "gpt2-demo": (lambda: GPT2(GPT2Config.demo()), language_task(4, 256, 4096)),
    "gpt2-small": (lambda: GPT2(GPT2Config.small()), language_task(1, 1024, 50_257)),
    "gpt2-tiny": (lambda: GPT2(GPT2Config.tiny()), language_task(8, 16, 64)),
    "gpt2-tiny-sdpa": (lambda: GPT2(GPT2Config.tiny("sdpa")), language_task(8, 16, 64)),
    "mixer-demo": (lambda: Mixer(MixerConfig.demo()), classification_task(8, 224, 1000)),
    "mixer-tiny": (lambda: Mixer(MixerConfig.tiny()), classification_task(8, 16, 10)),
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
}


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(ENTRIES)


def get(name: str, seed: int = 0, device: torch.device | str = "cpu") -> ZooEntry:
    """The entry of this name, freshly built; weights and data depend on the seed alone.

    Raises:
        KeyError: no such entry; the message lists those there are.
    """
    if name not in ENTRIES:
        raise KeyError(f"the zoo has no {name!r}; it has {', '.join(ENTRIES)}")
    build_model, task = ENTRIES[name]
    return build_entry(name, build_model, task, seed, device)
