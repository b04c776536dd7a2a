"""Whether a budget means what it says: predicted and measured peaks, and exactness, of models under budgets.

    python benchmarks/bytes.py                          # every model of the zoo, a T5 and a Llama; about half an hour
    python benchmarks/bytes.py --quick --output folder  # tiny models

Bytes do not vary, so nothing else need be idle; times of planning are told but mean little. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # its products are the same each time

import torch

from benchmarks.problems import model_named
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
from rk_solvers import Limits
from rkgb.devices.registry import device_of
from rockmate import BudgetTooSmall, PeakMemory, Rockmate, reduce_fragmentation, verify, zoo
from rockmate.planning.measured import Measured, measure
from rockmate.planning.planner import make_plan
from rockmate.planning.request import PlanRequest
from rockmate.planning.trying.real_step import run_step
from rockmate.units import format_bytes

FRACTIONS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
SMALLEST = "smallest"
MIB = 1 << 20
LEAST_GROWTH_BYTES = 16 * MIB  # of a process: less is hidden by what it has in reserve
STEPS = 2  # whose peaks are measured, and which are compared with eager's
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Row:
    """A model under a budget. Bytes are above those before the step."""

    model: str
    budget: str  # a fraction of the eager peak, or "smallest"
    budget_bytes: int
    eager_bytes: int
    needed_bytes: int | None = None  # the smallest budget named, where this one was refused …
    proven_bytes: int | None = None  # … and what is proven to be needed; else what follows
    predicted_bytes: int = 0
    measured_bytes: int = 0  # the most of the step that planning runs and of later ones
    process_bytes: int | None = None  # by how much the process grew; None where the system does not tell
    recomputations: int = 0
    overhead: float = 0.0  # predicted
    exact: bool = True
    difference: str | None = None
    planning_s: float = 0.0

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of what was measured."""
        return abs(self.predicted_bytes / self.measured_bytes - 1) if self.measured_bytes else 0.0


# ---- what the operating system says ---------------------------------------------------------------------


def give_freed_memory_back() -> bool:
    """Have the C library return freed blocks at once, so that the process's size tells what is in use."""
    return reduce_fragmentation().freed_memory_returned


