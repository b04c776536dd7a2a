"""Convolutional models as given and in channels_last: eager, planned in either layout, and compiled by inductor.

    python benchmarks/layouts.py                                        # five models; two hours
    python benchmarks/layouts.py --models densenet121 --no-inductor     # one of them, without what takes longest
    python benchmarks/layouts.py --quick --output folder                # tiny models, whose times mean nothing

Each model's contenders take turns in one process, each round in another order; ratios are of medians, peaks are exact.
Budgets are shares of the peak of the eager step as given. Inductor always computes convolutions in channels_last on
the CPU; its budget is a share of the activations, which it does not always keep. What it takes until its first step is
compiling. Models that are named are measured anew, and take the place of those of an earlier run. Nothing else should
be computed on the machine.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.peers import compiled, layouts, ours
from benchmarks.peers.case import Peer
from benchmarks.peers.families import Family
from benchmarks.peers.measuring import Contender, line_up, result_of, time_all
from benchmarks.peers.models import case_named
from benchmarks.peers.registry import peers_for
from benchmarks.reporting import circumstances, code_version, console, option_parser, write_report
from rockmate import keep_freed_memory

MODELS = ("densenet121", "resnet50", "googlenet", "mobilenet-v2", "unet")
SHARES = (0.7, 0.5, 0.4, 0.3)
FACTS = (
    "label", "family", "status", "share", "budget_bytes", "peak_bytes", "peak_share", "median_ms", "time_ratio",
    "time_error", "predicted_ratio", "relative_difference", "ready_s", "reason", "note",
)  # fmt: skip


def peers_of(shares: tuple[float, ...], inductor: bool) -> tuple[Peer, ...]:
    """Eager training, which comes first, and all that is compared with it."""
    eager = peers_for((), [family for family in Family if family is not Family.EAGER])[0]
    in_given = [peer for peer in ours.peers(shares) if peer.family is Family.OURS]
    inductors = [peer for peer in compiled.PEERS if inductor and "inductor" in peer.label]
    return (eager, *layouts.peers(shares), *in_given, *inductors)


def rows_of(name: str, options: Any) -> list[dict[str, Any]]:
    """What was measured of each way to train this model."""
    torch._dynamo.reset()
    gc.collect()
    case = case_named(name, "cpu", options.quick, torch.float32, None)
    console.rule(name)
    contenders = line_up(case, peers_of(tuple(options.shares), options.inductor), _tell)
    with console.status("timing") as status:
        time_all(case, contenders, options.repeats, status.update)
    results = [result_of(contender, contenders[:1]) for contender in contenders]
    for result in results:
        if result["time_ratio"] is not None:
            console.print(f"{result['label']}: {result['time_ratio']:.3f} of eager's time, {result['peak_share']:.3f}")
    return [{"model": name} | {fact: result[fact] for fact in FACTS} for result in results]


def _tell(contender: Contender) -> None:
    console.print(f"{contender.label}: {contender.status}, ready in {contender.ready_s} s {contender.reason}")


def main() -> None:
    """Runs the benchmark."""
    parser = option_parser(__doc__, "tiny models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of eager's peak")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each (default 9)")
    parser.add_argument("--no-inductor", dest="inductor", action="store_false", help="leave it out")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    path = options.output / "layouts-cpu.json"
    for name in options.models:
        rows = rows_of(name, options)
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": []}
        of_this = {
            "model": name,
            "circumstances": circumstances(options) | {"code": code_version(), "repeats": options.repeats},
            "rows": rows,
        }
        models = {one["model"]: one for one in (*kept["models"], of_this)}
        ordered = [models[one] for one in MODELS if one in models]
        write_report(options.output, path.name, {"models": ordered})


if __name__ == "__main__":
    main()
