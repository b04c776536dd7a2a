"""The problems that solvers are compared on: models measured once and kept as JSON, and random layered graphs.

python benchmarks/problems.py --cache folder                    # measures all models, about three minutes
python benchmarks/problems.py --cache folder --names unet-demo g1
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.random_dags import SIZES, random_problem
from rk_solvers import Chain, Problem, problem_from_json, problem_to_json

if TYPE_CHECKING:
    from rockmate.planning.measured import Measured

Trainable = tuple[Any, Any, Callable[[Any], Any]]  # a module, a sample, and the loss of its output
MODELS = ("gpt2-demo", "resnet50-demo", "resnet101-demo", "unet-demo", "t5-6", "mixer-demo", "gpt2-deep")


def problem_named(name: str, cache: Path) -> tuple[Problem, Chain | None]:
    """A random graph, or a model's problem with its chain: measured the first time, then read from `cache`."""
    if name in SIZES:
        return random_problem(SIZES[name], seed=0), None
    return kept_problem(cache / f"{name}.json", functools.partial(measured, name))


def kept_problem(path: Path, measure: Callable[[], Measured]) -> tuple[Problem, Chain | None]:
    """The problem in the file `path`, with its chain: measured the first time, then read."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = measure()
        path.write_text(problem_to_json(found.problem, found.chain) + "\n", encoding="utf-8")
    return problem_from_json(path.read_text(encoding="utf-8"))


def measured(name: str) -> Measured:
    """The problem and chain of one of `MODELS`, or of any model of the zoo."""
    from rockmate.planning.measured import measure  # torch is needed for this only
    from rockmate.planning.request import PlanRequest

    model, sample, loss = model_named(name)
    return measure(model, sample, PlanRequest(1.0, loss))


def model_named(name: str, device: str = "cpu") -> Trainable:
    """One of `MODELS`, or any model of the zoo, with a sample and the loss of its output.

    Those of transformers have losses of their own, so that they can be moved whole; `gpt2-deep` is for the CPU.
    """
    from torch.utils._pytree import tree_map

    from rockmate import zoo

    if name in OTHERS:
        model, sample, loss = OTHERS[name]()
        return model.to(device), tree_map(lambda tensor: tensor.to(device), sample), loss
    entry = zoo.get(name, device=device)
    return entry.model, entry.sample, entry.loss


def t5(layers: int) -> Trainable:
    """Hugging Face's T5-small, with as many layers in the encoder as in the decoder."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(num_layers=layers, num_decoder_layers=layers, vocab_size=4096, use_cache=False)
    config.decoder_start_token_id = 0
    tokens = torch.randint(4096, (2, 4, 128))
    model = transformers.T5ForConditionalGeneration(config).train()
    return model, {"input_ids": tokens[0], "labels": tokens[1]}, lambda output: output.loss


def llama(layers: int) -> Trainable:
    """Hugging Face's Llama, narrow, with grouped queries and dropout in its attention."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2048,
        max_position_embeddings=256,
        attention_dropout=0.1,
        use_cache=False,
    )
    tokens = torch.randint(2048, (4, 256))
    model = transformers.LlamaForCausalLM(config).train()
    return model, {"input_ids": tokens, "labels": tokens}, lambda output: output.loss


def deep_gpt2(layers: int) -> Trainable:
    """A narrow GPT-2 of very many layers: 100 are 2,500 forward operations."""
    import torch

    from rockmate import zoo

    torch.manual_seed(0)
    model = zoo.GPT2(zoo.GPT2Config(layers=layers, width=64, heads=4, context=128, vocabulary=512)).train()
    tokens = torch.randint(512, (2, 4, 128))
    cross_entropy = torch.nn.functional.cross_entropy
    return model, tokens[0], lambda output: cross_entropy(output.flatten(0, 1), tokens[1].flatten())


OTHERS: dict[str, Callable[[], Trainable]] = {
    "llama-8": functools.partial(llama, 8),
    "t5-6": functools.partial(t5, 6),
    "gpt2-deep": functools.partial(deep_gpt2, 100),
}


def main() -> None:
    """Measures what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of measured problems, filled as needed")
    parser.add_argument("--names", nargs="+", default=[*MODELS, *SIZES], help="models of the zoo, and those above")
    options = parser.parse_args()
    for name in options.names:
        problem, chain = problem_named(name, options.cache)
        print(name, problem, f"{len(chain.blocks)} blocks" if chain else "no chain")


if __name__ == "__main__":
    main()
