"""Several models, one after the other, and of each all ways to train it by turns: what scripts of that kind share."""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.peers import compiled, ours
from benchmarks.peers.case import Peer
from benchmarks.peers.families import Family
from benchmarks.peers.measuring import Contender, line_up, result_of, time_all
from benchmarks.peers.models import case_named
from benchmarks.peers.registry import peers_for
from benchmarks.reporting import circumstances, code_version, console, write_report
from rockmate import keep_freed_memory

FACTS = (
    "label", "family", "status", "share", "budget_bytes", "peak_bytes", "peak_share", "median_ms", "time_ratio",
    "time_error", "predicted_ratio", "relative_difference", "ready_s", "reason", "note",
)  # fmt: skip


def beside(others: Sequence[Peer], shares: tuple[float, ...], inductor: bool) -> tuple[Peer, ...]:
    """Eager training, which comes first, `others`, our plans at these shares, and inductor if it is to be there."""
    eager = peers_for((), [family for family in Family if family is not Family.EAGER])[0]
    plans = [peer for peer in ours.peers(shares) if peer.family is Family.OURS]
    inductors = [peer for peer in compiled.PEERS if "inductor" in peer.label]
    return tuple(peer for peer in (eager, *others, *plans, *inductors) if inductor or peer.family is not Family.COMPILE)


def measured_models(
    parser: argparse.ArgumentParser,
    models: Sequence[str],
    shares: Sequence[float],
    results: str,
    others: Callable[[tuple[float, ...]], Sequence[Peer]],
) -> None:
    """Measure the models that are asked for, and put them in the place of those of an earlier run in the file.

    It has the name of the `results`, of the machine if that is told apart from others, and of the device.
    """
    parser.add_argument("--device", default="cpu", help="where the models are (default cpu)")
    parser.add_argument("--models", nargs="+", choices=models, default=list(models))
    parser.add_argument("--shares", nargs="+", type=float, default=list(shares), help="of eager's peak")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each (default 9)")
    parser.add_argument("--skip", nargs="+", default=[], help="ways whose names have one of these in them")
    parser.add_argument("--no-inductor", dest="inductor", action="store_false", help="leave it out")
    parser.add_argument("--machine", help="a word for it: results of its own, beside those of other machines")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    kind = torch.device(options.device).type
    file_name = "-".join(filter(None, (results, options.machine, kind))) + ".json"
    path = options.output / file_name
    for name in options.models:
        asked = tuple(options.shares)
        peers = beside(others(asked), asked, options.inductor)
        wanted = tuple(peer for peer in peers if not any(part in peer.label for part in options.skip))
        rows = _rows_of(name, wanted, options)
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": []}
        of_this = {
            "model": name,
            "circumstances": circumstances(options) | {"code": code_version(), "repeats": options.repeats},
            "rows": rows,
        }
        known = {one["model"]: one for one in (*kept["models"], of_this)}
        write_report(options.output, file_name, {"models": [known[one] for one in models if one in known]})


def _rows_of(name: str, peers: tuple[Peer, ...], options: Any) -> list[dict[str, Any]]:
    """What was measured of each way to train this model."""
    torch._dynamo.reset()
    gc.collect()
    case = case_named(name, options.device, options.quick, torch.float32, None)
    console.rule(name)
    contenders = line_up(case, peers, _tell)
    with console.status("timing") as status:
        time_all(case, contenders, options.repeats, status.update)
    results = [result_of(contender, contenders[:1]) for contender in contenders]
    for result in results:
        if result["time_ratio"] is not None:
            console.print(f"{result['label']}: {result['time_ratio']:.3f} of eager's time, {result['peak_share']:.3f}")
    return [{"model": name} | {fact: result[fact] for fact in FACTS} for result in results]


def _tell(contender: Contender) -> None:
    console.print(f"{contender.label}: {contender.status}, ready in {contender.ready_s} s {contender.reason}")
