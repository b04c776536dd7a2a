"""A model with dropout, compiled under ten budgets: by torch.compile's own, by our partitioner, and planned beside it.

    python benchmarks/compiled_budgets.py                           # half an hour
    python benchmarks/compiled_budgets.py --shares 0.7 0.4          # two budgets
    python benchmarks/compiled_budgets.py --quick --output folder   # a tiny model, whose times mean nothing

Shares are of the eager step's peak; torch.compile's own budget is that share of the activations which it would save.
`slope` is the change of the loss along the gradient, the random numbers held, as part of what the gradient says: it is
1 where the gradient is the loss's. All take turns, step by step; ratios are of medians. Nothing else should be computed
on the machine.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["ROCKMATE_BACKGROUND"] = "0"  # nothing else is to be computed beside the steps

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from benchmarks.reporting import (
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    print_verdict,
    write_report,
)
from rockmate import BudgetTooSmall, PeakMemory, Rockmate
from rockmate.compile import Partitioner
from rockmate.compile.checking import refusal_in
from rockmate.zoo import GPT2, GPT2Config
from rockmate.zoo.tasks import language_task

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35)
MODEL = GPT2Config(layers=4, width=128, heads=4, context=128, vocabulary=512)
TINY = GPT2Config(layers=1, width=64, heads=2, context=64, vocabulary=64)
BATCH = 4
RIGHT = 0.02  # how far the slope of a right gradient is from 1, as the loss bends along the way
Run = Callable[[Tensor], Tensor]


@dataclass
class Row:
    """One way to train under one share; what is None was not reached."""

    way: str
    share: float
    ready_s: float  # until its first step is over
    refused: str = ""
    peak_share: float | None = None
    time_ratio: float | None = None
    slope: float | None = None
    same_as_first: bool | None = None  # whether its gradients are those of this way's first budget, to the bit

    @property
    def is_right(self) -> bool:
        """Whether its gradient is the loss's."""
        return self.slope is not None and abs(self.slope - 1) < RIGHT


