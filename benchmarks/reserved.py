"""What the allocator of a device holds for planned training, gaps between tensors included, over many steps.

    python benchmarks/reserved.py                                      # GPT-2 and ResNet-50 on a GPU, some minutes
    python benchmarks/reserved.py --device cpu --quick --output folder  # tiny models; the CPU keeps no such count

Each step's highest levels are read from the allocator's own statistics: no recorder runs, and nothing is given back
between steps, as in training. Bytes are above what was allocated before the step.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

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
from rkgb.devices.base import Device
from rkgb.devices.registry import device_of
from rockmate import BudgetTooSmall, Rockmate, reduce_fragmentation, zoo
from rockmate.units import format_bytes

MODELS = ("gpt2-demo", "resnet50-demo", "unet-demo")
QUICK = ("gpt2-tiny", "resnet18-tiny")
SHARES = (0.7, 0.5)
MOST_RESERVED = 1.1  # of the budget: what gaps may add


@dataclass(frozen=True)
class Row:
    """A model under a budget, and the most of many steps."""

    model: str
    share: float  # of the eager peak
    budget_bytes: int
    predicted_bytes: int  # allocated at most, as the plan has it
    allocated_bytes: int
    planned_reserved_bytes: int  # by the step with which the plan was checked
    first_reserved_bytes: int  # by the first step
    reserved_bytes: int  # by any step
    eager_allocated_bytes: int
    eager_reserved_bytes: int


def levels_of_steps(step: Callable[[], None], at: Device, steps: int) -> list[tuple[int, int]]:
    """Most bytes allocated and reserved by each of so many steps, above what was allocated before it."""
    at.empty_cache()
    found = []
    for _ in range(steps):
        at.synchronize()
        at.restart_levels()
        before = at.levels()
        step()
        at.synchronize()
        after = at.levels()
        assert before is not None
        assert after is not None
        found.append(
            (
                after.most_allocated_bytes - before.allocated_bytes,
                after.most_reserved_bytes - before.allocated_bytes,
            )
        )
    return found


def training(model: torch.nn.Module, entry: zoo.ZooEntry) -> Callable[[], None]:
    """A step of training by gradient descent with momentum, whose state comes with the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        entry.loss(model(*entry.sample)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def row_of(name: str, share: float, device: torch.device, steps: int) -> Row:
    """A model of the zoo under a share of its eager peak, or under the smallest budget that is named."""
    at, entry = device_of(device), zoo.get(name, device=device)
    eager = levels_of_steps(training(entry.model, entry), at, min(steps, 5))
    entry = zoo.get(name, device=device)
    try:
        model = Rockmate(entry.model, entry.sample, share, loss=entry.loss)
    except BudgetTooSmall as error:
        model = Rockmate(entry.model, entry.sample, error.smallest_budget_bytes, loss=entry.loss)
    plan = model.plan
    found = levels_of_steps(training(model, entry), at, steps)
    return Row(
        name,
        share,
        plan.budget_bytes,
        plan.peak_bytes,
        max(allocated for allocated, _ in found),
        plan.measured_reserved_bytes or 0,
        found[0][1],
        max(reserved for _, reserved in found),
        max(allocated for allocated, _ in eager),
        max(reserved for _, reserved in eager),
    )


def bars_of(rows: list[Row], smallest_bytes: int) -> list[dict[str, Any]]:
    """What the rows promise. Small budgets are less than the allocator reserves for whatever little is allocated."""
    if not rows:
        return []
    allocated = max(row.allocated_bytes / row.budget_bytes for row in rows)
    allowed = [max(MOST_RESERVED * row.budget_bytes, row.budget_bytes + smallest_bytes) for row in rows]
    reserved = max(row.reserved_bytes / most for row, most in zip(rows, allowed, strict=True))
    return [
        bar("allocated, part of the budget", allocated, 1.0),
        bar("reserved, part of a tenth above the budget", reserved, 1.0),
    ]


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "tiny models and few steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default 50")
    return parser.parse_args()


def main() -> None:
    """Run the script."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    at = device_of(device)
    expandable = reduce_fragmentation().expandable_segments
    steps = options.steps or (5 if options.quick else 50)
    if at.levels() is None:
        console.print(f"the allocator of {device} keeps no statistics: nothing is reserved there beyond tensors")
    names = () if at.levels() is None else QUICK if options.quick else MODELS
    rows = [row_of(name, share, device, steps) for name in names for share in SHARES]
    table = new_table(f"Reserved over {steps} steps")
    for heading in ("budget", "predicted", "allocated", "reserved", "eager's", "eager reserved"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = (
            row.budget_bytes,
            row.predicted_bytes,
            row.allocated_bytes,
            row.reserved_bytes,
            row.eager_allocated_bytes,
            row.eager_reserved_bytes,
        )
        table.add_row(f"{row.model} at {row.share:g}", *map(format_bytes, sizes))
    console.print(table)
    bars = bars_of(rows, at.smallest_segments_bytes)
    print_bars(bars)
    where = {"code": code_version(), "device": at.name, "steps": steps, "expandable": expandable}
    content = {"circumstances": circumstances(options) | where, "rows": [asdict(row) for row in rows], "bars": bars}
    write_report(options.output, f"reserved-{device.type}.json", content)


if __name__ == "__main__":
    main()
