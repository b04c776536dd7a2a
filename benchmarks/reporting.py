"""What the benchmarks share: options of the command line, circumstances, bars, and the files of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]  # of the repository
WRITTEN = ("benchmarks/results", "docs", "rockmate/zoo/plans")

console = Console(width=None if sys.stdout.isatty() else 180)  # a file has room for wide tables


def option_parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser of the options that every benchmark has; `quick` is the help of --quick."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder")
    return parser


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers of every benchmark depend on besides the code. `options` are those of `option_parser`."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),  # whether threads without work sleep or spin
        "quick": options.quick,
    }


def processor(root: Path = Path("/")) -> str:
    """The processor as Linux tells of it, with its largest cache; elsewhere what Python knows. `root` is for tests."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        told = dict(line.split("\t", 1) for line in lines if "\t" in line)
        name, model = (told[key].lstrip("\t: ") for key in ("model name", "model"))
        caches = sorted(root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"))
        largest_kib = max(int(path.read_text(encoding="utf-8").strip().rstrip("K")) for path in caches)
    except (OSError, KeyError, ValueError):
        return platform.processor() or platform.machine()
    return f"{name}, model {model}, {largest_kib // 1024} MiB of cache"


def code_version(clone: Path = ROOT) -> str:
    """The commit of the code in `clone`, with "-dirty" where it was changed since; "unknown" outside a clone.

    What benchmarks themselves write, and pages and pictures made from that, is no code.
    """
    git = ["git", "-C", str(clone)]
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{folder}" for folder in WRITTEN)]
    try:
        commit, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["describe", "--always"], changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def bar(label: str, reached: float, limit: float) -> dict[str, Any]:
    """A promise, that `reached` is at most `limit`, and whether it is met."""
    return {"label": label, "reached": round(reached, 3), "limit": round(limit, 3), "met": reached <= limit}


def print_verdict(met: bool, text: str) -> None:
    """Print a bar in words, after whether it is met."""
    mark = "[green]met[/green]" if met else "[red]not met[/red]"
    console.print(f"{mark}: {text}", highlight=False)


def print_bars(bars: list[dict[str, Any]]) -> None:
    """Print what `bar` made, one on each line."""
    for made in bars:
        print_verdict(made["met"], f"{made['label']}: {made['reached']} ≤ {made['limit']}")


def new_table(title: str) -> Table:
    """A table without rows, whose first column has no heading."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    return table


def write_report(folder: Path, name: str, report: dict[str, Any], quietly: bool = False) -> None:
    """Write `report` as JSON into `folder`, which is made if need be, and print where it is, unless `quietly`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not quietly:
        console.print(f"wrote {path}")