def process_growth(step: Callable[[], None]) -> int | None:
    """Most bytes of physical memory by which the process grows while `step` runs; None where that is not told."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")  # the high-water mark is that of now
        before = _status_bytes("VmRSS")
        step()
        return _status_bytes("VmHWM") - before
    except (OSError, AttributeError):
        return None


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


# ---- one model -------------------------------------------------------------------------------------------


def rows_of(name: str, fractions: Sequence[float], time_limit_s: float, device: str) -> list[Row]:
    """`name` under these fractions of its eager peak, under nothing, and under the smallest budget named then."""
    model, sample, loss = model_named(name, device)
    base = PlanRequest(None, loss, limits=Limits().within(time_limit_s))
    measured = measure(model, sample, base)
    rows = [_row(name, f"{fraction:g}", fraction, measured, model, base) for fraction in fractions]
    refusal = _row(name, "none", 1, measured, model, base)
    assert refusal.needed_bytes is not None, "a budget of one byte was not refused"
    return [*rows, refusal, _row(name, SMALLEST, refusal.needed_bytes, measured, model, base)]


def _row(
    name: str, label: str, budget: float | int, measured: Measured, model: torch.nn.Module, base: PlanRequest
) -> Row:
    eager_bytes = measured.eager_peak_bytes
    asked = round(budget * eager_bytes) if isinstance(budget, float) else budget
    started = time.perf_counter()
    try:
        planned = make_plan(measured, PlanRequest(asked, base.loss, limits=base.limits), model)
    except BudgetTooSmall as error:
        return Row(name, label, asked, eager_bytes, error.smallest_budget_bytes, error.proven_bytes)
    planning_s = time.perf_counter() - started
    module = Rockmate._following(model, measured, planned)
    plan, sample = module.plan, measured.sample
    assert sample is not None
    assert plan.measured_peak_bytes is not None

    def step() -> None:
        run_step(module, sample, base.loss)

    peaks = [plan.measured_peak_bytes]
    for _ in range(STEPS):
        model.zero_grad()
        with PeakMemory(measured.device) as memory:
            step()
        peaks.append(memory.peak_bytes)
    model.zero_grad()
    growth = process_growth(step) if eager_bytes > LEAST_GROWTH_BYTES else None
    model.zero_grad()
    comparison = verify(module, sample, loss=base.loss, steps=STEPS)
    return Row(
        name,
        label,
        plan.budget_bytes,
        eager_bytes,
        predicted_bytes=plan.peak_bytes,
        measured_bytes=max(peaks),
        process_bytes=growth,
        recomputations=plan.recomputations,
        overhead=plan.overhead,
        exact=comparison.exact,
        difference=comparison.first_difference,
        planning_s=round(planning_s, 1),
    )


# ---- all of them -----------------------------------------------------------------------------------------


def print_rows(rows: list[Row]) -> None:
    """One line per budget of a model."""
    table = new_table(f"{rows[0].model}: eager peak {format_bytes(rows[0].eager_bytes)}")
    for heading in ("budget", "predicted", "measured", "off by", "process", "recomputed", "time", "exact"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.needed_bytes is not None:
            needed = (
                f"refused: {format_bytes(row.needed_bytes)}, proven {(row.proven_bytes or 0) / row.needed_bytes:.1%}"
            )
            table.add_row(row.budget, format_bytes(row.budget_bytes), needed)
            continue
        table.add_row(
            row.budget,
            format_bytes(row.budget_bytes),
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            f"{row.error:.3%}",
            "–" if row.process_bytes is None else format_bytes(row.process_bytes),
            str(row.recomputations),
            f"{row.overhead:+.1%}",
            "yes" if row.exact else str(row.difference),
        )
    console.print(table)


def bars_of(rows: list[Row]) -> list[dict[str, Any]]:
    """What is promised, over all models and budgets."""
    ran = [row for row in rows if row.needed_bytes is None]
    proven = [1 - row.proven_bytes / row.needed_bytes for row in rows if row.needed_bytes and row.proven_bytes]
    return [
        bar("prediction off, % of the measured peak", 100 * max(row.error for row in ran), 1.0),
        bar("prediction off, MiB", max(abs(row.predicted_bytes - row.measured_bytes) for row in ran) / MIB, 1.0),
        bar("measured peak, part of the budget", max(row.measured_bytes / row.budget_bytes for row in ran), 1.0),
        bar("keep-all's peak, part of eager's", max(r.measured_bytes / r.eager_bytes for r in ran), 1.0),
        bar("budgets whose training is not eager's to the bit", sum(not row.exact for row in ran), 0),
        bar("smallest budget above what is proven to be needed, %", 100 * max(proven), 2.0),
        bar("lower budgets with a higher peak", not_monotone(ran), 0),
    ]


def not_monotone(rows: list[Row]) -> int:
    """How many pairs of a model's budgets are such that the lower one has the higher measured peak."""
    return sum(
        one.model == other.model and one.budget_bytes < other.budget_bytes and one.measured_bytes > other.measured_bytes
        for one in rows
        for other in rows
    )


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "tiny models only")
    everything = [*zoo.names(), "t5-6", "llama-8"]
    parser.add_argument("--models", nargs="+", choices=everything, help="default: all of them")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--add", action="store_true", help="to the result file: rows of other models stay in it")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of one search (default 10)")
    options = parser.parse_args()
    options.models = options.models or [name for name in everything if not options.quick or name.endswith("-tiny")]
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    returned = give_freed_memory_back()
    if options.device != "cpu":  # where kernels add in another order each time, nothing would be exact
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", ".* does not have a deterministic implementation")
    path = options.output / f"bytes-{torch.device(options.device).type}.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["rows"] if options.add and path.exists() else []
    rows = [Row(**row) for row in stored if row["model"] not in options.models]
    for name in options.models:
        rows += rows_of(name, FRACTIONS, options.time_limit, options.device)
        print_rows([row for row in rows if row.model == name])
        report = {
            "circumstances": circumstances(options)
            | {
                "code": code_version(),
                "device": device_of(torch.device(options.device)).name,
                "freed memory is given back": returned,
                "steps": STEPS,
            },
            "rows": [asdict(row) for row in rows],
            "bars": bars_of(rows),
        }
        write_report(options.output, path.name, report)  # after each model, as all of them take long
    print_bars(bars_of(rows))


if __name__ == "__main__":
    main()
