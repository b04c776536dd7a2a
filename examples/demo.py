"""Train GPT-2 and ResNet-50 under three memory budgets, and compare with eager training.

    python examples/demo.py             # a few minutes on two CPU cores; uses a GPU when there is one
    python examples/demo.py --quick     # tiny models, seconds

For each model: several optimizer steps from the same initial weights, on the same data, with the same
dropout. The peaks are measured exactly; the times are medians of steps taken in turn; a figure is drawn.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from torch import Tensor, nn

from rockmate import PeakMemory, Rockmate, zoo
from rockmate.errors import BudgetTooSmall
from rockmate.reports.comparison import ComparisonRow, MemoryCurve, comparison_table, draw_memory_figure, scaled_to
from rockmate.units import format_bytes, format_ms

Batch = tuple[tuple[Tensor, ...], Tensor]  # inputs, target

console = Console()


@dataclass(frozen=True)
class Subject:
    """A model of the zoo, and the optimizer that trains it."""

    title: str
    details: str
    entry_name: str
    quick_entry_name: str
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]


SUBJECTS = {
    "gpt2": Subject(
        "GPT-2",
        "12 layers, dropout 0.1, AdamW",
        "gpt2-demo",
        "gpt2-tiny",
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    ),
    "resnet50": Subject(
        "ResNet-50",
        "SGD with momentum",
        "resnet50-demo",
        "resnet50-tiny",
        lambda parameters: torch.optim.SGD(parameters, lr=0.003, momentum=0.9),
    ),
}


@dataclass
class Training:
    """One way to train: eager (no plan), or under a budget."""

    label: str
    weights: nn.Module  # where parameters and gradients are
    model: nn.Module  # what is called
    optimizer: torch.optim.Optimizer
    plan: Any = None
    budget_fraction: float | None = None
    memory: PeakMemory | None = None
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Median time of a training step."""
        return statistics.median(self.step_ms)

    @property
    def peak(self) -> PeakMemory:
        """The memory of the measured step."""
        assert self.memory is not None, "no step was measured"
        return self.memory


def forward_and_backward(training: Training, entry: zoo.ZooEntry, batch: Batch) -> None:
    """The part of a training step that a budget limits."""
    inputs, target = batch
    output = training.model(*inputs)
    loss = entry.criterion(output, target)
    loss.backward()
    training.losses.append(loss.item())


def update(training: Training) -> None:
    """The rest of the step."""
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)


def first_step(training: Training, entry: zoo.ZooEntry, batch: Batch) -> None:
    """Keeps a copy of the gradients."""
    forward_and_backward(training, entry, batch)
    training.first_gradients = {
        name: parameter.grad.clone()
        for name, parameter in training.weights.named_parameters()
        if parameter.grad is not None
    }
    update(training)


def measured_step(training: Training, entry: zoo.ZooEntry, batch: Batch) -> None:
    """Keeps its memory. Not the first step: by now the optimizer has its state."""
    with PeakMemory(entry.target.device) as memory:
        forward_and_backward(training, entry, batch)
        update(training)
    training.memory = memory


