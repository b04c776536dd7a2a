"""Seconds from a model to a planned module: planned, found in the cache, and out of a plan file; interleaved, medians.

python benchmarks/start.py                      # GPT-2 and ResNet-50, about three minutes on two cores
python benchmarks/start.py --models gpt2-tiny   # any models of the zoo

Writes benchmarks/results/start-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import circumstances, code_version, console, option_parser
from rkgb import make_sample
from rockmate import Rockmate, zoo
from rockmate.planning.measured import trace_model
from rockmate.planning.request import PlanRequest

MODELS = ("gpt2-demo", "resnet50-demo")
TINY = ("gpt2-tiny",)
BUDGET = 0.5


def main() -> None:
    """Time each way to start, round by round."""
    options = _options()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(name, options.rounds, Path(folder)))
        console.print(_told(rows[-1]))
    options.output.mkdir(parents=True, exist_ok=True)
    content = {"code": code_version(), "circumstances": circumstances(options), "budget": BUDGET, "rows": rows}
    (options.output / "start-cpu.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def row_of(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians for one model, in seconds. `folder` is for the cache and the file."""
    os.environ.update(ROCKMATE_CACHE="1", ROCKMATE_CACHE_DIR=str(folder / "cache"))
    path = folder / "plan.json"
    entry = zoo.get(name)
    Rockmate(entry.model, entry.sample, BUDGET, loss=entry.loss).save_plan(path)  # and into the cache
    ways: dict[str, Callable[[], Any]] = {
        "trace": lambda: _traced(zoo.get(name)),
        "file": lambda: Rockmate(entry.model, entry.sample, plan=path),
        "cache": lambda: Rockmate(entry.model, entry.sample, BUDGET, loss=entry.loss),
        "plan": lambda: Rockmate(entry.model, entry.sample, BUDGET, loss=entry.loss, cache=False),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, start in ways.items():
            started = time.perf_counter()
            start()
            seconds[way].append(time.perf_counter() - started)
    found = {f"{way}_s": round(statistics.median(times), 3) for way, times in seconds.items()}
    return {"model": name, "rounds": rounds, **found, "file_bytes": path.stat().st_size}


def _traced(entry: Any) -> None:
    """What every start does: the module is traced and compared, whatever is known of it."""
    trace_model(entry.model, make_sample(entry.model, entry.sample), PlanRequest(None))


def _told(row: dict[str, Any]) -> str:
    return (
        f"{row['model']}: planned in {row['plan_s']:.2f} s, from the cache in {row['cache_s']:.2f} s, from a file in "
        f"{row['file_s']:.2f} s, of which tracing takes {row['trace_s']:.2f} s"
    )


def _options() -> argparse.Namespace:
    parser = option_parser(__doc__, "tiny models, one round")
    parser.add_argument("--models", nargs="+", default=None, help="names of the zoo")
    parser.add_argument("--rounds", type=int, default=None, help="times that each way is taken (default 3)")
    options = parser.parse_args()
    options.models = options.models or (TINY if options.quick else MODELS)
    options.rounds = options.rounds or (1 if options.quick else 3)
    return options


if __name__ == "__main__":
    main()
