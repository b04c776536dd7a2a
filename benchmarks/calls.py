"""What calls take whose code is in no cache, as between the large operations of a training step.

    python benchmarks/calls.py                          # writes into benchmarks/results/
    python benchmarks/calls.py --quick --output folder  # few calls, to see that it runs

Each call is timed right after other bytes have been written, more than the caches hold, and again in a loop of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.reporting import circumstances, code_version, console, new_table, option_parser, write_report
from rkgb.profile.recompute_cost import CACHES_BYTES
from rockmate.runtime.bindings import BINDINGS
from rockmate.runtime.step import Step
from rockmate.runtime.tables import ForgottenTensor, SavingOp, SegmentCode, StepTables

SIZE = 8  # of tensors: there is nothing to compute
aten = torch.ops.aten
Calls = dict[
    str, tuple[Callable[[], Any], Callable[..., Any]]
]  # by name: what makes a tuple, and what is timed with it


def operations() -> Calls:
    """Operations by their schemas, and by the bindings that generated code calls."""
    matrix, batch = torch.rand(SIZE, SIZE), torch.rand(2, SIZE, SIZE)
    given: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
        aten.mul.Tensor: ((matrix, matrix), {}),
        aten.view.default: ((batch, [2, SIZE * SIZE]), {}),
        aten.bmm.default: ((batch, batch), {}),
        aten.linear.default: ((batch, matrix), {}),
        aten.clone.default: ((batch,), {"memory_format": torch.contiguous_format}),
        aten.empty_strided.default: (([2, 3], [3, 1]), {"dtype": torch.float32, "device": torch.device("cpu")}),
    }
    found: Calls = {}
    for op, (args, kwargs) in given.items():
        for how, function in (("schema", op._op), ("binding", BINDINGS[op])):
            found[f"{op.name().removeprefix('aten::')}, {how}"] = (tuple, partial(function, *args, **kwargs))
    return found


def forgetting() -> Calls:
    """A product, forward and backward: as it is, and with one of its two saved tensors forgotten and given back."""
    factor, given = torch.rand(SIZE), torch.rand(SIZE, requires_grad=True)

    def recompute(step: Step) -> None:
        step.fill("product", 0, step.take("factor", last=True))

    saving = SavingOp(1, {0: ForgottenTensor(0, (SIZE,), (1,), 0)})
    code = SegmentCode(recompute, False, frozenset(), frozenset({"factor"}), frozenset(), ())
    tables = StepTables({"product": saving}, [code], {}, {})

    def plain() -> torch.Tensor:
        with torch.enable_grad():
            return given * factor

    def forgotten(step: Step) -> torch.Tensor:
        with torch.enable_grad(), step.forgets("product"):
            return given * factor

    def ready() -> tuple[Any]:
        step = Step(tables)
        step.keep("factor", factor)
        return (forgotten(step).grad_fn,)

    return {
        "product": (tuple, plain),
        "product, forgetting": (lambda: (Step(tables),), forgotten),
        "product's backward": (lambda: (plain().grad_fn,), lambda node: node(factor)),
        "product's backward, recomputing": (ready, lambda node: node(factor)),
        "keeping a tensor": (lambda: (Step(tables),), lambda step: step.keep("factor", factor)),
    }


def timed_us(make: Callable[[], Any], call: Callable[..., Any], others: torch.Tensor | None) -> float:
    """Time of a call, after the caches have been filled with others' bytes if these are given."""
    made = make()
    if others is not None:
        others.fill_(0)
    started = time.perf_counter()
    call(*made)
    return (time.perf_counter() - started) * 1e6


def measure(calls: Calls, repeats: int) -> list[dict[str, Any]]:
    """Medians of all calls, which take turns."""
    others = torch.empty(CACHES_BYTES, dtype=torch.uint8)
    cold: dict[str, list[float]] = {name: [] for name in calls}
    hot: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(repeats):
            for name, (make, call) in calls.items():
                cold[name].append(timed_us(make, call, others))
        for name, (make, call) in calls.items():
            hot[name] = [timed_us(make, call, None) for _ in range(10 * repeats)]
    return [
        {
            "call": name,
            "cold_us": round(statistics.median(cold[name]), 1),
            "hot_us": round(statistics.median(hot[name]), 1),
        }
        for name in calls
    ]


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table, writes the result file."""
    results = measure(operations() | forgetting(), 3 if options.quick else 200)
    table = new_table("Calls, µs")
    for heading in ("in no cache", "in a loop"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(result["call"], f"{result['cold_us']:.0f}", f"{result['hot_us']:.1f}")
    console.print(table)
    report = {"circumstances": circumstances(options) | {"code": code_version()}, "calls": results}
    write_report(options.output, "calls-cpu.json", report)


def main() -> None:
    """Runs the benchmark."""
    options = option_parser(__doc__, "few calls, whose times mean nothing").parse_args()
    torch.set_num_threads(options.threads)
    run(options)


if __name__ == "__main__":
    main()
