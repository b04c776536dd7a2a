"""Draw the pictures of the documentation from real training steps.

    python docs/make_figures.py                                     # some minutes on two CPU cores
    python docs/make_figures.py --entry gpt2-tiny --output folder   # seconds: shows that it runs

Each curve is the memory of one training step (forward, loss, backward), counted to the byte. Profiled steps run
slower: the times are scaled to the fastest of several unprofiled steps, which all contenders take in turn.
"""
# a script, not a package

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from rockmate import PeakMemory, Rockmate, zoo
from rockmate.reports.comparison import MemoryCurve, draw_memory_figure, scaled_to
from rockmate.units import format_bytes

TITLES = {"gpt2-demo": "One training step of GPT-2: 12 layers, dropout 0.1"}


def step_of(model: torch.nn.Module, entry: zoo.ZooEntry) -> Callable[[], None]:
    """One training step without the optimizer: holds the output to the end, then drops the gradients."""

    def step() -> None:
        output = model(*entry.sample)
        loss = entry.loss(output)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def memory_of(step: Callable[[], None], repeats: int = 4) -> tuple[tuple[float, int], ...]:
    """Memory over the least disturbed of several steps."""
    timelines = []
    for _ in range(repeats):
        with PeakMemory() as memory:
            step()
        timelines.append(memory.timeline)
    return min(timelines, key=lambda timeline: timeline[-1][0])


def fastest_ms(steps: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Least time of each step; they take turns, so that all meet the same disturbances."""
    times_ms: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, times in zip(steps, times_ms, strict=True):
            start = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - start))
    return [min(times) for times in times_ms]


def draw(entry: zoo.ZooEntry, budgets: Sequence[float], rounds: int, folder: Path) -> Path:
    """Plan, measure, draw; returns the path of the picture."""
    models = [
        Rockmate(copy.deepcopy(entry.model), entry.sample, budget, loss=entry.loss, progress=True) for budget in budgets
    ]
    steps = [step_of(model, entry) for model in (entry.model, *models)]
    timelines = [memory_of(step) for step in steps]
    eager_ms, *planned_ms = fastest_ms(steps, rounds)
    curves = [
        MemoryCurve(
            f"budget {100 * budget:.0f} % of eager's peak: {format_bytes(model.plan.budget_bytes)}",
            scaled_to(timeline, time_ms),
            model.plan.budget_bytes,
            model.plan.peak_bytes,
        )
        for budget, model, timeline, time_ms in zip(budgets, models, timelines[1:], planned_ms, strict=True)
    ]
    title = TITLES.get(entry.name, f"One training step of {entry.name}")
    with tempfile.TemporaryDirectory() as scratch:
        png, _ = draw_memory_figure(Path(scratch) / "figure", title, scaled_to(timelines[0], eager_ms), curves)
        path = folder / f"memory_{entry.name.partition('-')[0]}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png.read_bytes())
    return path


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry", choices=zoo.names(), default="gpt2-demo")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.35], help="parts of eager's peak")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each (default 15)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images", help="folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    draw(zoo.get(options.entry), options.budgets, options.rounds, options.output)


if __name__ == "__main__":
    main()
