"""Time to build the graphs of a model, beside `torch.export` of the same model, and how it grows with the model.

    python benchmarks/graphs.py                          # writes into benchmarks/results/
    python benchmarks/graphs.py --quick --output folder  # shallow models, to see that it runs

Building is everything but measuring: trace, replay check, D and S graphs, blocks and their classes. Models are
narrow, with random weights: their depth is what counts. Needs transformers. README.md says more.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from rich.table import Table
from torch import nn

from benchmarks.reporting import bar, circumstances, console, new_table, option_parser, print_bars, write_report
from rkgb import chain, cut, d_to_s, equivalent_classes, make_sample
from rkgb.pipeline import exact_trace
from rockmate import zoo

MOST_TIMES_EXPORT = 3.0
MOST_SECONDS = 10.0
MOST_SECONDS_DEEP = 60.0  # for DEEP_NODES
DEEP_NODES = 2_500
STAGES = ("trace", "simplify", "cut")


@dataclass(frozen=True)
class Subject:
    """A model and the keyword arguments of its sample."""

    model: nn.Module
    sample: dict[str, torch.Tensor]


@dataclass
class Timing:
    """What was measured of one model."""

    name: str
    operations: int = 0
    nodes: int = 0  # of the S graph
    blocks: int = 0
    distinct_blocks: int = 0
    export_s: list[float] = field(default_factory=list)
    build_s: list[float] = field(default_factory=list)
    stage_s: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in STAGES})

    @property
    def ratio(self) -> float:
        """Median time of building relative to that of torch.export."""
        return statistics.median(self.build_s) / statistics.median(self.export_s)


def gpt2(layers: int) -> Subject:
    """Hugging Face's GPT-2."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return Subject(transformers.GPT2LMHeadModel(config).train(), {"input_ids": torch.randint(64, (2, 8))})


def resnet(blocks_of_third_stage: int) -> Subject:
    """Hugging Face's ResNet; 23 blocks in the third stage make a ResNet-101."""
    depths = [3, 4, blocks_of_third_stage, 3]
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64, 128], depths=depths)
    model = transformers.ResNetForImageClassification(config).train()
    return Subject(model, {"pixel_values": torch.randn(2, 3, 64, 64)})


def t5(layers: int) -> Subject:
    """Hugging Face's T5, with as many layers in the encoder as in the decoder."""
    config = transformers.T5Config(
        num_layers=layers, num_decoder_layers=layers, d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=64,
        use_cache=False,
    )  # fmt: skip
    sample = {"input_ids": torch.randint(64, (2, 12)), "decoder_input_ids": torch.randint(64, (2, 8))}
    return Subject(transformers.T5ForConditionalGeneration(config).train(), sample)


def hand_written_gpt2(layers: int) -> Subject:
    """The zoo's GPT-2, whose depth is varied to see how time grows."""
    config = zoo.GPT2Config(layers=layers, width=32, heads=4, context=16, vocabulary=64)
    return Subject(zoo.GPT2(config).train(), {"tokens": torch.randint(64, (2, 8))})


# Name, with the number of layers: how to build it, its depth, its depth with --quick.
MODELS: dict[str, tuple[Callable[[int], Subject], int, int]] = {
    "GPT-2 (12)": (gpt2, 12, 2),
    "ResNet-101": (resnet, 23, 2),
    "T5 (6 + 6)": (t5, 6, 1),
}
DEPTHS = (10, 20, 50, 100)  # of the hand-written GPT-2: from 250 to 2,500 S nodes
QUICK_DEPTHS = (2, 4)


def export_seconds(subject: Subject) -> float:
    """Time of what building is compared with."""
    gc.collect()
    start = time.perf_counter()
    torch.export.export(subject.model, (), subject.sample)
    return round(time.perf_counter() - start, 4)


def build(subject: Subject, timing: Timing) -> None:
    """Builds the graphs once and notes what it took."""
    gc.collect()
    marks = [time.perf_counter()]
    _, dataflow = exact_trace(subject.model, make_sample(subject.model, subject.sample))
    marks.append(time.perf_counter())
    graph = d_to_s(dataflow)
    marks.append(time.perf_counter())
    blocks = cut(graph, chain(graph).skip_values)
    classes = equivalent_classes(dataflow, blocks)
    marks.append(time.perf_counter())
    for stage, start, end in zip(STAGES, marks[:-1], marks[1:], strict=True):
        timing.stage_s[stage].append(round(end - start, 4))
    timing.build_s.append(round(marks[-1] - marks[0], 4))
    timing.operations, timing.nodes = len(dataflow.nodes), len(graph.nodes)
    timing.blocks, timing.distinct_blocks = len(blocks), len(classes)


