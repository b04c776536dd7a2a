"""The models that ways to train are compared on, each with its blocks, at which people put checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.peers.bars import THIRD
from benchmarks.peers.case import Case, Chains
from benchmarks.peers.monet import PUBLISHED
from rockmate import zoo
from rockmate.zoo.entry import Task, build_entry
from rockmate.zoo.tasks import classification_task, segmentation_task, translation_task

SHARES = (0.7, 0.5, 0.4, 0.3, 0.2)
ALSO_AT = {"vgg16": (0.6,)}  # shares that bars speak of, besides
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by their names on the command line
CUDA_FACTOR = 8  # batches are so many times larger there, where MONeT's table does not say how large

Find = Callable[[nn.Module], Chains]
Made = tuple[nn.Module, Any, Callable[[Any], Tensor]]  # the model, its sample, and the loss of its output


def children_of(*paths: str, chained: bool = True) -> Find:
    """What finds all children of these submodules: each submodule's are a chain, unless every child stands alone."""

    def find(model: nn.Module) -> Chains:
        chains = [
            tuple((f"{path}.{name}",) for name, _ in model.get_submodule(path).named_children()) for path in paths
        ]
        return tuple(chains) if chained else tuple((block,) for chain in chains for block in chain)

    return find


def stretches_of(path: str, *starts: str) -> Find:
    """What finds blocks in a Sequential of single layers: each begins with a layer of one of these classes."""

    def find(model: nn.Module) -> Chains:
        blocks: list[list[str]] = []
        for name, child in model.get_submodule(path).named_children():
            if not blocks or type(child).__name__ in starts:
                blocks.append([])
            blocks[-1].append(f"{path}.{name}")
        return (tuple(map(tuple, blocks)),)

    return find


@dataclass(frozen=True)
class Recipe:
    """How a case is made: an entry of the zoo or a function of its own, and where its blocks are."""

    make: Callable[[int, torch.device, bool], Made]
    find: Find
    as_published: Callable[[torch.device], Made] | None = None  # on a GPU: in the size that MONeT's table has it in


def from_zoo(entry: str, tiny: str, times: int = 1) -> Callable[[int, torch.device, bool], Made]:
    """What makes a model of the zoo with its batch `times` that of the entry, and as many more, or its tiny one."""

    def make(factor: int, device: torch.device, quick: bool) -> Made:
        name = tiny if quick else entry
        made = zoo.get(name, device=device, batch=None if quick else factor * times * zoo.ENTRIES[name][1].batch)
        return made.model, made.sample, made.loss

    return make


def published(name: str, build: Callable[[], nn.Module], task: Callable[[int], Task]) -> Callable[[torch.device], Made]:
    """What makes a model of MONeT's table with the batch that it has there; `task` is one of a batch."""

    def make(device: torch.device) -> Made:
        made = build_entry(name, build, task(PUBLISHED[name].batch), 0, device)
        return made.model, made.sample, made.loss

    return make


def imagenet(batch: int) -> Task:
    """Images of the usual size in the usual number of classes."""
    return classification_task(batch, 224, 1000)


def translation(factor: int, device: torch.device, quick: bool) -> Made:
    """`nn.Transformer`, half as wide as the paper's and with three layers on either side."""
    if quick:
        made = zoo.get("transformer-tiny", device=device)
    else:
        config = zoo.TransformerConfig(layers=3, width=256, feed_forward_width=1024, context=128, vocabulary=4096)
        task = translation_task(8 * factor, 128, 4096)
        made = build_entry("transformer", lambda: zoo.TranslationTransformer(config), task, 0, device)
    return made.model, made.sample, made.loss


def hugging_face(kind: str) -> Callable[[int, torch.device, bool], Made]:
    """What makes a model of the transformers library from its configuration, with random weights and its dropout on."""

    def make(factor: int, device: torch.device, quick: bool) -> Made:
        import transformers

        width, layers, vocabulary = (32, 2, 64) if quick else (256, 6, 1024)
        batch, time = (4, 16) if quick else (4 * factor, 256)
        config_class, model_class = (getattr(transformers, name) for name in HUGGING_FACE[kind])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config_class(**settings_of(kind, width, layers, vocabulary, time))).to(device).train()
            tokens = torch.randint(3, vocabulary, (2, batch, time)).to(device)
        predicts_itself = kind in ("gpt2", "llama")  # one place further on
        sample = {"input_ids": tokens[0], "labels": tokens[0 if predicts_itself else 1]}
        return model, sample, loss_of

    return make


HUGGING_FACE = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
}


