"""A problem from a JSON file in, a schedule out: `python -m rk_solvers problem.json --budget 0.5`.

The schedule goes to the standard output, what it costs to the standard error. The exit status is 0 where a schedule
fits the budget (or the checked one is valid), 1 where none does (or it is not), 2 where the input is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rk_solvers.limits import Limits
from rk_solvers.liveness import peak_and_time
from rk_solvers.milp import BackendUnavailable
from rk_solvers.problem import Chain, Problem, problem_from_json
from rk_solvers.registry import SOLVERS, solver_named
from rk_solvers.replay.checker import CheckedSchedule, check
from rk_solvers.schedule import Schedule, ScheduleError
from rk_solvers.solver import Solution, Status

OK, DOES_NOT_FIT, WRONG_INPUT = 0, 1, 2
BYTES_PER_UNIT = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Raises `SystemExit`, as argparse does, on unknown options."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.write(_list_of_solvers())
        return OK
    if options.problem is None:
        parser.error("give the file of a problem, or --list")
    if options.budget is None and options.check is None:
        parser.error("give --budget, such as 0.5 (of keep-all's peak) or 2GiB, or a schedule to --check")
    try:
        problem, chain = _read_problem(options.problem)
        budget_bytes = None if options.budget is None else parse_budget(options.budget, problem)
        if options.check is not None:
            return _check(problem, options.check, budget_bytes)
        assert budget_bytes is not None  # or else there is a schedule to check, see above
        return _solve(problem, chain, budget_bytes, options)
    except (BackendUnavailable, ImportError, OSError, ValueError) as error:
        _report(f"error: {error}")
        return WRONG_INPUT


def parse_budget(text: str, problem: Problem) -> int:
    """Bytes of a budget: "2GiB", "500 MB", "1048576", or "0.5", a part (at most 1) of keep-all's peak.

    Raises `ValueError` on other text and on budgets that are not positive.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Z]*)", re.sub(r"[\s_]", "", text).upper())
    if match is None or match[2] not in ("", *BYTES_PER_UNIT) or not 0 < float(match[1]) < math.inf:
        raise ValueError(
            f"{text!r} is no budget: give a part of keep-all's peak such as 0.5, a number of bytes above 1, or a "
            "number and one of KiB, MiB, GiB (powers of 1024) or KB, MB, GB (powers of 1000)"
        )
    number = float(match[1])
    if match[2]:
        return math.floor(number * BYTES_PER_UNIT[match[2]])
    if number <= 1:
        return math.floor(number * peak_and_time(problem, problem.no_recompute)[0])
    return math.floor(number) if "." in match[1] else int(match[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rk_solvers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problem", nargs="?", help="file of a problem, with its chain or without; - reads the input")
    parser.add_argument("--budget", help="part of keep-all's peak (0.5), bytes (1073741824), or with a unit (1GiB)")
    parser.add_argument("--solver", choices=sorted(SOLVERS), default="auto", metavar="NAME", help="default: auto")
    parser.add_argument("--time-limit", type=_seconds, default=30.0, metavar="S", help="seconds (default 30)")
    parser.add_argument(
        "--gap", type=float, default=Limits().gap, help="where the default solver ends, a part of the step's time"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default 0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="for the schedule, instead of the standard output")
    parser.add_argument("--check", type=Path, metavar="FILE", help="replay this schedule instead of finding one")
    parser.add_argument("--list", action="store_true", help="list the solvers")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time limit; give a positive number of seconds")
    return value


def _list_of_solvers() -> str:
    empty = Chain((), ())
    lines = {name: (type(solver_named(name, chain=empty)).__doc__ or "").split("\n")[0] for name in sorted(SOLVERS)}
    width = max(map(len, lines))
    return "".join(f"{name:{width}}  {line}\n" for name, line in lines.items())


def _read_problem(name: str) -> tuple[Problem, Chain | None]:
    try:
        return problem_from_json(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check(problem: Problem, path: Path, budget_bytes: int | None) -> int:
    """Replay the schedule of a file."""
    try:
        schedule = Schedule.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        replayed = check(problem, schedule, budget_bytes)
    except ScheduleError as error:
        _report(f"not valid: {error}")
        return DOES_NOT_FIT
    _report(_costs(replayed))
    return OK


@contextlib.contextmanager
def _prints_aside() -> Iterator[None]:
    """What back ends print from their own code goes to the standard error: the output is for the schedule alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _solve(problem: Problem, chain: Chain | None, budget_bytes: int, options: argparse.Namespace) -> int:
    """Find a schedule and write it, once the checker has replayed it."""
    limits = Limits(seed=options.seed, gap=options.gap).within(options.time_limit)
    solver = solver_named(options.solver, limits, chain)
    with _prints_aside():
        solution = solver.solve(problem, budget_bytes)
    if not solution.status.fits:
        smallest = _bytes(solution.smallest_budget_bytes or solution.peak_bytes)
        place = solution.binding_op or "no operation"
        _report(
            f"nothing fits {_bytes(budget_bytes)}; the smallest budget known to {solver.name} is {smallest}, at {place}"
        )
        return DOES_NOT_FIT
    replayed = check(problem, solution.schedule, budget_bytes)
    text = f"{solution.schedule}\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    _report(_costs(replayed))
    _report(f"budget {_bytes(budget_bytes)}; found by {solution.solver}; {_quality(solution)}")
    return OK


def _costs(replayed: CheckedSchedule) -> str:
    return (
        f"time {replayed.time_ms:.6g} ms, {100 * replayed.overhead:.2f} % above keep-all; "
        f"peak {_bytes(replayed.peak_bytes)} at {replayed.peak_at or 'no operation'}"
    )


def _quality(solution: Solution) -> str:
    """What is known of faster schedules."""
    if solution.status is Status.OPTIMAL:
        return "no schedule that fits takes less time"
    if solution.gap is None:
        return "a faster one may exist"
    return f"a faster one, if there is any, takes at most {100 * solution.gap:.2f} % less time"


def _bytes(count: int) -> str:
    """A number of bytes, exactly and, if large, in a unit that people read."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count} bytes ({count / size:.2f} {unit})"
    return f"{count} bytes"


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
