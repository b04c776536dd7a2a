"""`python -m rk_solvers`: a problem from a file in, a schedule out; and the format of the file."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rk_solvers import SOLVERS, Problem, Schedule, check, peak_and_time
from rk_solvers.__main__ import main, parse_budget
from rk_solvers.liveness import recompute_of
from rk_solvers.problem import problem_from_json, problem_to_json
from tests.solver.instances import chain_of, gpt2, random_step

ROOT = Path(__file__).resolve().parent.parent.parent


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def step(tmp_path):
    """A file of a small step with its chain, and the problem in it."""
    problem, chain = random_step(5)
    assert problem.held
    return write(tmp_path / "step.json", problem_to_json(problem, chain)), problem


# ---- the file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_problems_round_trip_with_their_chain_and_without(seed):
    problem, chain = random_step(seed)
    assert problem_from_json(problem_to_json(problem, chain)) == (problem, chain)
    assert problem_from_json(problem_to_json(problem)) == (problem, None)
    assert Problem.from_json(problem_to_json(problem, chain)) == problem


def test_fields_with_a_default_may_be_left_out():
    text = """{"version": 1, "data": [{"name": "y", "size_bytes": 4, "producer": 0}],
        "forward": [{"name": "f", "time_ms": 1, "inputs": [], "outputs": [0]}],
        "backward": [{"name": "b", "time_ms": 2.5, "needs": [0], "resident_bytes": 4, "peak_bytes": 8}]}"""
    problem, chain = problem_from_json(text)
    assert chain is None
    assert peak_and_time(problem, problem.no_recompute) == (12, 3.5)
    outer = f'{{"problem": {text}, "blocks": [[0, 1]], "backward_block": [0]}}'
    assert problem_from_json(outer)[0] == problem
    assert problem_from_json(outer)[1] is not None


def test_a_chain_of_another_problem_is_not_written():
    with pytest.raises(ValueError, match="cover"):
        problem_to_json(chain_of(3), gpt2(layers=1)[1])


BAD = {
    "not JSON": (lambda file: "{", "not JSON"),
    "too deep": (lambda file: "[" * 200_000, "not JSON"),
    "a list": (lambda file: [1, 2], "the file: Expected `object`, got `array`"),
    "no version": (lambda file: file["problem"].pop("version"), "problem has version None; this code reads"),
    "another version": (lambda file: file.update(version=7), "the file has version 7"),
    "another version inside": (lambda file: file["problem"].update(version="1"), "problem has version '1'"),
    "no problem": (lambda file: file.update(problem=3), "problem: Expected `object`, got `int`"),
    "no forward": (lambda file: file["problem"].pop("forward"), "problem: .* missing required field `forward`"),
    "no list": (lambda file: file["problem"].update(data={}), r"Expected `array`, got `object` - at `\$\.data`"),
    "no time": (
        lambda file: file["problem"]["forward"][2].pop("time_ms"),
        r"field `time_ms` - at .*\[2\]",
    ),
    "misspelt": (lambda file: file["problem"]["backward"][1].update(size=1), r"backward\[1\] .* unknown field 'size'"),
    "beside the problem": (lambda file: file.update(block=[]), "unknown field 'block'"),
    "text for a number": (
        lambda file: file["problem"]["data"][0].update(size_bytes="4"),
        r"Expected `int`, got `str` - at `\$\.data\[0\]\.size_bytes`",
    ),
    "part of a byte": (
        lambda file: file["problem"]["data"][0].update(size_bytes=4.5),
        r"Expected `int`, got `float` - at `\$\.data\[0\]\.size_bytes`",
    ),
    "too large": (
        lambda file: file["problem"]["data"][0].update(size_bytes=2**60),
        r"size_bytes is .* at most 9007",
    ),
    "no time at all": (lambda file: file["problem"]["forward"][0].update(time_ms=float("nan")), "not JSON"),
    "true for a number": (
        lambda file: file["problem"].update(base_bytes=True),
        "got `bool` - at .*base_bytes",
    ),
    "number for a string": (
        lambda file: file["problem"]["data"][0].update(name=3),
        r"Expected `str`, got `int` - at `\$\.data\[0\]\.name`",
    ),
    "an operation": (
        lambda file: file["problem"]["forward"].append(7),
        r"got `int` - at .*forward\[\d+\]",
    ),
    "an index": (
        lambda file: file["problem"]["forward"][0].update(inputs=[None]),
        r"at .*forward\[0\]\.inputs\[0\]",
    ),
    "no such data": (lambda file: file["problem"].update(held=[10**6]), "there is no data 1000000"),
    "half a chain": (lambda file: file.pop("backward_block"), "the chain: .* missing required field `backward_block`"),
    "no pair": (lambda file: file["blocks"].append([1]), r"array.* length 2.* at `\$\.blocks\[\d+\]`"),
    "a stage without block": (lambda file: file["backward_block"].pop(), r"backward_block has \d+ entries for"),
    "a gap between blocks": (lambda file: file["blocks"].pop(0), r"block 0 is .*; it must start at 0"),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_its_field(change, step, tmp_path, capsys):
    spoil, message = change
    file = json.loads(Path(step[0]).read_text(encoding="utf-8"))
    spoiled = spoil(file)
    whole = spoiled if isinstance(spoiled, str) else json.dumps(spoiled if spoiled == [1, 2] else file)
    with pytest.raises(ValueError, match=message):
        problem_from_json(whole)
    bad = write(tmp_path / "bad.json", whole)
    assert main([bad, "--budget", "0.5"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(f"error: .*bad.json: .*{message}", printed.err)
    assert "Traceback" not in printed.err


# ---- the command -------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["auto", "greedy", "knapsack", "rotor"])
def test_the_schedule_is_one_of_the_problem(solver, step, capsys):
    path, problem = step
    budget_bytes = parse_budget("0.8", problem)
    assert main([path, "--budget", "0.8", "--solver", solver, "--time-limit", "5"]) == 0
    printed = capsys.readouterr()
    replayed = check(problem, Schedule.parse(printed.out), budget_bytes)
    assert f"time {replayed.time_ms:.6g} ms" in printed.err
    assert f"peak {replayed.peak_bytes} bytes" in printed.err
    assert f"budget {budget_bytes} bytes" in printed.err


def test_a_written_schedule_can_be_checked(step, tmp_path, capsys):
    path, problem = step
    output = tmp_path / "schedule.txt"
    assert main([path, "--budget", "0.8", "--solver", "greedy", "--output", str(output)]) == 0
    summary = capsys.readouterr().err.split("\n")[0]
    assert main([path, "--check", str(output)]) == 0
    again = capsys.readouterr()
    assert again.out == ""
    assert summary.startswith(again.err.strip())
    assert main([path, "--check", str(output), "--budget", "10"]) == 1
    assert "the budget is 10" in capsys.readouterr().err
    lines = output.read_text(encoding="utf-8").splitlines()
    write(output, "\n".join(lines[1:]))
    assert main([path, "--check", str(output)]) == 1
    assert "not valid: line 1: " in capsys.readouterr().err
    write(output, "\n".join(["go f0", *lines[1:]]))
    assert main([path, "--check", str(output)]) == 2
    assert "schedule.txt: line 1: unknown operation 'go'" in capsys.readouterr().err
    assert peak_and_time(problem, problem.no_recompute)[0] > 10


def test_too_small_a_budget_names_one_that_works(step, capsys):
    path, _ = step
    assert main([path, "--budget", "1 KB", "--solver", "greedy", "--time-limit", "5"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    found = re.search(r"smallest budget known to greedy is (\d+) bytes.*, at (compute|backward) \w+", printed.err)
    assert found is not None
    assert main([path, "--budget", found[1], "--solver", "greedy", "--time-limit", "5"]) == 0


def test_the_same_seed_gives_the_same_schedule(step, capsys):
    printed = set()
    for _ in range(2):
        assert main([step[0], "--budget", "0.7", "--solver", "greedy", "--seed", "3"]) == 0
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1


def test_solvers_are_listed(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(SOLVERS)
    assert all(len(line.split()) > 2 for line in lines)


def test_budgets_are_parts_bytes_or_sizes():
    problem = chain_of(4)
    most = peak_and_time(problem, problem.no_recompute)[0]
    budgets = {
        "1": most,
        "1.0": most,
        "0.5": most // 2,
        ".25": most // 4,
        "2": 2,
        "2.5": 2,
        "1_000": 1000,
        "1GiB": 1 << 30,
    }
    budgets |= {
        "1.5 MiB": 3 << 19,
        "2 kib": 2048,
        "1 KB": 1000,
        "0.5 B": 0,
        "1073741824": 1 << 30,
        "7" * 40: int("7" * 40),
    }
    assert {text: parse_budget(text, problem) for text in budgets} == budgets
    for text in ("", "0", "0.0", "-1", "half", "1 parsec", "nan", "inf", "1e400", "9" * 400, "0 GiB", "1..2"):
        with pytest.raises(ValueError, match="is no budget"):
            parse_budget(text, problem)


def test_a_problem_may_come_from_the_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(chain_of(3).to_json()))
    assert main(["-", "--budget", "1", "--solver", "keep-all"]) == 0
    assert len(recompute_of(chain_of(3), Schedule.parse(capsys.readouterr().out))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.json", "--budget", "0.5"], "missing.json"),
        (["plain.json", "--budget", "much"], "'much' is no budget"),
        (["plain.json", "--budget", "0.5", "--solver", "rotor"], "along a chain of blocks"),
        (["plain.json", "--check", "missing.txt"], "missing.txt"),
        (["plain.json", "--budget", "0.5", "--output", "missing/schedule.txt"], "missing"),
    ],
)
def test_wrong_input_is_told_in_a_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "plain.json", chain_of(6).to_json())
    assert main(options) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [[], ["plain.json"], ["plain.json", "--budget", "1", "--solver", "magic"],
     ["plain.json", "--budget", "1", "--time-limit", "-3"], ["plain.json", "--budget", "1", "--time-limit", "nan"]],
)  # fmt: skip
def test_unknown_options_are_told_by_the_parser(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_it_runs_alone_and_without_torch(tmp_path):
    """As a program of its own: what it prints, its exit status, and that torch is never imported."""
    path = write(tmp_path / "chain.json", chain_of(5).to_json())
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('rk_solvers', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, path, "--budget", "16", "--time-limit", "5"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "solvers")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert check(chain_of(5), Schedule.parse(done.stdout), 16).peak_bytes <= 16
    assert "above keep-all" in done.stderr


# ---- the README --------------------------------------------------------------------------------------


def test_the_example_of_the_readme_runs_and_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "solvers" / "README.md").read_text(encoding="utf-8").split("## From the command line")[1]
    blocks = dict(re.findall(r"```(json|console|text)\n(.*?)```", section, re.DOTALL))
    write(tmp_path / "step.json", blocks["json"])
    shown = ""
    for line in blocks["console"].splitlines():
        program = "$ python -m rk_solvers "
        assert line.startswith(program)
        assert main(line.removeprefix(program).split()) == 0
        printed = capsys.readouterr()
        shown += printed.out + printed.err
    assert shown == blocks["text"]
