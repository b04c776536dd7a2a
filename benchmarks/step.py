"""Time and memory of a training step: eager, `torch.utils.checkpoint` per block, and Rockmate under budgets.

    python benchmarks/step.py                          # GPT-2 and ResNet-50; writes into benchmarks/results/
    python benchmarks/step.py --quick --output folder  # tiny models, to see that it runs

One process; the ways to train take turns, so that all meet the same disturbances. README.md says more.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.reporting import (
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    print_verdict,
    write_report,
)
from rockmate import PeakMemory, Rockmate, keep_freed_memory, zoo
from rockmate.errors import BudgetTooSmall
from rockmate.units import format_bytes, format_ms

BUDGETS = (1.0, 0.7, 0.5, 0.35)
EAGER, CHECKPOINT, AT_CHECKPOINT_PEAK = "eager", "checkpoint", "rockmate, same peak"


@dataclass(frozen=True)
class Bar:
    """A promise: the time of `label` is at most `limit` times that of `base`."""

    label: str
    limit: float
    base: str = EAGER


BARS = {
    "gpt2": (Bar("rockmate 1.00", 1.01), Bar("rockmate 0.50", 1.15), Bar("rockmate 0.35", 1.25)),
    "resnet50": (
        Bar("rockmate 1.00", 1.01),
        Bar("rockmate 0.50", 1.25),
        Bar(AT_CHECKPOINT_PEAK, 1.0, base=CHECKPOINT),
    ),
}
ENTRIES = {"gpt2": ("gpt2-demo", "gpt2-tiny"), "resnet50": ("resnet50-demo", "resnet50-tiny")}


@dataclass
class Contender:
    """One way to run a training step, and what was measured of it."""

    label: str
    weights: nn.Module  # where the gradients go
    model: Callable[..., Tensor]
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    planning_s: float | None = None
    solver: str | None = None
    measured_peak_bytes: int = 0
    largest_gradient_difference: float = 0.0
    step_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Median time of a step."""
        return statistics.median(self.step_ms)


def training_step(contender: Contender, entry: zoo.ZooEntry) -> None:
    """Forward, loss and backward on the sample, always with the same dropout; leaves the gradients."""
    torch.manual_seed(0)
    output = contender.model(*entry.sample)
    loss = entry.loss(output)
    loss.backward()


def eager(entry: zoo.ZooEntry) -> Contender:
    """The model as it is."""
    model = copy.deepcopy(entry.model)
    return Contender(EAGER, model, model)


def checkpointed(entry: zoo.ZooEntry) -> Contender:
    """The model with each of its blocks recomputed in the backward."""
    model = copy.deepcopy(entry.model)
    assert isinstance(model, zoo.GPT2 | zoo.ResNet), "only these can run their blocks another way"
    model.block_runner = lambda block, hidden: checkpoint(block, hidden, use_reentrant=False)
    return Contender(CHECKPOINT, model, model)


def planned(label: str, entry: zoo.ZooEntry, budget: float) -> Contender | None:
    """Rockmate under a budget, an int in bytes or a float of the eager peak; None where it is infeasible."""
    weights = copy.deepcopy(entry.model)
    try:
        model = Rockmate(weights, entry.sample, budget, loss=entry.loss, plan_in_background=False, progress=True)
    except BudgetTooSmall as error:
        console.print(f"[red]{label}:[/red] {error}")
        return None
    plan = model.plan
    console.print(f"{label}: {plan}", highlight=False)
    return Contender(label, weights, model, plan.budget_bytes, plan.peak_bytes, plan.planning_s, plan.solver)


def first_gradients(contender: Contender, entry: zoo.ZooEntry) -> dict[str, Tensor]:
    """The gradients of one step, by parameter; the parameters are left without."""
    training_step(contender, entry)
    found = {name: value.grad for name, value in contender.weights.named_parameters() if value.grad is not None}
    contender.weights.zero_grad(set_to_none=True)
    return found


def measure(contender: Contender, entry: zoo.ZooEntry, expected: dict[str, Tensor]) -> None:
    """Fills in the peak of a step, and how far its gradients are from those expected."""
    found = first_gradients(contender, entry)
    assert found.keys() == expected.keys(), f"{contender.label}: other parameters have gradients than in eager"
    differences = [(found[name].double() - expected[name].double()).abs().max() for name in expected]
    contender.largest_gradient_difference = torch.stack(differences).max().item()
    with PeakMemory(entry.target.device) as memory:
        training_step(contender, entry)
    contender.measured_peak_bytes = memory.peak_bytes
    contender.weights.zero_grad(set_to_none=True)


