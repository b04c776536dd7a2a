"""Estimates by shapes alone beside what is measured: the zoo, and families of transformers.

    python benchmarks/estimates.py                              # all of them
    python benchmarks/estimates.py --models gpt2-demo Llama     # a few
    python benchmarks/estimates.py --quick --output folder

For each, the peak of an eager step, which is measured, and the peak of a plan: decided on the estimated problem for 0.6
of the estimated eager peak, or else the least that there is, and followed on the measured one. Each is in a process of
its own. Bytes do not vary, so nothing else need be idle, but for the seconds of two models of their own sizes on the
device "meta", which come first. README.md says more.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers

import rockmate
import rockmate.zoo as zoo
from benchmarks.families import FAMILIES
from benchmarks.families.core import loss_of
from benchmarks.families.isolation import isolated, preload
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
from rk_solvers import Limits, Problem, Schedule, peak_and_time, solver_named
from rkgb import make_sample
from rkgb.shapes.dataless import Dataless
from rkgb.shapes.device import standing_for
from rkgb.shapes.machine import named_machine
from rockmate import PeakMemory
from rockmate.forecast.eager_step import observe_eager_step
from rockmate.options import PlanOptions
from rockmate.planning.fixed_plan import PortablePlan
from rockmate.planning.measured import measure
from rockmate.units import format_bytes

RESULTS = "estimates.json"
SHARE = 0.6
QUICK = ("gpt2-tiny", "GPT2", "resnet50-tiny")
SEARCH = Limits(search_s=2.0, extra_s=0.0, bound_s=0.0, proof_s=0.0, least_peak_s=0.0)
MEDIAN, WORST = 1.0, 5.0  # percent: the bars


@dataclass(frozen=True)
class Row:
    """One model. Bytes are of a step, above what was there before it."""

    model: str
    eager_bytes: int = 0
    estimated_bytes: int = 0
    plan_bytes: int | None = None  # of the plan on the measured problem
    plan_estimated_bytes: int | None = None
    took_s: float = 0.0  # of the estimate of the eager step
    traced_s: float = 0.0  # of that of what plans are made from
    reason: str | None = None  # there is no estimate, or no plan

    @property
    def error(self) -> float | None:
        """Of the eager peak, as a share."""
        return self.estimated_bytes / self.eager_bytes - 1 if self.estimated_bytes else None

    @property
    def plan_error(self) -> float | None:
        """Of the plan's peak."""
        if self.plan_bytes is None or self.plan_estimated_bytes is None:
            return None
        return self.plan_estimated_bytes / self.plan_bytes - 1


def made(name: str) -> tuple[torch.nn.Module, Any, Any]:
    """The model, its sample and its loss."""
    if name in FAMILIES:
        return (*FAMILIES[name].make(), loss_of)
    entry = zoo.get(name)
    return entry.model, entry.sample, entry.loss


