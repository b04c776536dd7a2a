"""What planning itself takes, stage by stage, beside a forward without gradients and the eager step.

    python benchmarks/planning_memory.py                          # GPT-2 and ResNet-50; into benchmarks/results/
    python benchmarks/planning_memory.py --quick --output folder  # tiny models, to see that it runs

Each model is planned twice: with all of the machine's memory, and within a limit on the address space of less than
the eager step's peak. Bytes are the rise of the process's resident set, which counts what libraries and Python take,
too. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
import torch

from benchmarks.reporting import circumstances, console, new_table, option_parser, write_report
from rockmate import PeakMemory, Rockmate, zoo
from rockmate.units import format_bytes

SHARE_FREE, SHARE_BUDGET = 0.7, 0.4  # of the eager peak
MODELS = {"gpt2": ("gpt2-demo", "gpt2-tiny"), "resnet50": ("resnet50-demo", "resnet50-tiny")}
# Blocks from the C library's heap leave gaps, which would be counted as well; each large one has pages of its own so.
PAGES_OF_ITS_OWN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


class ResidentSet:
    """Most bytes of the process's resident set, by stage, above what was there at the start."""

    def __init__(self) -> None:
        gc.collect()
        self.rises: dict[str, int] = {}
        self.stages: list[str] = []  # as they were told, with their news
        self._before = psutil.Process().memory_info().rss
        self._stage = ""
        self._reset()

    def tell(self, stage: str, _done: int, _total: int) -> None:
        """A progress function: what rose until now did so in the stage told last."""
        if self._stage:
            self.rises[self._stage] = max(self.rises.get(self._stage, 0), self._highest() - self._before)
        self._stage = stage.split(" (")[0]
        self.stages.append(stage)
        self._reset()

    @staticmethod
    def _reset() -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @staticmethod
    def _highest() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@contextlib.contextmanager
def address_space(free_bytes: int | None) -> Iterator[None]:
    """Within the block, the process may take that much more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if free_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def peak_of(run: Callable[[], object]) -> int:
    """Most bytes of tensors alive at once."""
    with PeakMemory() as memory:
        run()
    return memory.peak_bytes


def measured(name: str) -> dict[str, Any]:
    """Bytes of the eager step, of a forward without gradients, and of the stages of planning, both ways."""
    entry = zoo.get(name)

    def step() -> None:
        output = entry.model(*entry.sample)
        entry.loss(output).backward()

    step()
    entry.model.zero_grad()
    eager_bytes = peak_of(step)
    entry.model.zero_grad()
    with torch.no_grad():
        inference_bytes = peak_of(lambda: entry.model(*entry.sample))
    row: dict[str, Any] = {"model": name, "eager_bytes": eager_bytes, "inference_bytes": inference_bytes}
    for way, free_bytes in (("free", None), ("limited", int(SHARE_FREE * eager_bytes))):
        budget_bytes = int(SHARE_BUDGET * eager_bytes)
        resident = ResidentSet()
        with address_space(free_bytes):
            planned = Rockmate(entry.model, entry.sample, budget_bytes, loss=entry.loss, progress=resident.tell)
        resident.tell("end", 0, 0)
        row[way] = resident.rises
        row[f"{way}_news"] = sorted({stage for stage in resident.stages if "memory" in stage})
        row["measured_peak_bytes"] = planned.plan.measured_peak_bytes
        del planned
    return row


def main() -> None:
    """Measure, print and write."""
    parser = option_parser(__doc__, "tiny models, without a limit's effect")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    options: argparse.Namespace = parser.parse_args()
    if not PAGES_OF_ITS_OWN.items() <= os.environ.items():  # the C library reads them when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PAGES_OF_ITS_OWN})
    torch.set_num_threads(options.threads)
    rows = [measured(MODELS[name][options.quick]) for name in options.models]
    for row in rows:
        table = new_table(
            f"{row['model']}: eager step {format_bytes(row['eager_bytes'])}, forward without gradients "
            f"{format_bytes(row['inference_bytes'])}, planned step {format_bytes(row['measured_peak_bytes'])}"
        )
        for way in ("free", "limited"):
            table.add_column(way)
        for stage in row["free"]:
            table.add_row(stage, *(format_bytes(row[way].get(stage, 0)) for way in ("free", "limited")))
        console.print(table)
    write_report(options.output, "planning-memory.json", {"circumstances": circumstances(options), "rows": rows})


if __name__ == "__main__":
    main()
