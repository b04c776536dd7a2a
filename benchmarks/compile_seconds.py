"""Seconds of compiling: the parts of a GPT-2 that pay compiled, and the whole model by `torch.compile`.

    python benchmarks/compile_seconds.py                   # GPT-2 of 12 and of 24 layers, about five minutes
    python benchmarks/compile_seconds.py --quick           # two sizes of a tiny one

Each in a process of its own: from empty caches, and once more with what that has left in them. Of parts, these are the
seconds of finding, compiling and trying all of them beside their operations; of the whole model, those of its first
step beyond a second one. The bars are of the smaller model but where two are compared. Nothing else should be computed
on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

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
from rockmate.choices.trial_notes import TrialNotes
from rockmate.planning.measured import trace_model
from rockmate.planning.request import PlanRequest
from rockmate.regions.option import RegionTrial
from rockmate.zoo.language.gpt2 import GPT2, GPT2Config, next_token_loss

LAYERS, QUICK = (12, 24), (2, 4)
WAYS = ("parts", "whole")
RESULTS = "compile-seconds-cpu.json"


def main() -> None:
    """Runs the benchmark, or one way in this process."""
    parser = option_parser(__doc__, "a tiny model of two sizes")
    parser.add_argument(
        "--one", nargs=2, metavar=("WAY", "LAYERS"), help="in this process, from the caches as they are"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one is not None:
        way, layers = options.one
        print(json.dumps(seconds_of(way, int(layers), options.quick)))
        return
    rows = [row for layers in (QUICK if options.quick else LAYERS) for row in rows_of(layers, options)]
    report = {
        "circumstances": circumstances(options) | {"code": code_version()},
        "rows": rows,
        "bars": bars_of(rows),
    }
    _print(report)
    write_report(options.output, RESULTS, report)


def seconds_of(way: str, layers: int, quick: bool) -> dict[str, float]:
    """What compiling takes in this process, and how many classes of parts there were."""
    zoo_model, sample = gpt2(layers, quick)
    if way == "whole":
        compiled, spent = torch.compile(zoo_model), []
        for _ in range(2):
            started = time.perf_counter()
            next_token_loss(compiled(*sample[0]), sample[1]).backward()
            spent.append(time.perf_counter() - started)
        return {"seconds": spent[0] - spent[1]}
    notes = TrialNotes(zoo_model, RegionTrial)
    request = PlanRequest(None, loss=lambda logits: next_token_loss(logits, sample[1]), compile=True, trials=notes)
    regions = trace_model(zoo_model, sample[0], request).regions
    assert regions is not None
    assert not any(trial.refused for trial in regions.trials)
    return {"seconds": regions.seconds, "parts": len(regions.trials)}


def gpt2(layers: int, quick: bool) -> tuple[GPT2, tuple[Any, torch.Tensor]]:
    """The model in training mode, its inputs and what it is to predict."""
    config = GPT2Config.tiny() if quick else GPT2Config.demo()
    rows, length = (2, config.context) if quick else (4, config.context)
    torch.manual_seed(0)
    tokens = torch.randint(config.vocabulary, (rows, length + 1))
    model = GPT2(replace(config, layers=layers))
    return model.train(), ((tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous())


def rows_of(layers: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways, from empty caches and with those that this has left."""
    rows = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (_in_a_process(way, layers, options, Path(folder)) for _ in range(2))
        row = {"way": way, "layers": layers, "cold_s": cold["seconds"], "warm_s": warm["seconds"]}
        rows.append(row | {"parts": cold.get("parts")})
        console.print(rows[-1])
    return rows


def _in_a_process(way: str, layers: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    caches = {
        "ROCKMATE_CACHE": "1",
        "ROCKMATE_CACHE_DIR": str(folder / "rockmate"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    quick = ["--quick"] if options.quick else []
    command = [sys.executable, __file__, "--threads", str(options.threads), *quick, "--one", way, str(layers)]
    made = subprocess.run(
        command, env=os.environ | caches, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800
    )
    if made.returncode:
        raise SystemExit(made.stderr)
    found: dict[str, Any] = json.loads(made.stdout.strip().splitlines()[-1])
    return found


def bars_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the parts are to take beside the whole model."""
    parts, whole = ([row for row in rows if row["way"] == way] for way in WAYS)
    return [
        bar(
            "all parts, from empty caches, of what the whole model takes", parts[0]["cold_s"] / whole[0]["cold_s"], 0.5
        ),
        bar("all parts, with warm caches: seconds", parts[0]["warm_s"], 5.0),
        # Each class of parts is compiled once: what is left is noise, and as many operations more to read.
        bar("all parts of twice the layers, of those of once", parts[1]["cold_s"] / parts[0]["cold_s"], 1.25),
    ]


def _print(report: dict[str, Any]) -> None:
    table = new_table("Seconds of compiling")
    for heading in ("layers", "empty caches", "warm caches"):
        table.add_column(heading, justify="right")
    for row in report["rows"]:
        table.add_row(row["way"], str(row["layers"]), f"{row['cold_s']:.1f}", f"{row['warm_s']:.1f}")
    console.print(table)
    print_bars(report["bars"])


if __name__ == "__main__":
    main()
