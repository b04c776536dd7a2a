"""Steps of eager training and of ours in processes of their own, each with its contenders in turn.

Where things come to lie in memory makes equal steps differ by some percent from one process to the next: more than what
plans of large budgets cost. Each sitting is a fresh process, and what it measured is one value.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")  # kernels of all contenders, not of the last

import torch

from benchmarks.peers.case import Built, Case
from benchmarks.peers.checkpointing import PEERS
from benchmarks.peers.families import Family
from benchmarks.peers.measuring import Contender, take_step, time_all
from benchmarks.peers.models import DTYPES, case_named
from benchmarks.reporting import ROOT, console
from rockmate import Rockmate, keep_freed_memory

WATCHED = (Family.EAGER, Family.OURS)  # families of which bars speak


def sit(name: str, contenders: Sequence[Contender], options: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Add the medians of `options.sittings` processes to the watched ones among the contenders for this model.

    How many processes there were: none where none of our plans fits, with nothing to compare to eager; where one
    fails, which is told, it and those after it are left out.
    """
    watched = [contender for contender in contenders if contender.runs and contender.family in WATCHED]
    if not any(contender.family is Family.OURS for contender in watched):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for contender in watched:
            assert contender.built is not None
            if isinstance(contender.built.call, Rockmate):
                contender.built.call.save_plan(Path(folder) / f"{contender.label}.json")
        for sitting in range(options.sittings):
            tell(f"sitting {sitting + 1} of {options.sittings}")
            try:
                medians_ms = one_sitting(name, Path(folder), sitting, options)
            except RuntimeError as error:
                console.print(str(error), highlight=False, markup=False)
                return sitting
            for contender in watched:
                contender.sitting_ms.append(medians_ms[contender.label])
    return int(options.sittings)


def one_sitting(name: str, folder: Path, sitting: int, options: argparse.Namespace) -> dict[str, float]:
    """Median times in ms, by label, of eager and of the plans in `folder`, from a fresh process."""
    command = [sys.executable, "-m", "benchmarks.peers.sittings", name, str(folder), "--seed", str(sitting)]
    for option in ("threads", "device", "dtype", "rounds", "batch_factor"):
        if getattr(options, option) is not None:
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    command += ["--quick"] if options.quick else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a sitting of {name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    medians_ms: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return medians_ms


def ready_contenders(case: Case, folder: Path) -> list[Contender]:
    """Eager training, as often as it is among the peers, and our plans in `folder`; each has taken two steps."""
    found = [
        Contender(peer.label, peer.family, built=peer.build(case, 0)) for peer in PEERS if peer.family is Family.EAGER
    ]
    for path in sorted(folder.glob("*.json")):
        weights = case.fresh_model()
        model = Rockmate(weights, case.sample, plan=path, loss=case.loss)
        found.append(Contender(path.stem, Family.OURS, built=Built(weights, model)))
    for contender in found * 2:
        assert contender.built is not None
        take_step(case, contender.built)
    return found


def main() -> None:
    """One sitting: prints the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--batch-factor", type=int)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    case = case_named(options.model, options.device, options.quick, DTYPES[options.dtype], options.batch_factor)
    contenders = ready_contenders(case, options.folder)
    time_all(case, contenders, options.rounds, lambda text: None, options.seed)
    print(json.dumps({contender.label: statistics.median(contender.step_ms) for contender in contenders}))


if __name__ == "__main__":
    main()
