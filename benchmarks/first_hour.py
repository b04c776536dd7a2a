"""All that a machine with a GPU is to show, in order of value: each step in a process of its own, within its limit.

    make gpu OUT=folder                    # on a machine with PyTorch, and no network
    make gpu OUT=folder DEVICE=cpu         # tiny models: shows that it runs; so does DEVICE=testacc
    make gpu-wheels                        # before, where there is a network: what that machine lacks, into .whl

A step that has ended well for this version of the code is not run again: call it as often as the machine is there. All
that was found is in first-hour.tar.gz: results for benchmarks/results, logs, and tables.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import ROOT, circumstances, code_version, console, option_parser, print_verdict

LIMIT_S = 480.0  # for one step
LEAST_S = 60.0  # with less time left no step is begun
STATE, ARCHIVE, RESULTS, TABLES = "first-hour.json", "first-hour.tar.gz", "results", "tables.md"
# Ways to train that need libraries, or minutes to get ready: those that are left are torch.utils.checkpoint's and ours.
SLOW_PEERS = ("compile", "auto-sac", "hugging-face", "offload", "rockmates-other-solvers", "selective")
QUICKEST = ("--limit", "20", "--skip-families", *SLOW_PEERS)
AT_FOUR = ("--shares", "0.7", "0.5", "0.4", "0.3", "--limit", "25", "--skip-families", *SLOW_PEERS)
FILLING = ("gpt2", "hf-llama", "resnet50", "unet")  # in batches that fill the device
AS_PUBLISHED = ("resnet50", "googlenet", "unet", "mobilenet-v2", "vgg16")  # in the batches of MONeT's table
BYTES = ("gpt2-tiny", "resnet18-tiny", "unet-tiny", "gpt2-demo", "resnet50-demo", "unet-demo")


@dataclass(frozen=True)
class Step:
    """A command, which writes its results into a folder."""

    name: str
    command: tuple[str, ...]  # after Python
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Done:
    """What became of a step."""

    name: str
    code: str  # version of it
    device: str
    command: tuple[str, ...]
    seconds: float
    status: str  # "passed", "failed" or "out of time"

    def stands_for(self, step: Step, code: str, device: str) -> bool:
        """Whether the step need not be run again."""
        return (self.name, self.code, self.device, self.status) == (step.name, code, device, "passed")


def steps_for(kind: str, out: Path) -> Iterator[Step]:
    """In order of value. Other devices than GPUs show with tiny models that all of it runs."""
    on = ("--device", kind, "--output", str(out / RESULTS))
    yield Step("tests", ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *tests_of(kind)))
    if kind == "cuda":
        yield from _in_order(on)
        return
    yield Step("bytes", ("benchmarks/bytes.py", *on, "--quick", "--models", "gpt2-tiny", "resnet18-tiny"))
    yield from _peers(("gpt2", "resnet50"), "", (*on, "--quick", "--repeats", "1", "--sittings", "0", *QUICKEST))
    yield Step("reserved", ("benchmarks/reserved.py", *on, "--quick"))
    yield Step("offload", ("benchmarks/offload.py", *on, "--quick", "--shares", "0.5"))
    yield Step("implementations", ("benchmarks/implementations.py", *on, "--quick", "--models", "hf-bert"))
    if kind == "cpu":  # inductor compiles for it
        few = ("--quick", "--models", "hf-llama", "--shares", "0.7", "--repeats", "2", "--no-inductor")
        yield Step("compiled parts", ("benchmarks/compiled_parts.py", *on, *few))


def _in_order(on: tuple[str, ...]) -> Iterator[Step]:
    yield Step("bytes", ("benchmarks/bytes.py", *on, "--models", *BYTES))
    usual = (*on, "--sittings", "0", "--threads", "8")
    filling = (*usual, "--fill", "0.7", "--tag", "filling", *AT_FOUR)
    yield from _peers(FILLING, ", filling, bfloat16", (*filling, "--dtype", "bfloat16"))
    yield Step("reserved", ("benchmarks/reserved.py", *on))
    yield from _peers(AS_PUBLISHED, ", as published", (*usual, "--tag", "published", *AT_FOUR))
    yield from _peers(FILLING, ", filling, float32", filling)
    yield Step(
        "offload", ("benchmarks/offload.py", *on, "--models", "gpt2-demo", "llama-demo", "--shares", "0.5", "0.3")
    )
    for model in ("hf-llama", "resnet50"):
        parts = ("--models", model, "--shares", "0.7", "0.4", "--no-inductor")
        yield Step(f"compiled parts, {model}", ("benchmarks/compiled_parts.py", *on, *parts))
    yield Step("implementations", ("benchmarks/implementations.py", *on, "--models", "hf-llama", "vit", "resnet50"))
    yield Step("lengths", ("benchmarks/lengths.py", *on, "--models", "hf-gpt2"))
    others = ("--skip-families", "auto-sac", "hugging-face", "offload", "rockmates-other-solvers")
    yield from _peers(FILLING[:2], ", all peers", (*usual, "--tag", "all", "--limit", "60", *others))


def _peers(models: Sequence[str], words: str, options: tuple[str, ...]) -> Iterator[Step]:
    for name in models:
        yield Step(f"{name}{words}", ("benchmarks/against_peers.py", "--models", name, *options))


def tests_of(kind: str) -> tuple[str, ...]:
    """What pytest is to run."""
    if kind == "cuda":
        return ("-m", "cuda and not slow", "tests")
    if kind == "cpu":
        return ("tests/module/test_exactness.py", "-m", "not ci and not slow")
    return ("-k", "its_bytes_are_predicted", "tests/accelerator/test_planned.py", "-m", "not slow")


# ---- running -------------------------------------------------------------------------------------------------


def command_of(step: Step, kind: str) -> list[str]:
    """With what it takes for the device to be there."""
    with_device = ("-m", "tests.accelerator.run") if kind == "testacc" and step.command[0] != "-m" else ()
    return [sys.executable, *with_device, *step.command]


def run(step: Step, kind: str, out: Path, limit_s: float) -> tuple[str, float]:
    """Its status and seconds. What it prints goes into a file beside its results."""
    started = time.perf_counter()
    required = {"cuda": "cuda", "testacc": "accelerator"}.get(kind, "")
    surroundings = os.environ | {"ROCKMATE_REQUIRE": required, "PYTHONUNBUFFERED": "1"}
    log = out / "logs" / f"{step.name.replace(', ', '-').replace(' ', '-')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command_of(step, kind),
            cwd=ROOT,
            env=surroundings,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            end(process)
    return status, time.perf_counter() - started


def end(process: subprocess.Popen[bytes]) -> None:
    """End it, and all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def known(out: Path) -> list[Done]:
    """What earlier runs have left in the folder."""
    path = out / STATE
    if not path.exists():
        return []
    return [Done(**{**one, "command": tuple(one["command"])}) for one in json.loads(path.read_text())["steps"]]


