"""Whether compiled parts should be divided in several ways: what each saves, and what that takes.

    python benchmarks/part_divisions.py                     # four models, some minutes
    python benchmarks/part_divisions.py --models hf-llama
    python benchmarks/part_divisions.py --quick --output folder

A compiled part saves some values for its backward, and computes the others there again. Which, is a least cut, at a
price of a byte: at none all is saved that saves time, at a high one as little as can be. All parts of a model are
compiled at each price, and tried beside their operations. Were a second way worth its compiling, it would take much
less time than the usual one, or save far fewer bytes. Nothing else should be computed on the machine.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.peers.case import Case
from benchmarks.peers.models import case_named
from benchmarks.reporting import (
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    write_report,
)
from rockmate.planning.measured import Traced, measure_traced, trace_model
from rockmate.planning.request import PlanRequest
from rockmate.regions import build, choose, code

MODELS = ("hf-llama", "hf-bert", "vit", "gpt2")
PRICES = (0.0, build._PRICE, 30.0)  # of a byte, in times of writing and reading it
RESULTS = "part-divisions-cpu.json"


def main() -> None:
    """Runs the benchmark."""
    parser = option_parser(__doc__, "tiny models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = fresh
        for name in options.models:
            case = case_named(name, "cpu", options.quick, torch.float32, None)
            rows += rows_of(name, case)
    report = {"circumstances": circumstances(options) | {"code": code_version()}, "rows": rows}
    _print(rows)
    write_report(options.output, RESULTS, report)


def rows_of(name: str, case: Case) -> list[dict[str, Any]]:
    """All parts of a model at each price, beside an eager step."""
    request, model = PlanRequest(None, loss=case.loss), case.fresh_model()
    measured = measure_traced(model, trace_model(model, case.sample, request), request)
    rows = []
    for price in PRICES:
        traced = traced_at(price, case)
        assert traced.regions is not None
        trials = [trial for trial in traced.regions.trials if not trial.refused]
        row = {"model": name, "price": price, "step_ms": measured.problem.keep_all_time_ms, "parts": len(trials)}
        for key in ("eager_ms", "compiled_ms", "eager_bytes", "compiled_bytes"):
            row[key] = sum(getattr(trial, key) for trial in trials)
        rows.append(row)
        console.print(row)
    return rows


def traced_at(price: float, case: Case) -> Traced:
    """The model traced, and all its parts compiled at this price, whatever was compiled before."""
    for held in (code.CALLS, code.FORMS, choose._TRIED):
        held.clear()
    usual, build._PRICE = build._PRICE, price
    try:
        return trace_model(case.fresh_model(), case.sample, PlanRequest(None, loss=case.loss, compile=True))
    finally:
        build._PRICE = usual
        for held in (code.CALLS, code.FORMS, choose._TRIED):
            held.clear()


def _print(rows: list[dict[str, Any]]) -> None:
    table = new_table("Divisions of compiled parts")
    for heading in ("price", "of a step's time", "saved, of eager's"):
        table.add_column(heading, justify="right")
    for row in rows:
        share, saved = row["compiled_ms"] / row["step_ms"], row["compiled_bytes"] / max(row["eager_bytes"], 1)
        table.add_row(row["model"], f"{row['price']:g}", f"{100 * share:.1f} %", f"{saved:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