def row_of(name: str) -> Row:
    """Measure and estimate one model. Raises what either raises."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    model, sample, loss = made(name)
    arguments = make_sample(model, sample)
    for _ in range(2):  # libraries take memory at first use, and keep it
        model.zero_grad(set_to_none=True)
        with PeakMemory() as memory:
            output = arguments.call(model)
            loss(output).backward()
        del output
    model.zero_grad(set_to_none=True)
    row = Row(name, memory.peak_bytes)
    machine = named_machine("cpu")
    assert machine is not None
    dataless = Dataless(machine)
    with standing_for(machine, dataless.values) as shapes, dataless.module(model):
        given = dataless.sample(arguments)
        try:
            started = time.perf_counter()
            eager = observe_eager_step(model, given, dataless.function(loss), None, shapes)
            row = replace(row, estimated_bytes=eager.step_peak_bytes, took_s=round(time.perf_counter() - started, 2))
            started = time.perf_counter()
            told = measure(model, given, PlanOptions(loss=dataless.function(loss)).request(sys.maxsize))
            row = replace(row, traced_s=round(time.perf_counter() - started, 2))
        except Exception as error:  # noqa: BLE001  whatever cannot be told is the reason in the row
            return replace(row, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    solution = solver_named("auto", SEARCH, told.chain).solve(told.problem, int(SHARE * eager.step_peak_bytes))
    try:
        request = PlanOptions(loss=loss).request(sys.maxsize)
        measured = measure(model, sample, request)
        if measured.graphs.B_graph.tracer != told.graphs.B_graph.tracer:  # which may know the trace by data alone
            measured = measure(model, sample, request, told)
        followed = _followed(solution.schedule, told.problem, measured.problem)
    except Exception as error:  # noqa: BLE001  the measured model has other operations, or cannot be planned
        return replace(row, reason=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    estimated_bytes = peak_and_time(told.problem, solution.schedule)[0]
    return replace(row, plan_bytes=peak_and_time(measured.problem, followed)[0], plan_estimated_bytes=estimated_bytes)


def _followed(schedule: Schedule, told: Problem, measured: Problem) -> Schedule:
    """The same decisions: by the places of operations where there are as many of them, else by their names."""
    plan = PortablePlan.of(schedule, "auto")
    if len(told.forward) == len(measured.forward):
        there = {one.name: other.name for one, other in zip(told.forward, measured.forward, strict=True)}
        for stage in told.backward:  # named after the operation whose backward it is
            operation, dot, which = stage.name.partition(".")
            there[stage.name] = f"{there.get(operation, operation)}{dot}{which}"
        stages = ((there[stage], tuple(there[name] for name in names)) for stage, names in plan.stages)
        plan = PortablePlan(tuple(stages), plan.solver)
    return plan.schedule_for(measured)


@dataclass(frozen=True)
class LargeRow:
    """A model of its own size on the device "meta": what asking costs. Nothing is measured beside it."""

    model: str
    took_s: float
    process_bytes: int  # that the process takes more than before
    parameter_bytes: int
    peak_bytes: int
    most_s: float  # the bars
    most_bytes: int


def _gpt2() -> tuple[torch.nn.Module, Any]:
    tokens = torch.zeros(8, 512, dtype=torch.long)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()), {"input_ids": tokens, "labels": tokens}


def _llama_7b() -> tuple[torch.nn.Module, Any]:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        use_cache=False,
    )
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


LARGE = {"GPT-2, 12 layers": (_gpt2, 3.0, 2 << 30), "Llama 7B": (_llama_7b, 60.0, 2 << 30)}
"""What makes it, and the most seconds and bytes of an estimate."""


def large_row(name: str) -> LargeRow:
    """One estimate of training with AdamW, without the largest batch. Raises what it raises."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    make, most_s, most_bytes = LARGE[name]
    with torch.device("meta"):
        model, sample = make()
    before_bytes = _most_resident_bytes()
    found = rockmate.estimate(
        model, sample, loss=loss_of, optimizer="adamw", device="H100", dtype=torch.bfloat16, batches=False
    )
    return LargeRow(
        name,
        round(found.took_s, 2),
        _most_resident_bytes() - before_bytes,
        found.eager.parameter_bytes,
        found.peak_bytes,
        most_s,
        most_bytes,
    )


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def bars_of(rows: list[Row], large: list[LargeRow]) -> list[dict[str, Any]]:
    """What is promised, over all models."""
    found = []
    for what, errors in (
        ("eager peak", [abs(row.error) for row in rows if row.error is not None]),
        (f"peak of the plan at {SHARE:g}", [abs(row.plan_error) for row in rows if row.plan_error is not None]),
    ):
        if errors:
            found.append(bar(f"{what}: median error, %", 100 * statistics.median(errors), MEDIAN))
            found.append(bar(f"{what}: worst error, %", 100 * max(errors), WORST))
    found.append(bar("models without an estimate of the eager peak", sum(row.error is None for row in rows), 0))
    for one in large:
        found.append(bar(f"{one.model}: seconds of an estimate", one.took_s, one.most_s))
        found.append(bar(f"{one.model}: MiB that it takes", one.process_bytes >> 20, one.most_bytes >> 20))
    return found


def print_rows(rows: list[Row]) -> None:
    """One line per model."""
    table = new_table("estimated by shapes, and measured")
    for heading in ("eager", "estimated", "error", "plan", "estimated", "error", "took"):
        table.add_column(heading, justify="right")
    table.add_column("reason")
    for row in rows:
        sizes = (row.eager_bytes, row.estimated_bytes, row.plan_bytes or 0, row.plan_estimated_bytes or 0)
        eager, estimated, plan, plan_estimated = (format_bytes(size) if size else "–" for size in sizes)
        errors = ["–" if error is None else f"{error:+.2%}" for error in (row.error, row.plan_error)]
        took = f"{row.took_s + row.traced_s:.1f} s"
        reason = (row.reason or "")[:100]
        table.add_row(row.model, eager, estimated, errors[0], plan, plan_estimated, errors[1], took, reason)
    console.print(table)


def large_rows(options: argparse.Namespace) -> list[LargeRow]:
    """Each in a process of its own."""
    found = []
    for name in LARGE if options.large else ():
        row = isolated(large_row, (name,), options.threads, options.most_seconds)
        if not isinstance(row, LargeRow):
            raise RuntimeError(f"{name}: {row}")
        found.append(row)
        console.print(f"{name}: {row.took_s:.1f} s, {format_bytes(row.process_bytes)}", highlight=False)
    return found


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, f"only {', '.join(QUICK)}")
    names = [*zoo.names(), *FAMILIES]
    parser.add_argument("--models", nargs="+", choices=names, metavar="MODEL", help="default: all of them")
    parser.add_argument("--most-seconds", type=float, default=600.0, help="of one model in all (default 600)")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    options.large = not (options.quick or options.models)  # models of their own sizes, beside all others
    options.models = options.models or (list(QUICK) if options.quick else names)
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    preload()
    large = large_rows(options)  # first: times want a quiet machine
    rows: list[Row] = []
    for name in options.models:
        found = isolated(row_of, (name,), options.threads, options.most_seconds)
        row = found if isinstance(found, Row) else Row(name, reason=found)
        rows.append(row)
        error = "no estimate" if row.error is None else f"{row.error:+.2%}"
        console.print(f"{name}: {error} {row.reason or ''}"[:200], highlight=False, markup=False)
        about = circumstances(options) | {"transformers": transformers.__version__, "code": code_version()}
        report = {"circumstances": about, "rows": [asdict(one) for one in rows]}
        report |= {"large": [asdict(one) for one in large], "bars": bars_of(rows, large)}
        write_report(options.output, RESULTS, report, quietly=True)
    print_rows(rows)
    print_bars(bars_of(rows, large))


if __name__ == "__main__":
    main()
