"""Seconds and bytes that it takes to plan chains of hundreds and thousands of operations, and how good the plans are.

    python benchmarks/deep.py                          # about a quarter of an hour on two quiet cores
    python benchmarks/deep.py --lengths 100 400 --shares 0.5
    python benchmarks/deep.py --quick --output folder  # short chains, to see that it runs

Each model is planned in a fresh process. Chains are pairs of `Linear` and `Tanh`; residual ones add the input of two
pairs to their output; `layers` is a transformer of 200 small layers. Writes benchmarks/results/deep-cpu.json.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from benchmarks.reporting import circumstances, console, new_table, option_parser, write_report
from rockmate import BudgetTooSmall, Rockmate
from rockmate.units import format_bytes

WIDTH, ROWS = 16, 512
LENGTHS = (100, 400, 1000, 5000)
SHARES = (0.5, 0.2)
LAYERS = 200
BARS = {100: (5, 0.02), 400: (15, 0.02), 1000: (45, 0.02), 5000: (120, 0.05)}  # seconds, gap


class Residual(nn.Module):
    """Two pairs, and what they read added to what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result are of the same shape."""
        out: torch.Tensor = x + self.inner(x)
        return out


def model_of(kind: str, operations: int) -> tuple[nn.Module, torch.Tensor]:
    """A model of about so many operations, and a sample."""
    if kind == "chain":
        pairs = [layer for _ in range(operations // 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*pairs), torch.randn(ROWS, WIDTH)
    if kind == "residual":
        return nn.Sequential(*(Residual() for _ in range(operations // 5))), torch.randn(ROWS, WIDTH)
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True) for _ in range(operations)]
    return nn.Sequential(*layers), torch.randn(4, 32, WIDTH)


def planned(kind: str, operations: int, share: float) -> dict[str, Any]:
    """Plan one model in this process: seconds by stage, bytes, and the gap."""
    model, sample = model_of(kind, operations)
    stages: dict[str, float] = {}
    last = (time.perf_counter(), "start")

    def tell(stage: str, _done: int, _total: int) -> None:
        nonlocal last
        began, name = last
        last = (time.perf_counter(), stage.split(" (")[0])
        stages[name] = round(stages.get(name, 0.0) + last[0] - began, 3)

    row: dict[str, Any] = {"kind": kind, "operations": operations, "share": share}
    started = time.perf_counter()
    try:
        module = Rockmate(model, sample, share, cache=False, progress=tell)
    except BudgetTooSmall as error:
        return {**row, "seconds": time.perf_counter() - started, "refused": str(error)}
    tell("end", 0, 0)
    plan = module.plan
    return {
        **row,
        "seconds": round(time.perf_counter() - started, 3),
        "stages_s": stages,
        "planning_peak_bytes": plan.planning_peak_bytes,
        "process_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "aside_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        "solver": plan.solver,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "budget_bytes": plan.budget_bytes,
    }


def in_fresh_process(kind: str, operations: int, share: float, threads: int) -> dict[str, Any]:
    """What `planned` gives there."""
    call = [
        sys.executable,
        "-m",
        "benchmarks.deep",
        "--threads",
        str(threads),
        "--one",
        kind,
        str(operations),
        str(share),
    ]
    answer = subprocess.run(call, check=False, capture_output=True, text=True)
    if answer.returncode:
        return {"kind": kind, "operations": operations, "share": share, "failed": answer.stderr[-400:]}
    row: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Plan, print and write."""
    parser = option_parser(__doc__, "short chains")
    parser.add_argument("--lengths", nargs="+", type=int, default=None, help="operations of the chains")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="budgets, as shares of the eager peak")
    parser.add_argument(
        "--kinds", nargs="+", choices=("chain", "residual", "layers"), default=("chain", "residual", "layers")
    )
    parser.add_argument("--one", nargs=3, default=None, help=argparse.SUPPRESS)
    options: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        kind, operations, share = options.one
        sys.stdout.write(json.dumps(planned(kind, int(operations), float(share))) + "\n")
        return
    lengths = options.lengths or ((20, 40) if options.quick else LENGTHS)
    cases = [(kind, length) for kind in options.kinds if kind != "layers" for length in lengths]
    cases += [("layers", 2 if options.quick else LAYERS)] if "layers" in options.kinds else []
    rows = []
    for kind, length in cases:
        for share in options.shares:
            rows.append(in_fresh_process(kind, length, share, options.threads))
            console.print(told(rows[-1]))
    table = new_table("planning of deep models")
    for name in ("budget", "seconds", "planning", "gap", "bar"):
        table.add_column(name)
    for row in rows:
        if "gap" in row:
            cells = (
                f"{row['share']:.0%}",
                f"{row['seconds']:.1f}",
                format_bytes(row["planning_peak_bytes"]),
                gap_of(row),
                verdict(row),
            )
            table.add_row(f"{row['kind']} {row['operations']}", *cells)
    console.print(table)
    write_report(options.output, "deep-cpu.json", {"circumstances": circumstances(options), "bars": BARS, "rows": rows})


def verdict(row: dict[str, Any]) -> str:
    """Whether the bar of a chain of this length is met; nothing where there is none."""
    bar = BARS.get(row["operations"]) if row["kind"] != "layers" else None
    if bar is None:
        return ""
    return "met" if row["seconds"] <= bar[0] and (row["gap"] or 0) <= bar[1] else "missed"


def gap_of(row: dict[str, Any]) -> str:
    """The gap as text."""
    return "not known" if row["gap"] is None else f"{row['gap']:.2%}"


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    name = f"{row['kind']} {row['operations']} at {row['share']:.0%}"
    if "gap" not in row:
        return f"{name}: {row.get('refused') or row.get('failed')}"
    taken = format_bytes(row["planning_peak_bytes"])
    return f"{name}: {row['seconds']:.1f} s, {taken}, gap {gap_of(row)}, {row['solver']}"


if __name__ == "__main__":
    main()
