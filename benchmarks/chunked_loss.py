"""A language model's step with logits that exist whole, and with those of a few rows at a time.

    python benchmarks/chunked_loss.py                          # some minutes; writes into benchmarks/results/
    python benchmarks/chunked_loss.py --quick --output folder  # a tiny model, whose times mean nothing

`rockmate.nn.ChunkedCrossEntropy` in a model of ours, `rockmate.nn.chunk_logits` of one of transformers. The ways take
turns in one process, on the same weights and tokens. Bytes do not vary; times need an idle machine. README.md
says more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.reporting import (
    bar,
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    print_bars,
    write_report,
)
from rockmate import PeakMemory
from rockmate.nn import ChunkedCrossEntropy, chunk_logits
from rockmate.nn.chunked_logits import Chunks
from rockmate.units import format_bytes, format_ms
from rockmate.zoo import Llama, LlamaConfig

RESULTS = "chunked-loss-cpu.json"
LARGE = LlamaConfig(4, 512, 8, 4, 1408, context=512, vocabulary=32_000)
TINY = LlamaConfig(1, 32, 2, 2, 64, context=64, vocabulary=1_000)
PEAK_SHARE, TIME_RATIO = 0.5, 1.05  # the bars

Step = Callable[[], Tensor]  # the loss of one step


@dataclass(frozen=True)
class Row:
    """One way to have the loss."""

    way: str
    peak_bytes: int
    times_ms: list[float]
    gradient_difference: float  # from those of logits that exist whole, over their norm

    @property
    def time_ms(self) -> float:
        """The median."""
        return statistics.median(self.times_ms)


def whole(model: Llama, tokens: Tensor, target: Tensor) -> Tensor:
    """The loss as people write it."""
    return cross_entropy(model(tokens).flatten(0, 1), target.flatten())


def chunked(criterion: ChunkedCrossEntropy, model: Llama, tokens: Tensor, target: Tensor) -> Tensor:
    """The same, a few rows at a time."""
    hidden = model.final_norm(model.blocks(model.embedding(tokens)))
    return criterion(hidden, model.head.weight, target)


def gradients(model: nn.Module) -> list[Tensor]:
    """Of all parameters, in float64."""
    return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]


def measured(model: nn.Module, ways: dict[str, Step], repeats: int) -> list[Row]:
    """Peaks, and times by turns."""
    peaks, differences = {}, {}
    times: dict[str, list[float]] = {way: [] for way in ways}
    expected: list[Tensor] = []
    for way, step in ways.items():
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with PeakMemory() as memory:
                step().backward()
        peaks[way] = memory.peak_bytes
        found = gradients(model)
        expected = expected or found
        norm = sum(float(one.square().sum()) for one in expected) ** 0.5
        apart = sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True)) ** 0.5
        differences[way] = apart / norm
    for _ in range(repeats):
        for way, step in ways.items():
            model.zero_grad(set_to_none=True)
            started = time.perf_counter()
            step().backward()
            times[way].append((time.perf_counter() - started) * 1e3)
    return [Row(way, peaks[way], times[way], differences[way]) for way in ways]


def of_the_zoo(config: LlamaConfig, batch: int) -> tuple[nn.Module, dict[str, Step]]:
    """Our Llama, whose user writes the loss."""
    model, criterion = Llama(config), ChunkedCrossEntropy()
    tokens, target = torch.randint(config.vocabulary, (2, batch, config.context))

    def whole() -> Tensor:
        return cross_entropy(model(tokens).flatten(0, 1), target.flatten())

    def chunked() -> Tensor:
        hidden = model.final_norm(model.blocks(model.embedding(tokens)))
        return criterion(hidden, model.head.weight, target)

    return model, {"whole": whole, "ChunkedCrossEntropy": chunked}


def of_transformers(config: LlamaConfig, batch: int) -> tuple[nn.Module, dict[str, Step]]:
    """One of the same sizes of the transformers library, which makes its loss itself."""
    import transformers

    settings = transformers.LlamaConfig(
        num_hidden_layers=config.layers,
        hidden_size=config.width,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_value_heads,
        intermediate_size=config.feed_forward_width,
        max_position_embeddings=config.context,
        vocab_size=config.vocabulary,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(settings).train()
    tokens = torch.randint(config.vocabulary, (batch, config.context))

    def step(chunks: Chunks) -> Tensor:
        chunk_logits(model, chunks)
        loss: Tensor = model(tokens, labels=tokens).loss
        return loss

    return model, {"transformers, whole": partial(step, None), "transformers, chunk_logits": partial(step, "auto")}


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "a tiny model")
    parser.add_argument("--batch", type=int, default=4, help="rows of tokens (default 4)")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each (default 9)")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    config = TINY if options.quick else LARGE
    rows: list[Row] = []
    for make in (of_the_zoo, of_transformers):
        torch.manual_seed(0)
        rows += measured(*make(config, options.batch), options.repeats)
    table = new_table(f"{config.layers} layers of {config.width}, {options.batch} rows of {config.context} tokens")
    for heading in ("peak", "of whole", "time", "of whole", "gradients apart"):
        table.add_column(heading, justify="right")
    bars = []
    for whole, chunked in (rows[:2], rows[2:]):
        for row in (whole, chunked):
            shares = [row.peak_bytes / whole.peak_bytes, row.time_ms / whole.time_ms]
            peak, took = format_bytes(row.peak_bytes), format_ms(row.time_ms)
            table.add_row(row.way, peak, f"{shares[0]:.3f}", took, f"{shares[1]:.3f}", f"{row.gradient_difference:.1e}")
        bars += [
            bar(f"{chunked.way}: peak of the step, of that with whole logits", shares[0], PEAK_SHARE),
            bar(f"{chunked.way}: its time, of that with whole logits", shares[1], TIME_RATIO),
        ]
    console.print(table)
    print_bars(bars)
    about = circumstances(options) | {"code": code_version(), "batch": options.batch}
    report = {"circumstances": about, "model": asdict(config), "rows": [asdict(row) for row in rows], "bars": bars}
    write_report(options.output, RESULTS, report)


if __name__ == "__main__":
    main()