def settings_of(kind: str, width: int, layers: int, vocabulary: int, time: int) -> dict[str, Any]:
    """Sizes under the names that each configuration gives them."""
    settings: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": time},
        "llama": {
            "hidden_size": width,
            "intermediate_size": 8 * width // 3,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": time,
            "attention_dropout": 0.1,
        },
        "bert": {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "max_position_embeddings": time,
        },
        "t5": {
            "d_model": width,
            "d_ff": 4 * width,
            "d_kv": width // 4,
            "num_heads": 4,
            "num_layers": layers // 2 + 1,
            "decoder_start_token_id": 0,
        },
    }
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {**settings[kind], **ends, "vocab_size": vocabulary, "use_cache": False}


def loss_of(output: Any) -> Tensor:
    """The loss that the library's models compute."""
    return output.loss


RECIPES: dict[str, Recipe] = {
    "gpt2": Recipe(from_zoo("gpt2-demo", "gpt2-tiny"), children_of("blocks")),
    "hf-gpt2": Recipe(hugging_face("gpt2"), children_of("transformer.h")),
    "hf-llama": Recipe(hugging_face("llama"), children_of("model.layers")),
    "hf-bert": Recipe(hugging_face("bert"), children_of("bert.encoder.layer")),
    "hf-t5": Recipe(hugging_face("t5"), children_of("encoder.block", "decoder.block", chained=False)),
    "vit": Recipe(from_zoo("vit-demo", "vit-tiny"), children_of("blocks")),
    # In a batch of 8 the gradients of parameters are a seventh of the peak, and 0.3 of the peak is out of reach.
    "resnet50": Recipe(
        from_zoo("resnet50-demo", "resnet50-tiny", times=2),
        children_of("blocks"),
        published("resnet50", zoo.resnet50, imagenet),
    ),
    "resnet101": Recipe(from_zoo("resnet101-demo", "resnet101-tiny"), children_of("blocks")),
    # In a batch of 4 the gradients of parameters are a third of the peak, and half of the peak is out of reach.
    "unet": Recipe(
        from_zoo("unet-demo", "unet-tiny", times=4),
        children_of("down", "up", chained=False),
        published(
            "unet", lambda: zoo.UNet(zoo.UNetConfig(classes=2)), lambda batch: segmentation_task(batch, (416, 608), 2)
        ),
    ),
    # As with ResNet-50: in a batch of 8 the least is proven to be 0.216 of the peak.
    "mixer": Recipe(from_zoo("mixer-demo", "mixer-tiny", times=2), children_of("blocks")),
    "vgg16": Recipe(
        from_zoo("vgg16-demo", "vgg-tiny"),
        stretches_of("features", "Conv2d"),
        published("vgg16", lambda: zoo.VGG(zoo.VGGConfig()), imagenet),
    ),
    "mobilenet-v2": Recipe(
        from_zoo("mobilenet-v2-demo", "mobilenet-v2-tiny"),
        stretches_of("features", "Conv2d", "InvertedResidual"),
        published("mobilenet-v2", lambda: zoo.MobileNetV2(zoo.MobileNetV2Config()), imagenet),
    ),
    "googlenet": Recipe(
        from_zoo("googlenet-demo", "googlenet-tiny"),
        children_of("blocks"),
        published("googlenet", lambda: zoo.GoogLeNet(zoo.GoogLeNetConfig()), imagenet),
    ),
    "densenet121": Recipe(
        from_zoo("densenet121-demo", "densenet-tiny"), stretches_of("blocks", "DenseLayer", "BatchNorm2d")
    ),
    "transformer": Recipe(translation, children_of("transformer.encoder.layers", "transformer.decoder.layers")),
}


def case_named(
    name: str,
    device: torch.device | str = "cpu",
    quick: bool = False,
    dtype: torch.dtype = torch.float32,
    factor: int | None = None,
) -> Case:
    """The case of that name. Batches are `factor` times larger than on a CPU.

    If that is None, a GPU has the batches of MONeT's table, and of what is not in it ones `CUDA_FACTOR` times larger.
    """
    device, recipe = torch.device(device), RECIPES[name]
    on_gpu = device.type == "cuda"
    if on_gpu and not quick and factor is None and recipe.as_published is not None:
        model, sample, loss = recipe.as_published(device)
    else:
        model, sample, loss = recipe.make(factor or (CUDA_FACTOR if on_gpu else 1), device, quick)
    if dtype != torch.float32:
        model = model.to(dtype)
        sample = tree_map_only(Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, sample)
    thirds = (THIRD,) if on_gpu and name in PUBLISHED else ()
    shares = tuple(sorted({*SHARES, *ALSO_AT.get(name, ()), *thirds}, reverse=True))
    return Case(name, model, sample, loss, recipe.find(model), (0.7, 0.5) if quick else shares)
