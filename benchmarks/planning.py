"""What planning takes: a first plan, another budget in the process, and another budget by the cache.

    python benchmarks/planning.py                          # narrow models of 12 to 48 layers, and ResNet-50
    python benchmarks/planning.py --quick --output folder  # tiny models: shows that it runs, measures nothing

Each row is measured in a fresh process: seconds of processors of a first plan at half of the eager peak, those of side
processes included but for the search that goes on behind the training, and seconds by the clock of another budget. The
eager step beside it is of the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn

from benchmarks.reporting import (
    ROOT,
    bar,
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    print_bars,
    write_report,
)

BUDGETS = (0.5, 0.4)
RESULTS = "planning-cpu.json"
FIRST_S = {"gpt2-12": 2.5, "gpt2-48": 5.0, "llama-32": 4.0, "resnet50": 7.0}  # of processors, at most
SECOND_S, CACHED_S = 1.0, 2.0  # by the clock, at most; of gpt2-12


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    eager_s: float  # one step, by the clock
    first_cpu_s: float  # of processors
    first_s: float  # by the clock
    second_s: float  # another budget in the process
    cached_s: float  # another budget in another process, by the cache, without imports
    gaps: tuple[float | None, float | None]


def model_of(name: str, quick: bool) -> tuple[nn.Module, torch.Tensor]:
    """A model and its sample."""
    from rockmate import zoo
    from rockmate.zoo.language.gpt2 import GPT2, GPT2Config
    from rockmate.zoo.language.llama import Llama, LlamaConfig

    torch.manual_seed(0)
    if name == "resnet50":
        entry = zoo.get("resnet50-tiny" if quick else "resnet50-demo")
        return entry.model, entry.sample[0]
    layers = 2 if quick else int(name.partition("-")[2])
    narrow: dict[str, Any] = {"vocabulary": 100, "context": 64, "width": 64, "layers": layers, "heads": 4}
    if name.startswith("gpt2"):
        model: nn.Module = GPT2(GPT2Config(**narrow))
    else:
        model = Llama(LlamaConfig(**narrow, key_value_heads=2, feed_forward_width=128))
    return model, torch.randint(0, 100, (8, 64))


def cpu_s() -> float:
    """Seconds of processors so far, of this process and of those that it has waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measured(name: str, quick: bool, cached: bool) -> dict[str, object]:
    """In this process: the first plan, a second one, and eager steps; `cached`, another budget by the cache alone."""
    from rockmate import Rockmate

    warnings.simplefilter("ignore")
    model, sample = model_of(name, quick)
    started_s, started_cpu_s = time.perf_counter(), cpu_s()
    first = Rockmate(model, sample, BUDGETS[1] if cached else BUDGETS[0])
    found: dict[str, object] = {"first_s": time.perf_counter() - started_s, "first_cpu_s": cpu_s() - started_cpu_s}
    if cached:
        return found
    started_s = time.perf_counter()
    second = Rockmate(model, sample, BUDGETS[1])
    found["second_s"] = time.perf_counter() - started_s
    found["gaps"] = (first.plan.gap, second.plan.gap)
    found["eager_s"] = statistics.median(step_s(model, sample) for _ in range(5))
    return found


def step_s(model: nn.Module, sample: torch.Tensor) -> float:
    """An eager step, by the clock."""
    model.zero_grad()
    started_s = time.perf_counter()
    model(sample).float().square().mean().backward()
    return time.perf_counter() - started_s


def row_of(name: str, options: argparse.Namespace) -> Row:
    """Measured in fresh processes, with a cache of their own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ROCKMATE_CACHE": "1", "ROCKMATE_CACHE_DIR": folder}
        outputs = []
        for part in ("first", "cached"):
            command = [sys.executable, "-m", "benchmarks.planning", "--part", part, "--models", name]
            command += ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
            outputs.append(json.loads(done.stdout.splitlines()[-1]))
    one, other = outputs
    gaps = tuple(one["gaps"])
    return Row(
        name, one["eager_s"], one["first_cpu_s"], one["first_s"], one["second_s"], other["first_s"], (gaps[0], gaps[1])
    )


def main() -> None:
    """Run the script."""
    parser = option_parser(__doc__, "tiny models")
    parser.add_argument("--models", nargs="+", choices=tuple(FIRST_S), default=list(FIRST_S))
    parser.add_argument("--part", choices=("first", "cached"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.part:
        print(json.dumps(measured(options.models[0], options.quick, options.part == "cached")))
        return
    rows = [row_of(name, options) for name in options.models]
    table = new_table("Planning at half of the eager peak")
    for heading in ("eager step", "first plan, processors", "by the clock", "second budget", "by the cache"):
        table.add_column(heading, justify="right")
    for row in rows:
        times_s = (row.eager_s, row.first_cpu_s, row.first_s, row.second_s, row.cached_s)
        table.add_row(row.model, *(f"{time_s:.2f} s" for time_s in times_s))
    console.print(table)
    bars = [bar(f"{row.model}: first plan, s of processors", row.first_cpu_s, FIRST_S[row.model]) for row in rows]
    for row in rows[:1]:
        bars.append(bar(f"{row.model}: second budget, s", row.second_s, SECOND_S))
        bars.append(bar(f"{row.model}: second budget by the cache, s", row.cached_s, CACHED_S))
    print_bars(bars)
    content = {
        "circumstances": {"code": code_version(), **circumstances(options)},
        "bars": bars,
        "rows": [asdict(row) for row in rows],
    }
    write_report(options.output, RESULTS, content)


if __name__ == "__main__":
    main()