def timed_step(training: Training, entry: zoo.ZooEntry, batch: Batch) -> None:
    """Keeps its time."""
    start = time.perf_counter()
    forward_and_backward(training, entry, batch)  # ends with the loss as a number, so a GPU has caught up …
    update(training)
    if entry.target.device.type != "cpu":
        torch.accelerator.synchronize(entry.target.device)  # … but for the backward and the update
    training.step_ms.append(1000 * (time.perf_counter() - start))


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest absolute difference between tensors of the same name; NaN where there is one.

    Raises:
        ValueError: not the same names.
    """
    if first.keys() != second.keys():
        raise ValueError(f"only one of the two has {sorted(first.keys() ^ second.keys())}")
    differences = [(first[name].double() - second[name].double()).abs().max() for name in first]
    return torch.stack(differences).max().item() if differences else 0.0


def plan_all(subject: Subject, entry: zoo.ZooEntry, budgets: list[float]) -> list[Training]:
    """Eager training, then training under each budget that is feasible, all from the same initial weights."""
    weights = copy.deepcopy(entry.model)
    trainings = [Training("eager", weights, weights, subject.make_optimizer(weights.parameters()))]
    for budget in budgets:
        weights = copy.deepcopy(entry.model)
        try:
            model = Rockmate(weights, entry.sample, budget, loss=entry.loss, plan_in_background=False, progress=True)
        except BudgetTooSmall as error:
            console.print(f"[red]budget {budget:.2f}:[/red] {error}")
            continue
        console.print(str(model.plan), highlight=False)
        optimizer = subject.make_optimizer(weights.parameters())
        trainings.append(Training(f"budget {budget:.2f}", weights, model, optimizer, model.plan, budget))
    return trainings


def train_all(trainings: list[Training], entry: zoo.ZooEntry, timed_steps: int) -> None:
    """Takes every step with every training before the next step, so that all meet the same disturbances."""
    steps = [first_step, measured_step] + timed_steps * [timed_step]
    with console.status("training") as status:
        for index, take_step in enumerate(steps):
            batch = entry.make_batch(index % 2)
            for training in trainings:
                status.update(f"step {index + 1} of {len(steps)}, {training.label}")
                torch.manual_seed(index)  # the same dropout for all
                take_step(training, entry, batch)


def comparison_rows(subject: Subject, trainings: list[Training]) -> list[ComparisonRow]:
    """One row per training; the first of them is eager."""
    eager = trainings[0]
    return [
        ComparisonRow(
            model=subject.title,
            budget_fraction=training.budget_fraction,
            budget_bytes=training.plan and training.plan.budget_bytes,
            predicted_peak_bytes=training.plan and training.plan.peak_bytes,
            measured_peak_bytes=training.peak.peak_bytes,
            time_ratio=training.median_ms / eager.median_ms,
            largest_gradient_difference=training.plan
            and largest_difference(training.first_gradients, eager.first_gradients),
            planning_s=training.plan and training.plan.planning_s,
        )
        for training in trainings
    ]


def draw(subject: Subject, trainings: list[Training], path_stem: Path) -> None:
    """Writes the memory over the measured step, stretched to the median time of the timed ones."""
    eager, *planned = trainings
    curves = [
        MemoryCurve(
            f"{training.budget_fraction:.2f} of eager's peak: {format_bytes(training.plan.budget_bytes)}",
            scaled_to(training.peak.timeline, training.median_ms),
            training.plan.budget_bytes,
            training.plan.peak_bytes,
        )
        for training in planned
    ]
    if curves:
        timeline = scaled_to(eager.peak.timeline, eager.median_ms)
        paths = draw_memory_figure(path_stem, f"{subject.title}: {subject.details}", timeline, curves)
        console.print(f"wrote {' and '.join(str(path) for path in paths)}")


def run(subject: Subject, options: argparse.Namespace, device: torch.device) -> list[ComparisonRow]:
    """Plans, trains and draws one model; returns its rows of the table."""
    console.rule(f"{subject.title}: {subject.details}")
    entry = zoo.get(subject.quick_entry_name if options.quick else subject.entry_name, device=device)
    trainings = plan_all(subject, entry, options.budgets)
    train_all(trainings, entry, timed_steps=1 if options.quick else 5)
    eager = trainings[0]
    steps = len(eager.losses)
    losses = f"{eager.losses[0]:.4f} → {eager.losses[-1]:.4f}"
    console.print(f"eager: median step {format_ms(eager.median_ms)}, loss {losses}")
    for training in trainings[1:]:
        difference = largest_difference(training.weights.state_dict(), eager.weights.state_dict())
        verdict = "equal to eager's" if difference == 0 else f"off by up to {difference:.1e}"
        console.print(f"{training.label}: parameters and buffers after {steps} steps {verdict}")
    draw(subject, trainings, options.output / entry.name)
    return comparison_rows(subject, trainings)


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps")
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.7, 0.5, 0.35], help="parts of eager's peak")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the figures")
    return parser.parse_args()


def main() -> None:
    """Runs the demo."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.device.startswith("cuda"):
        # Without these, two eager steps already differ from each other.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    start = time.perf_counter()
    device = torch.device(options.device)
    console.print(f"PyTorch {torch.__version__} on {device}, {options.threads} CPU threads")
    rows = [row for name in options.models for row in run(SUBJECTS[name], options, device)]
    console.print(comparison_table(rows, "A training step under a budget"))
    console.print(f"took {format_ms(1000 * (time.perf_counter() - start))}")


if __name__ == "__main__":
    main()
