"""How far plans of one model lie apart that were made of times measured one after another.

python benchmarks/replanning.py                          # GPT-2, some minutes; writes results/replanning-cpu.json
python benchmarks/replanning.py --quick --output folder  # a tiny model: shows that it runs, measures nothing

What else a machine does changes the times of operations, and not all by the same factor. Each round measures the model
anew, and solves for each budget what it found. Nothing is run: the ratios are those that plans predict, and the bounds
that are proven below them.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from benchmarks.peers.bars import BARS
from benchmarks.peers.case import Case, peak_of_eager
from benchmarks.peers.models import case_named
from benchmarks.reporting import circumstances, code_version, console, option_parser
from rk_solvers import Limits, solver_named
from rockmate import keep_freed_memory
from rockmate.planning.measured import measure
from rockmate.planning.request import PlanRequest

GAP = 0.002  # of a plan's time, where a search ends


def main() -> None:
    """Measure and solve, round by round."""
    options = _options()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    case = case_named(options.model, "cpu", options.quick)
    peak_bytes = peak_of_eager(case)
    rounds = []
    for _ in range(options.rounds):
        rounds.append(one_round(case, peak_bytes, options.seconds))
        console.print(_told(rounds[-1]))
    content = {
        "model": options.model,
        "circumstances": {"code": code_version(), **circumstances(options)},
        "bars": {f"{share:.2f}": limit for share, limit in BARS.get(options.model, {}).items()},
        "rounds": rounds,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "replanning-cpu.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def one_round(case: Case, peak_bytes: int, seconds: float) -> dict[str, Any]:
    """Times of keeping everything, in ms, and by share of `peak_bytes` what a plan takes by that, and its bound."""
    measured = measure(case.fresh_model(), case.sample, PlanRequest(1.0, case.loss))
    problem = measured.problem
    solver = solver_named("auto", Limits(gap=GAP).within(seconds), measured.chain)
    plans = {}
    for share in case.shares:
        plan = solver.solve(problem, int(share * peak_bytes))
        if plan.status.fits:
            bound_ms = plan.lower_bound_ms
            plans[f"{share:.2f}"] = {
                "predicted_ratio": round(plan.time_ms / problem.keep_all_time_ms, 4),
                "bound_ratio": None if bound_ms is None else round(bound_ms / problem.keep_all_time_ms, 4),
            }
    return {"keep_all_ms": round(problem.keep_all_time_ms, 1), "plans": plans}


def _told(found: dict[str, Any]) -> str:
    plans = (f"{share}: {plan['predicted_ratio']:.3f}" for share, plan in found["plans"].items())
    return f"keeping everything takes {found['keep_all_ms']:.0f} ms; by it " + ", ".join(plans)


def _options() -> argparse.Namespace:
    parser = option_parser(__doc__, quick="a tiny model, one round")
    parser.add_argument("--model", default="gpt2", help="of benchmarks/peers/models.py")
    parser.add_argument("--rounds", type=int, help="how often to measure (default 8)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each search (default 10)")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 8)
    return options


if __name__ == "__main__":
    main()
