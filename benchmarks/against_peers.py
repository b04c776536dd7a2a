"""Rockmate and every other way to train with less memory, side by side in one process.

    python benchmarks/against_peers.py --models gpt2 resnet50 --repeats 7   # writes into benchmarks/results/
    python benchmarks/against_peers.py --quick --models gpt2 --skip-families compile --output folder

Contenders take turns, each round in another order; ratios are those of medians. README.md says more.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from typing import Any

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")  # kernels of all contenders, not of the last

import torch
from rich.table import Table

from benchmarks.peers.bars import bars_of
from benchmarks.peers.case import peak_of_eager
from benchmarks.peers.families import Family
from benchmarks.peers.measuring import LIMIT_S, TOLERANCES, Contender, line_up, result_of, time_all
from benchmarks.peers.models import DTYPES, RECIPES, case_named
from benchmarks.peers.page import NUMBERS, file_name, numbers, steps_told
from benchmarks.peers.registry import peers_for
from benchmarks.peers.sittings import sit
from benchmarks.reporting import (
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    print_verdict,
    write_report,
)
from rkgb.devices.registry import device_of
from rockmate import keep_freed_memory
from rockmate.units import format_bytes


def tell(contender: Contender) -> None:
    """Print what is known of a contender before it is timed."""
    peak = "" if contender.peak_bytes is None else f", peak {format_bytes(contender.peak_bytes)}"
    ready = "" if contender.ready_s is None else f", ready in {contender.ready_s:.1f} s"
    reason = f": {contender.reason}" if contender.reason else ""
    if contender.smallest_budget_bytes is not None and contender.proven_bytes is not None:
        reason += f", {format_bytes(contender.smallest_budget_bytes)} do, {format_bytes(contender.proven_bytes)} proven"
    console.print(f"{contender.label}: {contender.status}{peak}{ready}{reason}", highlight=False, markup=False)


def table_of(results: list[dict[str, Any]], title: str) -> Table:
    """One line per contender."""
    table = new_table(title)
    for heading in ("", "", *(name.replace(" ", "\n", 1) for name in NUMBERS)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(result["label"], result["status"], *numbers(result))
    return table


def run(name: str, options: argparse.Namespace) -> None:
    """Measures one model, prints its table and bars, writes its result file."""
    started = time.perf_counter()
    torch._dynamo.reset()
    gc.collect()
    factor = factor_for(name, options)
    case = case_named(name, options.device, options.quick, DTYPES[options.dtype], factor)
    skipped = [family for family in Family if family.key in options.skip_families]
    peers = peers_for(options.shares or case.shares, skipped)
    if options.only:
        peers = (peers[0], *(peer for peer in peers[1:] if any(part in peer.label for part in options.only)))
    console.rule(f"{name} on {options.device}")
    contenders = line_up(case, peers, tell, options.limit)
    with console.status("timing") as status:
        time_all(case, contenders, options.repeats, status.update)
        sittings = sit(name, contenders, options, status.update)
    eagers = [contender for contender in contenders if contender.family is Family.EAGER]
    results = [result_of(contender, eagers) for contender in contenders]
    bars = bars_of(name, results, on_gpu=case.device.type == "cuda")
    console.print(table_of(results, f"{name}, {steps_told(vars(options) | {'sittings': sittings})}"))
    for bar in bars:
        reached = bar["reason"] if bar["reached"] is None else bar["reached"]
        print_verdict(bar["met"], f"{bar['label']}: {reached} ≤ {bar['limit']}")
    minutes = round((time.perf_counter() - started) / 60, 1)
    report = {
        "model": name,
        "circumstances": circumstances_of(options) | {"sittings": sittings, "minutes": minutes, "batch_factor": factor},
        "contenders": results,
        "bars": bars,
    }
    write_report(options.output, f"{file_name(report)}.json", report)


def factor_for(name: str, options: argparse.Namespace) -> int | None:
    """How many times larger batches are; None for those that the device has by default.

    Eager steps of two sizes tell what a larger one takes, of which a part is to be filled.
    """
    if options.fill is None or options.quick:
        return options.batch_factor
    peaks = []
    for factor in (1, 2):
        peaks.append(peak_of_eager(case_named(name, options.device, options.quick, DTYPES[options.dtype], factor)))
    available_bytes = device_of(torch.device(options.device)).available_bytes()
    rest_bytes = options.fill * available_bytes - peaks[0]
    factor = 1 + max(0, int(rest_bytes / max(1, peaks[1] - peaks[0])))
    console.print(f"batches {factor} times larger fill {options.fill:.0%} of {format_bytes(available_bytes)}")
    return factor


def circumstances_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on besides the code, and the version of the code."""
    on_cuda = options.device.startswith("cuda")
    return circumstances(options) | {
        "code": code_version(),
        "gpu": torch.cuda.get_device_name(options.device) if on_cuda else None,
        "device": options.device,
        "dtype": options.dtype,
        "batch_factor": options.batch_factor,
        "tag": options.tag,
        "repeats": options.repeats,
        "rounds": options.rounds,
        "keeps_freed_memory": options.keeps_freed_memory,
        "limit_s": options.limit,
        "skipped": options.skip_families,
        "tolerance": TOLERANCES[DTYPES[options.dtype]],
    }


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "tiny models, whose times mean nothing")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each contender (default 7)")
    parser.add_argument("--sittings", type=int, default=5, help="further processes for eager and ours (default 5)")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each in a sitting (default 20)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tag", help="of the machine, for names of files and titles, where results of others are kept")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and inputs")
    parser.add_argument("--batch-factor", type=int, help="so many times larger batches (default 1, on CUDA 8)")
    keys = [family.key for family in Family]
    parser.add_argument("--fill", type=float, help="batches whose eager step takes this share of the free memory")
    parser.add_argument("--skip-families", nargs="+", choices=keys, default=[], metavar="FAMILY", help=", ".join(keys))
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only those whose labels have this in them")
    parser.add_argument("--shares", nargs="+", type=float, help="of the eager peak, for which we plan")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds to get ready in (default %(default)s)")
    options = parser.parse_args()
    if Family.EAGER.key in options.skip_families:
        parser.error("eager training is what all others are compared with: it cannot be skipped")
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse_options()
    options.keeps_freed_memory = keep_freed_memory()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    for name in options.models:
        run(name, options)


if __name__ == "__main__":
    main()
