"""Plant one fault after another in a copy of the project, and see whether `make test` would catch each.

    python tests/planted_faults.py [--only WORD] [--workers 2] [--near]

Each fault is one line of the runtime, the code generator, the checker, liveness or the count of bytes, written wrong as
somebody might write it. The quick tier runs in the copy, the files nearest to the fault first, up to the first failure.
The tests run once without a fault before: tests that fail anyway prove nothing. It ends with status 1 if a fault
is missed, or if a line to be changed is gone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = (".ci", "rkgb", "rockmate", "solvers", "tests", "examples", "benchmarks", "docs", "notebooks")
QUICK = "not ci and not slow"
SECONDS = 900  # for one fault

CODE = ("tests/module/test_generated_code.py", "tests/module/test_exactness.py", "tests/module/test_hand_plans.py")
STEP = (*CODE, "tests/module/test_failures.py", "tests/module/test_leaks.py", "tests/module/test_calls.py")
RULES = ("tests/solver/test_checker.py", "tests/solver/test_oracle.py", "tests/solver/test_random_dags.py")
ALIVE = ("tests/solver/test_schedule.py", "tests/solver/test_search.py", *RULES, "tests/graph/test_timeline.py")
BYTES = ("tests/graph/test_allocation_log.py", "tests/module/test_module.py", "tests/module/test_guarantee.py")
GRAPH = ("tests/graph/test_kgraph.py", "tests/graph/test_chain.py", "tests/graph/test_equivalence.py", *BYTES)


class Fault(NamedTuple):
    """A line written wrong."""

    file: str
    right: str  # stands once in the file
    wrong: str
    near: tuple[str, ...]  # files of tests that run first


FAULTS = (
    # ---- the runtime ----
    Fault("rockmate/runtime/step.py", "generator.set_state(self._random[op])", "generator.get_state()", STEP),
    Fault(
        "rockmate/runtime/step.py",
        "for generator, state in reversed(states):",
        "for generator, state in states[1:]:",
        STEP,
    ),
    Fault(
        "rockmate/runtime/step.py",
        "            handle.value = None\n            handle.step = self",
        "            handle.step = self",
        STEP,
    ),
    Fault("rockmate/runtime/step.py", "handle.version = value._version", "handle.version = 0", STEP),
    Fault(
        "rockmate/runtime/step.py",
        "        if last and self._is_over(self._tables.takers[key]):",
        "        if False:",
        STEP,
    ),
    Fault("rockmate/runtime/step.py", "return not _graph_is_kept() and self._ran", "return self._ran", STEP),
    Fault("rockmate/runtime/step.py", "        self._versions[name] = value._version", "        pass", STEP),
    # ---- the code generator ----
    Fault("rockmate/runtime/codegen.py", "last[fill.name] = max(last[fill.name], fill.position)", "pass", CODE),
    Fault(
        "rockmate/runtime/codegen.py",
        'return f".as_strided({saved.size}, {saved.stride}, {saved.offset})"',
        'return f".as_strided({saved.size}, {saved.stride}, 0)"',
        CODE,
    ),
    Fault("rockmate/runtime/codegen.py", "            self._delete(names)", "            pass", CODE),
    Fault("rockmate/runtime/codegen.py", "repeated=True, tracked=tracked", "repeated=False, tracked=tracked", CODE),
    Fault(
        "rockmate/runtime/lowering.py",
        "return self.segment_of_stage[made[-1]] if made",
        "return self.segment_of_stage[made[0]] if made",
        CODE,
    ),
    # ---- the checker ----
    Fault(
        "solvers/rk_solvers/replay/checker.py",
        "    _require_alive(replay, line, op, expected.needs)",
        "    pass",
        RULES,
    ),
    Fault(
        "solvers/rk_solvers/replay/checker.py",
        "own_bytes += problem.backward[replay.done].resident_bytes",
        "own_bytes += 0",
        RULES,
    ),
    Fault("solvers/rk_solvers/replay/checker.py", "        if not forward.recomputable:", "        if False:", RULES),
    Fault(
        "solvers/rk_solvers/replay/checker.py",
        "forward.recompute_ms if again else",
        "forward.time_ms if again else",
        RULES,
    ),
    # ---- liveness ----
    Fault(
        "solvers/rk_solvers/liveness.py",
        "change[position + 1] -= problem.forward[index].replay_bytes",
        "change[position] -= problem.forward[index].replay_bytes",
        ALIVE,
    ),
    Fault(
        "solvers/rk_solvers/liveness.py",
        "end = len(steps) - 1 if item in problem.held else last[item]",
        "end = last[item]",
        ALIVE,
    ),
    Fault(
        "solvers/rk_solvers/liveness.py",
        "own[position] += problem.backward[step.stage].resident_bytes",
        "own[position] += 0",
        ALIVE,
    ),
    Fault(
        "solvers/rk_solvers/liveness.py",
        "left = uses[place - 1] if place and uses[place - 1] > start else start",
        "left = start",
        ALIVE,
    ),
    # ---- bytes ----
    Fault("rkgb/devices/allocation_log.py", "highest = max(highest, alive)", "highest = alive", BYTES),
    Fault(
        "rkgb/passes/s_to_k.py", "parameters += 0 if name in seen else size_bytes", "parameters += size_bytes", GRAPH
    ),
    Fault("rkgb/passes/s_to_k.py", "peak_bytes=stage.peak_bytes + outside_bytes", "peak_bytes=stage.peak_bytes", GRAPH),
    Fault(
        "rkgb/passes/s_to_k.py",
        "comp.workspace_bytes = max(0, highest - own)",
        "comp.workspace_bytes = max(0, highest - own) // 2",
        GRAPH,
    ),
    Fault(
        "rockmate/planning/costs.py",
        "BackwardOp(LOSS, loss.time_ms, tuple(sorted(held)), 0, loss.peak_bytes)",
        "BackwardOp(LOSS, loss.time_ms, tuple(sorted(held)), 0, 0)",
        BYTES,
    ),
    Fault("rkgb/devices/cpu.py", "return torch.default_generator.get_state().nbytes", "return 0", BYTES),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults in whose file or line this word stands")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--near", action="store_true", help="run the nearest files alone: quick, and proves no miss")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if given.only in fault.file or given.only in fault.right]
    gone = [fault for fault in FAULTS if (ROOT / fault.file).read_text(encoding="utf-8").count(fault.right) != 1]
    for fault in gone:
        print(f"{fault.file} has not, or more than once: {fault.right}", file=sys.stderr)
    if gone:
        return 1
    if not given.near and (by := planted(None, given.workers, near_alone=False)) is not None:
        print(f"without any fault: {by}", file=sys.stderr)
        return 1
    caught = 0
    for fault in chosen:
        started = time.perf_counter()
        by = planted(fault, given.workers, given.near)
        caught += by is not None
        print(f"{'missed' if by is None else 'caught'} in {time.perf_counter() - started:4.0f} s  {fault.file}")
        print(f"    {fault.right.strip()!r} -> {fault.wrong.strip()!r}")
        if by is not None:
            print(f"    {by}")
        sys.stdout.flush()
    print(f"{caught} of {len(chosen)} faults caught")
    return 0 if caught == len(chosen) else 1


def planted(fault: Fault | None, workers: int, near_alone: bool) -> str | None:
    """The first test that fails with the fault, or without any; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, copy / path.name)
        if fault is not None:
            changed = copy / fault.file
            changed.write_text(changed.read_text(encoding="utf-8").replace(fault.right, fault.wrong), encoding="utf-8")
            by = first_failure(copy, list(fault.near), 0)
            if by is not None or near_alone:
                return by
        return first_failure(copy, ["tests"], workers)


def first_failure(copy: Path, paths: list[str], workers: int) -> str | None:
    """The line of pytest on the first test that fails in `paths`, or what else went wrong; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", "-m", QUICK, "--tb=no"]
    command += ["-n", str(workers), "--dist", "loadfile", *paths]
    path = os.pathsep.join([str(copy), str(copy / "solvers")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if done.returncode == 0:
        return None
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return told[0] if told else f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"


if __name__ == "__main__":
    sys.exit(main())
