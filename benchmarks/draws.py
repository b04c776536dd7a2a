"""Steps of models with dropout whose masks our own loops draw, beside PyTorch's draws and eager steps.

    python benchmarks/draws.py                                   # four models, on one thread and on two; ten minutes
    python benchmarks/draws.py --models vit --numbers-of-threads 1
    python benchmarks/draws.py --quick --output folder           # tiny models, whose times mean nothing

All steps of a model take turns in one process: the eager one, and those of one plan for 0.7 of its peak and of one that
keeps everything, each with our loops and with PyTorch's operation. They give the same bits. Ratios are of medians; a
step's draws are those of the eager one, by PyTorch's profiler. Nothing else should be computed on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers.case import Case
from benchmarks.peers.models import case_named
from benchmarks.reporting import circumstances, code_version, console, new_table, option_parser, write_report
from rkgb.kernels import bernoulli
from rockmate import Rockmate, keep_freed_memory

MODELS = ("vit", "hf-bert", "gpt2", "transformer")
QUICK = ("hf-bert",)
BUDGETS = (1.0, 0.7)
RESULTS = "draws-cpu.json"
Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One way to run a step of a model."""

    model: str
    threads: int
    way: str
    median_ms: float
    over_eager: float
    error: float  # of that ratio
    predicted_over_eager: float | None
    drawn_share: float  # of the eager step's time: what PyTorch draws in


@contextmanager
def pytorchs_draws() -> Iterator[None]:
    """Inside, our loops are left alone."""
    with mock.patch.object(bernoulli, "quicker", return_value=None):
        yield


def training_step(forward: Callable[..., Any], weights: torch.nn.Module, case: Case) -> Step:
    """Forward and backward; gradients go afterwards."""

    def step() -> None:
        case.step(forward)
        weights.zero_grad()

    return step


def drawn_share(step: Step, steps: int) -> float:
    """Of the step's time: what PyTorch's draws take."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    times = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    return times.get("aten::bernoulli_", 0.0) / sum(times.values())


def rows_of(name: str, threads: int, options: argparse.Namespace) -> list[Row]:
    """All ways of one model by turns."""
    torch.set_num_threads(threads)
    case = case_named(name, torch.device("cpu"), options.quick)
    weights = case.fresh_model()
    ways: dict[str, Step] = {"eager": training_step(weights, weights, case)}
    predicted: dict[str, float] = {}
    for budget in BUDGETS:
        model = Rockmate(case.fresh_model(), case.sample, budget, loss=case.loss, cache=False, plan_in_background=False)
        step = training_step(model, model, case)
        ways[f"rockmate {budget:g}"] = step
        ways[f"rockmate {budget:g}, PyTorch's draws"] = pytorchs_draws()(step)
        predicted[f"rockmate {budget:g}"] = 1 + model.plan.overhead
    share = drawn_share(ways["eager"], 1 if options.quick else 3)
    times: dict[str, list[float]] = {way: [] for way in ways}
    order, turn = random.Random(0), list(ways.items())
    for _ in range(2 if options.quick else options.repeats):
        order.shuffle(turn)
        for way, step in turn:
            started = time.perf_counter()
            step()
            times[way].append(1e3 * (time.perf_counter() - started))
    eager_ms = statistics.median(times["eager"])
    rows = []
    for way, spent in times.items():
        median_ms = statistics.median(spent)
        deviation = statistics.median(abs(one - median_ms) for one in spent)
        error = deviation / eager_ms / len(spent) ** 0.5
        rows.append(Row(name, threads, way, median_ms, median_ms / eager_ms, error, predicted.get(way), share))
    return rows


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, quick="tiny models, few steps")
    parser.set_defaults(threads=1)
    parser.add_argument("--models", nargs="+", help=f"of the peers' (default: {' '.join(MODELS)})")
    parser.add_argument("--numbers-of-threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def show(rows: list[Row]) -> None:
    """A table of the ways of one model."""
    one = rows[0]
    table = new_table(f"{one.model}, {one.threads} thread(s): draws are {one.drawn_share:.1%} of an eager step")
    for heading in ("time", "of eager's", "predicted"):
        table.add_column(heading, justify="right")
    for row in rows:
        told = "" if row.predicted_over_eager is None else f"{row.predicted_over_eager:.3f}"
        table.add_row(row.way, f"{row.median_ms:.0f} ms", f"{row.over_eager:.3f} ± {row.error:.3f}", told)
    console.print(table)


def main() -> None:
    """Run the script."""
    options = parse_options()
    keep_freed_memory()
    warnings.simplefilter("ignore")
    if bernoulli.quicker() is None:
        raise SystemExit(
            "numba is not installed, or does not draw here what PyTorch draws: there is nothing to compare"
        )
    rows: list[Row] = []
    for name in options.models or (QUICK if options.quick else MODELS):
        for threads in options.numbers_of_threads:
            found = rows_of(name, threads, options)
            rows += found
            show(found)
    torch.set_num_threads(options.threads)
    content = {
        "circumstances": circumstances(options) | {"code": code_version()},
        "rows": [asdict(row) for row in rows],
    }
    write_report(options.output, RESULTS, content)


if __name__ == "__main__":
    main()