def time_all(contenders: list[Contender], entry: zoo.ZooEntry, repeats: int) -> None:
    """Times `repeats` steps of each; each round starts with another contender."""
    with console.status("timing") as status:
        for repeat in range(repeats):
            shift = repeat % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                status.update(f"round {repeat + 1} of {repeats}: {contender.label}")
                contender.step_ms.append(step_time_ms(contender, entry))


def step_time_ms(contender: Contender, entry: zoo.ZooEntry) -> float:
    """Time of one step, from and to an idle device."""
    if entry.target.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    training_step(contender, entry)
    if entry.target.is_cuda:
        torch.cuda.synchronize()
    duration_ms = 1000 * (time.perf_counter() - start)
    contender.weights.zero_grad(set_to_none=True)
    return duration_ms


def line_up(entry: zoo.ZooEntry) -> list[Contender]:
    """All contenders, measured but not yet timed; the first is eager."""
    contenders = [eager(entry), checkpointed(entry)]
    expected = first_gradients(contenders[0], entry)
    for contender in contenders:
        measure(contender, entry, expected)
    budgets: list[tuple[str, float]] = [(f"rockmate {budget:.2f}", budget) for budget in BUDGETS]
    budgets.append((AT_CHECKPOINT_PEAK, contenders[1].measured_peak_bytes))
    for label, budget in budgets:
        rockmate = planned(label, entry, budget)
        if rockmate is not None:
            measure(rockmate, entry, expected)
            contenders.append(rockmate)
    return contenders


def judge(contenders: list[Contender], bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """For each bar the ratio reached, None where its contender is missing, and whether it is good enough."""
    times_ms = {contender.label: contender.median_ms for contender in contenders}
    verdicts = []
    for bar in bars:
        ratio = times_ms[bar.label] / times_ms[bar.base] if bar.label in times_ms else None
        verdicts.append(asdict(bar) | {"ratio": ratio, "met": ratio is not None and ratio <= bar.limit})
    return verdicts


def table_of(contenders: list[Contender], title: str) -> Table:
    """One line per contender."""
    table = new_table(title)
    for heading in (
        "median\nstep",
        "time\n/ eager",
        "budget",
        "predicted\npeak",
        "measured\npeak",
        "gradients\noff by",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for contender in contenders:
        table.add_row(
            contender.label,
            format_ms(contender.median_ms),
            f"{contender.median_ms / contenders[0].median_ms:.3f}×",
            "–" if contender.budget_bytes is None else format_bytes(contender.budget_bytes),
            "–" if contender.predicted_peak_bytes is None else format_bytes(contender.predicted_peak_bytes),
            format_bytes(contender.measured_peak_bytes),
            f"{contender.largest_gradient_difference:.0e}" if contender.largest_gradient_difference else "0",
        )
    return table


def circumstances_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    try:
        version = importlib.metadata.version("rockmate-rk")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    on_cuda = options.device.startswith("cuda")
    return circumstances(options) | {
        "code": code_version(),
        "rockmate": version,
        "gpu": torch.cuda.get_device_name(options.device) if on_cuda else None,
        "device": options.device,
        "repeats": options.repeats,
        "keeps_freed_memory": options.keeps_freed_memory,
    }


def run(name: str, options: argparse.Namespace) -> None:
    """Measures one model, prints its table and bars, writes its result file."""
    entry = zoo.get(ENTRIES[name][options.quick], device=options.device)
    console.rule(entry.name)
    contenders = line_up(entry)
    time_all(contenders, entry, options.repeats)
    verdicts = judge(contenders, BARS[name])
    console.print(table_of(contenders, f"{entry.name}, median of {options.repeats} steps"))
    for verdict in verdicts:
        reached = "was not run" if verdict["ratio"] is None else f"{verdict['ratio']:.3f}×"
        print_verdict(verdict["met"], f"{verdict['label']} ≤ {verdict['limit']} × {verdict['base']}: {reached}")
    report = {
        "entry": entry.name,
        "circumstances": circumstances_of(options),
        "contenders": [result_of(contender, contenders[0]) for contender in contenders],
        "bars": verdicts,
    }
    write_report(options.output, f"step-{entry.name}-{torch.device(options.device).type}.json", report)


def result_of(contender: Contender, reference: Contender) -> dict[str, Any]:
    """What the result file says of a contender."""
    numbers = {key: value for key, value in vars(contender).items() if key not in ("weights", "model")}
    numbers["step_ms"] = [round(time_ms, 3) for time_ms in contender.step_ms]
    return numbers | {
        "median_ms": contender.median_ms,
        "time_ratio": contender.median_ms / reference.median_ms,
    }


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "tiny models, whose times mean nothing")
    parser.add_argument("--models", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--repeats", type=int, default=11, help="timed steps of each contender (default 11)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    options.keeps_freed_memory = keep_freed_memory()
    torch.set_num_threads(options.threads)
    for name in options.models:
        run(name, options)


if __name__ == "__main__":
    main()
