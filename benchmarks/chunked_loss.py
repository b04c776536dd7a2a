"""A language model's step with logits that exist whole, and with `rockmate.nn.ChunkedCrossEntropy`.

    python benchmarks/chunked_loss.py                          # some minutes; writes into benchmarks/results/
    python benchmarks/chunked_loss.py --quick --output folder  # a tiny model, whose times mean nothing

Both take turns in one process, on the same weights and tokens. Bytes do not vary; times need an idle machine. README.md
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
from torch import Tensor
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
from rockmate.nn import ChunkedCrossEntropy
from rockmate.units import format_bytes, format_ms
from rockmate.zoo import Llama, LlamaConfig

RESULTS = "chunked-loss-cpu.json"
LARGE = LlamaConfig(4, 512, 8, 4, 1408, context=512, vocabulary=32_000)
TINY = LlamaConfig(1, 32, 2, 2, 64, context=64, vocabulary=1_000)
PEAK_SHARE, TIME_RATIO = 0.5, 1.05  # the bars

Step = Callable[[Llama, Tensor, Tensor], Tensor]


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


def gradients(model: Llama) -> list[Tensor]:
    """Of all parameters, in float64."""
    return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]


def measured(model: Llama, tokens: Tensor, target: Tensor, ways: dict[str, Step], repeats: int) -> list[Row]:
    """Peaks, and times by turns."""
    peaks, differences = {}, {}
    times: dict[str, list[float]] = {way: [] for way in ways}
    expected: list[Tensor] = []
    for way, step in ways.items():
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with PeakMemory() as memory:
                step(model, tokens, target).backward()
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
            step(model, tokens, target).backward()
            times[way].append((time.perf_counter() - started) * 1e3)
    return [Row(way, peaks[way], times[way], differences[way]) for way in ways]


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
    torch.manual_seed(0)
    model = Llama(config)
    tokens = torch.randint(config.vocabulary, (options.batch, config.context))
    target = torch.randint(config.vocabulary, (options.batch, config.context))
    ways: dict[str, Step] = {"whole": whole, "chunked": partial(chunked, ChunkedCrossEntropy())}
    rows = measured(model, tokens, target, ways, options.repeats)
    table = new_table(f"{config.layers} layers of {config.width}, {options.batch} rows of {config.context} tokens")
    for heading in ("peak", "of whole", "time", "of whole", "gradients apart"):
        table.add_column(heading, justify="right")
    first = rows[0]
    for row in rows:
        shares = [row.peak_bytes / first.peak_bytes, row.time_ms / first.time_ms]
        peak, took = format_bytes(row.peak_bytes), format_ms(row.time_ms)
        table.add_row(row.way, peak, f"{shares[0]:.3f}", took, f"{shares[1]:.3f}", f"{row.gradient_difference:.1e}")
    console.print(table)
    bars = [
        bar("peak of the step, of that with whole logits", rows[1].peak_bytes / first.peak_bytes, PEAK_SHARE),
        bar("its time, of that with whole logits", rows[1].time_ms / first.time_ms, TIME_RATIO),
    ]
    print_bars(bars)
    about = circumstances(options) | {"code": code_version(), "batch": options.batch}
    report = {"circumstances": about, "model": asdict(config), "rows": [asdict(row) for row in rows], "bars": bars}
    write_report(options.output, RESULTS, report)


if __name__ == "__main__":
    main()
