"""Steps that recompute, that move data to a second memory, and that do both, beside eager's: time and bytes.

    python benchmarks/offload.py                                    # five models and a file; an hour
    python benchmarks/offload.py --models gpt2-demo --shares 0.5    # one of them
    python benchmarks/offload.py --quick --output folder            # tiny models
    python benchmarks/offload.py --device cuda                      # pinned memory of the host in the place of a file

All take turns, step by step, from the same parameters; ratios are of medians. `recomputed` and `both` are plans of
Rockmate, without and with `offload`. `moved` is what offloading by hand does: all that is saved and large leaves at
once; `save_on_cpu` is the one of PyTorch, which copies on the CPU. Where recomputation alone cannot keep a share, its
smallest budget takes that one's place, and the model's smaller shares are left out. Nothing else should be computed on
the machine.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.move_everything import MoveEverything
from benchmarks.reporting import circumstances, code_version, console, new_table, option_parser, write_report
from rkgb.devices.registry import device_of
from rockmate import BudgetTooSmall, Offload, PeakMemory, Plan, Rockmate, zoo
from rockmate.offload.file_tier import FileTier
from rockmate.offload.host_tier import HostTier
from rockmate.offload.tier import Tier
from rockmate.offload.tiers import Tiers
from rockmate.units import format_bytes

MODELS = ("gpt2-demo", "llama-demo", "bert-demo", "resnet50-demo", "unet-demo")
QUICK = ("gpt2-tiny",)
SHARES = (0.5, 0.3, 0.2)
Step = Callable[[], None]


@dataclass(frozen=True)
class Way:
    """A step, where it moves data to, and the plan that it follows, if any."""

    step: Step
    tier: Tier | None = None
    plan: Plan | None = None
    planned_s: float = 0.0
    measured_s: float = 0.0  # of those: to trace the model, and to measure its operations


@dataclass(frozen=True)
class Row:
    """One way to run a step of a model under a budget."""

    model: str
    share: float  # of the eager peak: as asked for, or the smallest there is
    way: str
    peak_bytes: int
    stored_bytes: int  # in the second memory at most
    median_ms: float
    over_eager: float
    predicted_over_eager: float | None
    budget_bytes: int | None
    gap: float | None
    recomputations: int
    moves: int
    planned_s: float
    measured_s: float


def training_step(forward: Callable[..., Any], model: torch.nn.Module, entry: zoo.ZooEntry) -> Step:
    """Forward and backward; gradients go afterwards."""

    def step() -> None:
        entry.loss(forward(*entry.sample)).backward()
        model.zero_grad()

    return step


def offload_on(device: torch.device, folder: str) -> Offload:
    """To a file of the folder from the CPU, and to the memory of the host from an accelerator."""
    return Offload("disk", folder) if device_of(device).is_host else Offload("host")


def device_of_entry(entry: zoo.ZooEntry) -> torch.device:
    """Where the model is."""
    return next(entry.model.parameters()).device


def ways_of(entry: zoo.ZooEntry, share: float, folder: str, seconds: float) -> dict[str, Way]:
    """By name, a step and what is known of it before it runs."""
    eager = copy.deepcopy(entry.model)
    found = {"eager": Way(training_step(eager, eager, entry))}
    for name, context in (
        ("save_on_cpu", lambda tier, model: torch.autograd.graph.save_on_cpu()),
        ("moved", lambda tier, model: MoveEverything(tier, model.parameters())),
    ):
        found[name] = by_hand(entry, folder, context)
    plan = partial(Rockmate, loss=entry.loss, time_limit=seconds, plan_in_background=False, cache=False)
    budget: float | int = share
    for name, offload in (("recomputed", None), ("both", offload_on(device_of_entry(entry), folder))):
        model = copy.deepcopy(entry.model)
        started = time.perf_counter()
        try:
            planned = plan(model, entry.sample, budget, offload=offload)
        except BudgetTooSmall as error:
            budget = error.smallest_budget_bytes
            console.print(f"{entry.name} at {share:g}, {name}: {format_bytes(budget)} are needed")
            started = time.perf_counter()
            planned = plan(model, entry.sample, budget, offload=offload)
        took_s = time.perf_counter() - started
        member = planned._member
        step = training_step(planned, planned, entry)
        found[name] = Way(step, member.planned.tier, planned.plan, took_s, member.measured.measuring_s)
    return found


def by_hand(entry: zoo.ZooEntry, folder: str, context: Callable[[Tier, torch.nn.Module], Any]) -> Way:
    """A copy of the model whose saved tensors `context` takes away."""
    model, device = copy.deepcopy(entry.model), device_of_entry(entry)
    tier = FileTier(folder) if device_of(device).is_host else HostTier(device)

    def forward(*args: Any) -> Any:
        with context(tier, model):
            return model(*args)

    return Way(training_step(forward, model, entry), tier)


def share_kept(asked: float, plan: Plan) -> float:
    """The share of the eager peak that a plan was made for: as asked for, or the smallest."""
    found = plan.budget_bytes / plan.baseline_peak_bytes
    return asked if found < 1.001 * asked else round(found, 3)


def rows_of(name: str, share: float, options: argparse.Namespace) -> list[Row]:
    """All ways by turns."""
    device = torch.device(options.device)
    entry = zoo.get(name, device=device)
    ways = ways_of(entry, share, options.folder, 2.0 if options.quick else 15.0)
    share = max(share_kept(share, one.plan) for one in ways.values() if one.plan is not None)
    peaks: dict[str, int] = {}
    for way, one in ways.items():
        one.step()
        with PeakMemory(device) as memory:
            one.step()
        peaks[way] = memory.peak_bytes
    times: dict[str, list[float]] = {way: [] for way in ways}
    order, turn = random.Random(0), list(ways.items())
    for _ in range(2 if options.quick else options.repeats):
        order.shuffle(turn)
        for way, one in turn:
            one.step()  # as in training, where a step of the same model goes before
            device_of(device).synchronize()
            started = time.perf_counter()
            one.step()
            device_of(device).synchronize()
            times[way].append((time.perf_counter() - started) * 1e3)
    eager_ms = statistics.median(times["eager"])
    rows = []
    for way, one in ways.items():
        median_ms, plan = statistics.median(times[way]), one.plan
        rows.append(
            Row(
                name,
                share,
                way,
                peaks[way],
                0 if one.tier is None else one.tier.most_held_bytes,
                median_ms,
                median_ms / eager_ms,
                None if plan is None else 1 + plan.overhead,
                None if plan is None else plan.budget_bytes,
                None if plan is None else plan.gap,
                0 if plan is None else plan.recomputations,
                0 if plan is None else plan.moves,
                one.planned_s,
                one.measured_s,
            )
        )
        if one.tier is not None:
            one.tier.close()
    return rows


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, quick="tiny models, few steps")
    parser.set_defaults(threads=1)
    parser.add_argument("--device", default="cpu", help="where the models are (default cpu)")
    parser.add_argument("--models", nargs="+", help=f"of the zoo (default: {' '.join(MODELS)})")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of the eager peak")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file is")
    return parser.parse_args()


def main() -> None:
    """Run the script."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    links = Tiers(offload_on(device, options.folder)).links_on(device)
    assert links is not None
    speeds = ", ".join(
        f"{way} {link.bytes_per_ms / 1e6:.2f} GB/s at {link.burden:.0%} of a core"
        for way, link in (("out", links.out), ("back", links.back))
    )
    console.print(speeds)
    rows: list[Row] = []
    for name in options.models or (QUICK if options.quick else MODELS):
        for asked in sorted(options.shares, reverse=True):
            found = rows_of(name, asked, options)
            rows += found
            show(found, speeds)
            if found[0].share > asked:  # that was the smallest budget
                break
    second_memory = "a file" if device_of(device).is_host else "pinned memory of the host"
    where = {"code": code_version(), "links": asdict(links), "second_memory": second_memory}
    content = {"circumstances": circumstances(options) | where, "rows": [asdict(row) for row in rows]}
    write_report(options.output, f"offload-{device.type}.json", content)


def show(rows: list[Row], speeds: str) -> None:
    """A table of the ways of one model under one budget."""
    table = new_table(f"{rows[0].model} at {rows[0].share:g}; {speeds}")
    for heading in ("peak", "stored", "time", "of eager's", "predicted", "gap", "recomputed", "moved", "planned"):
        table.add_column(heading, justify="right")
    for row in rows:
        predicted = "" if row.predicted_over_eager is None else f"{row.predicted_over_eager:.3f}"
        gap = "" if row.gap is None else f"{row.gap:.1%}"
        sizes = format_bytes(row.peak_bytes), format_bytes(row.stored_bytes)
        seconds = f"{row.planned_s:.0f} s, {row.measured_s:.0f} s of it to measure"
        counts = str(row.recomputations), str(row.moves), seconds
        ratio = f"{row.median_ms:.0f} ms", f"{row.over_eager:.3f}", predicted, gap
        table.add_row(row.way, *sizes, *ratio, *counts)
    console.print(table)


if __name__ == "__main__":
    main()
