"""Training scripts as people write them, watched by `rockmate.PeakReport`: their results, bytes and time beside it.

    python benchmarks/observing.py                          # ten minutes; writes into benchmarks/results/
    python benchmarks/observing.py --scripts language gan   # some of benchmarks/observed_scripts
    python benchmarks/observing.py --quick --output folder  # one script, once

Each script runs in processes of its own, as it is and watched by turns, and once under `PeakMemory`. Times are those
between steps of optimizers, and need an idle machine. README.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from torch.optim.optimizer import register_optimizer_step_post_hook

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
from rockmate import PeakMemory, PeakReport
from rockmate.units import format_bytes, format_ms

RESULTS = "observing-cpu.json"
SCRIPTS = Path(__file__).parent / "observed_scripts"
TIME_RATIO = 2.0  # the bar
_WARM = 2  # steps that are not timed


@dataclass(frozen=True)
class Row:
    """One script."""

    script: str
    peak_bytes: int  # under PeakMemory
    told_bytes: int  # the peak that the report tells
    held_bytes: int  # what its holders add up to
    same: bool  # whether it prints the same
    times_ms: list[float]  # medians of runs as it is
    watched_ms: list[float]  # and of those that are watched

    @property
    def ratio(self) -> float:
        """Of medians."""
        return statistics.median(self.watched_ms) / statistics.median(self.times_ms)


def run_here(script: Path, way: str) -> dict[str, Any]:
    """Run it in this process: what it prints, the time between steps, and what was found."""
    ends: list[float] = []
    register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    printed, found = io.StringIO(), dict[str, Any]()
    kinds: dict[str, Any] = {"watched": PeakReport, "measured": PeakMemory}
    context = kinds.get(way, contextlib.nullcontext)()
    with contextlib.redirect_stdout(printed), context as seen:
        runpy.run_path(str(script), run_name="__main__")
    if seen is not None:
        found["peak_bytes"] = seen.peak_bytes
    if isinstance(seen, PeakReport):
        found["held_bytes"] = sum(holder.size_bytes for holder in seen.holders)
    steps = [(later - one) * 1e3 for one, later in zip(ends[_WARM:], ends[_WARM + 1 :], strict=False)]
    numbers = [line for line in printed.getvalue().splitlines() if not line.startswith("{")]  # a log's times
    return {"printed": numbers, "step_ms": statistics.median(steps), **found}


def run(script: Path, way: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", str(script), "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(script: Path, repeats: int) -> Row:
    """As it is and watched, by turns."""
    measured = run(script, "measured")
    pairs = [(run(script, "plain"), run(script, "watched")) for _ in range(repeats)]
    watched = pairs[0][1]
    return Row(
        script.stem,
        measured["peak_bytes"],
        watched["peak_bytes"],
        watched["held_bytes"],
        all(plain["printed"] == watched["printed"] for plain, watched in pairs),
        [plain["step_ms"] for plain, _ in pairs],
        [watched["step_ms"] for _, watched in pairs],
    )


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "one script, once")
    parser.add_argument("--scripts", nargs="+", help="some of them (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way (default 3)")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    if options.run is not None:
        print(json.dumps(run_here(options.run, options.way)))
        return
    names = ["sequences"] if options.quick else options.scripts or sorted(path.stem for path in SCRIPTS.glob("*.py"))
    rows = []
    for name in names:
        rows.append(compared(SCRIPTS / f"{name}.py", 1 if options.quick else options.repeats))
        console.print(f"{name}: {rows[-1].ratio:.2f} of the time")
    table = new_table("scripts that are watched")
    for heading in ("script", "peak", "told", "holders", "prints the same", "step", "watched", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = [f"{size:,}" for size in (row.peak_bytes, row.told_bytes, row.held_bytes)]
        times = [format_ms(statistics.median(one)) for one in (row.times_ms, row.watched_ms)]
        table.add_row(row.script, *sizes, "yes" if row.same else "no", *times, f"{row.ratio:.2f}")
    console.print(table)
    console.print(f"the largest of them takes {format_bytes(max(row.peak_bytes for row in rows))}")
    apart = [abs(row.told_bytes - row.peak_bytes) + abs(row.held_bytes - row.told_bytes) for row in rows]
    bars = [
        bar("bytes between the peaks, and between them and the holders' sum, in all", sum(apart), 0),
        bar("scripts that print something else", sum(not row.same for row in rows), 0),
        bar("largest ratio of times", max(row.ratio for row in rows), TIME_RATIO),
    ]
    print_bars(bars)
    about = circumstances(options) | {"code": code_version()}
    write_report(options.output, RESULTS, {"circumstances": about, "rows": [asdict(row) for row in rows], "bars": bars})


if __name__ == "__main__":
    main()