def compare(repeats: int, quick: bool) -> list[Timing]:
    """Export and build take turns on every model; the first round is not counted, as it fills caches."""
    timings = [Timing(name) for name in MODELS]
    for round_number in range(repeats + 1):
        for timing in timings:
            make, depth, shallow = MODELS[timing.name]
            subject = make(shallow if quick else depth)
            console.print(f"round {round_number} of {repeats}: {timing.name}", highlight=False)
            counted = timing if round_number else Timing(timing.name)
            if round_number % 2:
                counted.export_s.append(export_seconds(subject))
            build(subject, counted)
            if not round_number % 2:
                counted.export_s.append(export_seconds(subject))
    return timings


def grow(repeats: int, depths: tuple[int, ...]) -> list[Timing]:
    """Builds the graphs of a GPT-2 of each depth, in turns."""
    timings = [Timing(f"GPT-2 ({depth})") for depth in depths]
    for round_number in range(repeats):
        for timing, depth in zip(timings, depths, strict=True):
            console.print(f"growth, round {round_number + 1} of {repeats}: {depth} layers", highlight=False)
            build(hand_written_gpt2(depth), timing)
    return timings


def judge(compared: list[Timing], growth: list[Timing]) -> list[dict[str, Any]]:
    """Each promise with what was reached."""
    bars = []
    for timing in compared:
        bars.append(bar(f"{timing.name}: build / torch.export", timing.ratio, MOST_TIMES_EXPORT))
        bars.append(bar(f"{timing.name}: build, seconds", statistics.median(timing.build_s), MOST_SECONDS))
    small, large = growth[0], growth[-1]
    times = statistics.median(large.build_s) / statistics.median(small.build_s)
    allowed = large.nodes * math.log(large.nodes) / (small.nodes * math.log(small.nodes))
    bars.append(bar(f"from {small.nodes} to {large.nodes} S nodes: times as long", times, allowed))
    if large.nodes >= DEEP_NODES:
        deep_s = statistics.median(large.build_s)
        bars.append(bar(f"{large.nodes} S nodes: build, seconds", deep_s, MOST_SECONDS_DEEP))
    return bars


def table_of(timings: list[Timing], title: str) -> Table:
    """One line per model."""
    table = new_table(title)
    compared = any(timing.export_s for timing in timings)
    for heading in ("S nodes", "blocks", *STAGES, "build", *(("export", "ratio") if compared else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for timing in timings:
        exported = [f"{statistics.median(timing.export_s):.2f} s", f"{timing.ratio:.2f}×"] if timing.export_s else []
        table.add_row(
            timing.name,
            str(timing.nodes),
            f"{timing.blocks} ({timing.distinct_blocks})",
            *(f"{statistics.median(timing.stage_s[stage]):.2f} s" for stage in STAGES),
            f"{statistics.median(timing.build_s):.2f} s",
            *exported,
        )
    return table


def result_of(timing: Timing) -> dict[str, Any]:
    """What the result file says of a model."""
    medians = {"build_median_s": statistics.median(timing.build_s)}
    return asdict(timing) | medians | ({"time_ratio": timing.ratio} if timing.export_s else {})


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "shallow models, whose times mean nothing")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the first (default 5)")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of side effects of these models, told on each trace
        compared = compare(options.repeats, options.quick)
        growth = grow(max(1, options.repeats // 2), QUICK_DEPTHS if options.quick else DEPTHS)
    bars = judge(compared, growth)
    console.print(table_of(compared, f"building graphs, median of {options.repeats}"))
    console.print(table_of(growth, "growth with depth"))
    print_bars(bars)
    own = {"transformers": transformers.__version__, "repeats": options.repeats}
    report = {
        "circumstances": circumstances(options) | own,
        "models": [result_of(timing) for timing in compared],
        "growth": [result_of(timing) for timing in growth],
        "bars": bars,
    }
    write_report(options.output, "graphs-cpu.json", report)


if __name__ == "__main__":
    main()
