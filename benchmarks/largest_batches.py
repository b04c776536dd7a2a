"""The largest batch that `rockmate.max_batch` finds in five measurements, and the true one, found by going on.

    python benchmarks/largest_batches.py                          # half an hour; writes into benchmarks/results/
    python benchmarks/largest_batches.py --models gpt2-tiny       # some models of the zoo
    python benchmarks/largest_batches.py --quick --output folder  # one model and one budget

The true one is the largest whose real step was within the budget where that of the next larger one was not. Bytes alone
count, so the machine need not be idle. README.md says more.
"""

from __future__ import annotations

import argparse
import os
import warnings
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
from rkgb import make_sample
from rockmate import max_batch, zoo
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest

RESULTS = "largest-batches-cpu.json"
MODELS = tuple(name for name in zoo.ENTRIES if name.endswith("-tiny"))
BUDGETS = (3.3, 9.1)  # of the eager peak of the zoo's own batch
LIMITS = Limits(search_s=1.0, extra_s=0.0, rounds=1)
SHORT, MEASUREMENTS = 0.02, 5  # the bars


@dataclass(frozen=True)
class Row:
    """One model under one budget."""

    model: str
    budget_bytes: int
    batch: int
    measurements: int
    took_s: float
    true_batch: int
    true_measurements: int

    @property
    def short(self) -> float:
        """The share of the true batch that was not found."""
        return 1 - self.batch / self.true_batch


def searched(name: str, share: float) -> Row:
    """Five measurements, and as many as it takes."""
    entry = zoo.get(name)
    measured = measure(entry.model, make_sample(entry.model, entry.sample), PlanRequest(1 << 60))
    budget_bytes = int(share * measured.eager_peak_bytes)
    found = max_batch(entry.model, entry.sample, budget_bytes, limits=LIMITS)
    true = max_batch(
        entry.model,
        entry.sample,
        budget_bytes,
        limits=LIMITS,
        start=found.batch,
        measurements=None,
        most=4 * found.batch,
    )
    took_s = sum(trial.took_s for trial in found.trials)
    larger = max(found.batch, true.batch)
    return Row(name, budget_bytes, found.batch, len(found.trials), took_s, larger, len(true.trials))


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "one model and one budget")
    parser.add_argument("--models", nargs="+", default=MODELS, help="of the zoo (default: all tiny ones)")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    warnings.simplefilter("ignore")
    names, shares = (("mixer-tiny",), BUDGETS[:1]) if options.quick else (options.models, BUDGETS)
    rows = []
    for name in names:
        for share in shares:
            rows.append(searched(name, share))
            last = rows[-1]
            console.print(f"{name} {share}: {last.batch} of {last.true_batch}, {last.measurements} measurements")
    table = new_table("the largest batch")
    for heading in ("model", "budget", "found", "measured", "true", "short by"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row.model, f"{row.budget_bytes:,}", row.batch, row.measurements, row.true_batch, f"{row.short:.1%}"]
        table.add_row(*map(str, cells))
    console.print(table)
    bars = [
        bar("largest share of the true batch that was not found", max(row.short for row in rows), SHORT),
        bar("most measurements", max(row.measurements for row in rows), MEASUREMENTS),
    ]
    print_bars(bars)
    about = circumstances(options) | {"code": code_version()}
    write_report(options.output, RESULTS, {"circumstances": about, "rows": [asdict(row) for row in rows], "bars": bars})


if __name__ == "__main__":
    main()