def write(out: Path, done: Sequence[Done], where: dict[str, Any]) -> None:
    """The state, the tables, and all that is there as one file."""
    content = {"circumstances": where, "steps": [asdict(one) for one in done]}
    (out / STATE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw = [sys.executable, "docs/make_tables.py", "--results", str(out / RESULTS), "--page", str(out / TABLES)]
    subprocess.run(draw, cwd=ROOT, check=False)
    with tarfile.open(out / ARCHIVE, "w:gz") as archive:
        for name in (STATE, TABLES, RESULTS, "logs"):
            if (out / name).exists():
                archive.add(out / name, name)


def name_of_device(kind: str) -> str:
    """The product's, where it has one."""
    return torch.cuda.get_device_name() if kind == "cuda" else kind


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, "unused: other devices than GPUs have tiny models anyway")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "testacc"))
    parser.add_argument("--minutes", type=float, help="in all: no step is begun without a minute of them left")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="only the steps whose names have one of these in them"
    )
    parser.add_argument("--again", action="store_true", help="steps that have passed, too")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: PyTorch finds none. DEVICE=cpu shows that all of it runs.")
    return options


def main() -> None:
    """Run the steps that are left."""
    options = parse_options()
    started, out, code = time.monotonic(), options.output.resolve(), code_version()
    out.mkdir(parents=True, exist_ok=True)
    device = name_of_device(options.device)
    where = circumstances(options) | {"code": code, "device": device, "free_disk_bytes": shutil.disk_usage(out).free}
    done = [] if options.again else known(out)
    for step in steps_for(options.device, out):
        if options.only and not any(part in step.name for part in options.only):
            continue
        if any(one.stands_for(step, code, device) for one in done):
            console.print(f"{step.name}: was done", highlight=False)
            continue
        left_s = float("inf") if options.minutes is None else 60 * options.minutes - (time.monotonic() - started)
        if left_s < LEAST_S:
            console.print(f"{step.name}: no time left", highlight=False)
            continue
        console.print(f"{step.name} …", highlight=False)
        status, seconds = run(step, options.device, out, min(step.limit_s, left_s))
        done = [one for one in done if one.name != step.name]
        done.append(Done(step.name, code, device, step.command, round(seconds, 1), status))
        print_verdict(status == "passed", f"{step.name}: {status} in {seconds:.0f} s")
        write(out, done, where)  # after each: the machine may be gone at any time
    console.print(f"{out / ARCHIVE} holds all that was found", highlight=False)
    if any(one.status != "passed" for one in done):
        sys.exit(1)


if __name__ == "__main__":
    main()