class Training:
    """A model, a batch, and steps from the same random numbers."""

    def __init__(self, config: GPT2Config, batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT2(config).train()
        task = language_task(batch, config.context, config.vocabulary)
        (self.tokens,), self.target = task.draw(torch.Generator().manual_seed(0), task.batch)
        self.criterion = task.criterion

    def loss(self, run: Run) -> Tensor:
        torch.manual_seed(1)
        return self.criterion(run(self.tokens), self.target)

    def step(self, run: Run) -> None:
        self.model.zero_grad()
        self.loss(run).backward()

    def peak_bytes(self, run: Run) -> int:
        self.model.zero_grad()
        with PeakMemory("cpu") as memory:
            self.step(run)
        return memory.peak_bytes

    def gradients(self, run: Run) -> list[Tensor]:
        self.step(run)
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def slope(self, run: Run) -> float:
        gradients = self.gradients(run)
        norm = sum(gradient.double().square().sum().item() for gradient in gradients)
        parameters, step, losses = list(self.model.parameters()), 1e-3 / norm**0.5, []
        kept = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for sign in (step, -step):
                for parameter, start, gradient in zip(parameters, kept, gradients, strict=True):
                    parameter.copy_(start + sign * gradient)
                with torch.enable_grad():
                    losses.append(self.loss(run).item())
            for parameter, start in zip(parameters, kept, strict=True):
                parameter.copy_(start)
        return (losses[0] - losses[1]) / (2 * step * norm)


def stock(model: nn.Module, share: float, eager_bytes: int) -> Run:
    """`torch.compile`, whose budget is set while it compiles."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=min(1.0, share)):  # 1 is no limit
            return compile_fx(graph, inputs)

    return cast(Run, torch.compile(model, backend=backend))  # a backend of its own, so code of its own


def partitioned(model: nn.Module, share: float, eager_bytes: int) -> Run:
    """`torch.compile` with our partitioner."""
    partitioner = Partitioner(int(share * eager_bytes))
    return cast(Run, torch.compile(model, options={"custom_partitioner_fn": partitioner}))


def planned(model: nn.Module, share: float, eager_bytes: int) -> Run:
    """A plan of eager's operations."""
    return Rockmate(model, budget=int(share * eager_bytes))


WAYS = {"torch.compile, its own budget": stock, "torch.compile, our partitioner": partitioned, "Rockmate": planned}


def measured(training: Training, shares: list[float], repeats: int) -> tuple[int, list[Row]]:
    """Bytes of the eager step, and all rows."""
    training.step(training.model)
    eager_bytes = training.peak_bytes(training.model)
    rows, runs = [], dict[int, Run]()
    for way, made in WAYS.items():
        first: list[Tensor] | None = None
        for share in shares:
            started = time.perf_counter()
            row = Row(way, share, 0.0)
            rows.append(row)
            try:
                run = made(training.model, share, eager_bytes)
                training.step(run)
            except Exception as error:
                refused = error if isinstance(error, BudgetTooSmall) else refusal_in(error)
                if refused is None:
                    raise
                row.refused = str(refused).partition(". ")[0]
                continue
            finally:
                row.ready_s = round(time.perf_counter() - started, 1)
            row.peak_share = training.peak_bytes(run) / eager_bytes
            row.slope = training.slope(run)
            gradients = training.gradients(run)
            first = first or gradients
            row.same_as_first = all(map(torch.equal, first, gradients))
            runs[len(rows) - 1] = run
            console.print(f"{way} at {share}: {row.peak_share:.3f}, slope {row.slope:.3f}, ready in {row.ready_s} s")
    times: dict[int, list[float]] = {number: [] for number in (-1, *runs)}
    for _ in range(repeats):
        everyone: dict[int, Run] = {-1: training.model, **runs}
        for number, run in everyone.items():
            started = time.perf_counter()
            training.step(run)
            times[number].append(time.perf_counter() - started)
    for number in runs:
        rows[number].time_ratio = statistics.median(times[number]) / statistics.median(times[-1])
    return eager_bytes, rows


def verdict(rows: list[Row], way: str) -> tuple[bool, str]:
    """Whether a way's steps are within their budgets, of right gradients, and never take more under less."""
    reached = [row for row in rows if row.way == way and row.peak_share is not None]
    within = sum(row.peak_share <= row.share for row in reached if row.peak_share is not None)
    right = sum(row.is_right for row in reached)
    peaks = [row.peak_share or 0.0 for row in sorted(reached, key=lambda row: -row.share)]
    monotone = all(one >= other for one, other in itertools.pairwise(peaks))
    text = f"{way}: {len(reached)} budgets reached, {within} kept, {right} with right gradients"
    return within == right == len(reached) and monotone, text + ("" if monotone else ", not monotone")


def main() -> None:
    """Runs the benchmark."""
    parser = option_parser(__doc__, "a tiny model")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of eager's peak, descending")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each (default 9)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 10 * len(SHARES)
    warnings.simplefilter("ignore")
    config = TINY if options.quick else MODEL
    eager_bytes, rows = measured(Training(config, BATCH), options.shares, options.repeats)
    table = new_table(f"GPT-2, {config.layers} layers of {config.width}, dropout {config.dropout}")
    for column in ("way", "budget", "peak", "time", "slope", "ready in s"):
        table.add_column(column)
    for row in rows:
        shown = [row.peak_share, row.time_ratio, row.slope]
        texts = ["refused" if number is None else f"{number:.3f}" for number in shown]
        table.add_row(row.way, f"{row.share}", *texts, f"{row.ready_s}")
    console.print(table)
    for way in WAYS:
        print_verdict(*verdict(rows, way))
    report: dict[str, Any] = {
        "circumstances": circumstances(options) | {"code": code_version(), "repeats": options.repeats},
        "model": asdict(config) | {"batch": BATCH},
        "eager_bytes": eager_bytes,
        "rows": [asdict(row) | {"is_right": row.is_right} for row in rows],
    }
    write_report(options.output, "compiled-budgets-cpu.json", report)


if __name__ == "__main__":
    main()
