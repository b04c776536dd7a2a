"""Whether it would pay to keep ReLU's output for its own backward as one bit an element.

    python benchmarks/relu_signs.py                          # up to ten minutes; writes into benchmarks/results/
    python benchmarks/relu_signs.py --quick --output folder  # tiny models, whose times mean nothing

The backward of ReLU asks of its output no more than where it is above zero. The problem of each model is measured, and
solved as it is and with numbers as if such outputs were read from bits where nothing else reads them in the backward.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.peers.case import peak_of_eager
from benchmarks.peers.models import case_named
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
from rk_solvers import Chain, Data, ForwardOp, Limits, Problem, solver_named
from rkgb.profile.recompute_cost import CACHES_BYTES, ColdClock
from rkgb.restore.packed_mask import PackedMask
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest

MODELS = ("transformer", "hf-t5")  # those with ReLU between the layers of their feed-forward parts
SHARES = (0.7, 0.5, 0.4, 0.3)
GAIN = 0.001  # of the step's time: less is no gain, as plans are proven within about as much


def ms_per_byte(elements: int) -> float:
    """Time of packing a float32 tensor of so many elements into bits and of reading them, by its bytes."""
    form = PackedMask((elements,), (1,), torch.float32, 0, int(torch.ones(()).view(torch.int32)))
    tensor = (torch.rand(elements) < 0.5).float()
    clock, packed = ColdClock(CACHES_BYTES), form.pack(tensor)
    times_ms = [clock.times([run])[0] for run in (partial(form.pack, tensor), partial(form.unpack, packed))]
    return sum(times_ms) / tensor.nbytes


def outputs_of_relu(problem: Problem) -> list[int]:
    """Outputs of ReLU, among the data, that the backward of ReLU alone reads."""
    readers = problem.backward_users()
    return [
        item
        for op in problem.forward
        for item in op.outputs
        if op.name.startswith("relu")
        and [problem.backward[user].name for user in readers[item]] == [f"{op.name}.backward"]
    ]


def with_bits(problem: Problem, items: Sequence[int], rate: float) -> Problem:
    """Each of these outputs apart for the backward: what has it again reads bits, at `rate` milliseconds a byte."""
    for item in items:
        data, maker = problem.data[item], problem.data[item].producer
        moved = [replace(one, producer=one.producer + (one.producer > maker)) for one in problem.data]
        apart = Data(f"{data.name}.bits", data.size_bytes, maker + 1, "phantom")
        bits_bytes = data.size_bytes // 32
        reading = ForwardOp(apart.name, 0.0, (), (len(moved),), 0, True, bits_bytes, rate * data.size_bytes)
        backward = tuple(
            replace(op, needs=tuple(sorted(len(moved) if need == item else need for need in op.needs)))
            for op in problem.backward
        )
        forward = (*problem.forward[: maker + 1], reading, *problem.forward[maker + 1 :])
        problem = Problem((*moved, apart), forward, backward, problem.held, problem.base_bytes)
    return problem


def solved(problem: Problem, chain: Chain | None, budget_bytes: int, seconds: float) -> tuple[float, float]:
    """Time of the best plan found, infinite where none fits, and a bound of all; both by that of keeping everything."""
    solver = solver_named("auto", Limits(gap=GAIN / 2).within(seconds), chain)
    solution = solver.solve(problem, budget_bytes)
    time_ms = solution.time_ms if solution.status.fits else float("inf")
    return time_ms / problem.keep_all_time_ms, (solution.lower_bound_ms or 0.0) / problem.keep_all_time_ms


def compare(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each budget of a model."""
    case = case_named(name, "cpu", options.quick)
    peak_bytes = peak_of_eager(case)
    measured = measure(case.fresh_model(), case.sample, PlanRequest(1.0, case.loss))
    problem = measured.problem
    items = outputs_of_relu(problem)
    rate = ms_per_byte(max(problem.data[item].size_bytes for item in items) // 4)
    rows = []
    for share in SHARES:
        budget_bytes = int(share * peak_bytes)
        variants = [with_bits(problem, chosen, rate) for chosen in (items, *([item] for item in items))]
        now, bound = solved(problem, measured.chain, budget_bytes, options.seconds)
        of_all, *of_one = (solved(each, None, budget_bytes, options.seconds)[0] for each in variants)
        rows.append(
            {
                "model": name,
                "share": share,
                "outputs": len(items),
                "outputs_share": sum(problem.data[item].size_bytes for item in items) / peak_bytes,
                "now": now,
                "now_bound": bound,
                "all": of_all,
                "best_of_one": min(of_one),
            }
        )
    return rows


def main() -> None:
    """Runs the benchmark."""
    parser = option_parser(__doc__, "tiny models, whose times mean nothing")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=20.0, help="that a plan may take (default %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for name in options.models for row in compare(name, options)]
    table = new_table("time of the best plan / keeping everything")
    for heading in ("", "budget", "of the peak", "as it is", "no plan below", "bits of all", "bits of the best one"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = [f"{row[key]:.4f}" for key in ("now", "now_bound", "all", "best_of_one")]
        table.add_row(row["model"], f"{row['share']:.2f}", f"{row['outputs_share']:.3f}", *numbers)
    console.print(table)
    bars = [
        # A search that ends before its proof may find a better plan for one of several like problems.
        bar(
            f"gained by bits, {row['model']} at {row['share']:.2f}",
            row["now_bound"] - min(row["all"], row["best_of_one"]),
            GAIN,
        )
        for row in rows
    ]
    print_bars(bars)
    report = {"circumstances": circumstances(options) | {"code": code_version()}, "rows": rows, "bars": bars}
    write_report(options.output, "relu-signs-cpu.json", report)


if __name__ == "__main__":
    main()
