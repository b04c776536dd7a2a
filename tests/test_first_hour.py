"""All that a GPU is to show: steps in order, each within its limit, and none run twice."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import first_hour
from benchmarks.first_hour import Step, steps_for

ROOT = Path(__file__).parents[1]
ADDS_A_LINE = "import sys; open(sys.argv[1], 'a').write('ran\\n')"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script with these steps; returns what it has exited with, and the state."""
    monkeypatch.setattr(first_hour, "code_version", lambda: "abc")

    def now(steps, *arguments):
        monkeypatch.setattr(first_hour, "steps_for", lambda kind, out: iter(steps))
        monkeypatch.setattr(sys, "argv", ["first_hour.py", "--device", "cpu", "--output", str(tmp_path), *arguments])
        try:
            first_hour.main()
        except SystemExit as error:
            return error.code, json.loads((tmp_path / first_hour.STATE).read_text())
        return 0, json.loads((tmp_path / first_hour.STATE).read_text())

    return now


def adding(name, path):
    return Step(name, ("-c", ADDS_A_LINE, str(path)))


@pytest.mark.parametrize("kind", ["cuda", "cpu", "testacc"])
def test_steps_have_names_of_their_own_and_take_minutes(kind, tmp_path):
    steps = list(steps_for(kind, tmp_path))
    assert len({step.name for step in steps}) == len(steps)
    assert all(step.limit_s <= 480 for step in steps)
    assert steps[0].name == "tests"
    for step in steps:
        if step.command[0] != "-m":
            assert (ROOT / step.command[0]).exists()
            assert {"--device", kind, "--output", str(tmp_path / "results")} <= set(step.command)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_scripts_take_the_options_that_they_are_given(kind, tmp_path):
    """`--help` reads all that stands before it."""
    told = {}
    for step in steps_for(kind, tmp_path):
        script, *options = step.command
        if script != "-m":
            told.setdefault((script, *(word for word in options if word.startswith("--"))), step.command)
    for command in told.values():
        surroundings = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'solvers'}"}
        ran = subprocess.run(
            [sys.executable, *command, "--help"],
            cwd=ROOT,
            env=surroundings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_what_has_passed_is_not_run_again(run, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    failing = Step("fails", ("-c", "print('so it is'); raise SystemExit(3)"))
    code, state = run([adding("one", one), failing])
    assert code == 1
    assert [(done["name"], done["status"]) for done in state["steps"]] == [("one", "passed"), ("fails", "failed")]
    assert "so it is" in (tmp_path / "logs" / "fails.txt").read_text()
    code, state = run([adding("one", one), adding("fails", other)])
    assert code == 0
    assert one.read_text() == "ran\n"
    assert [done["status"] for done in state["steps"]] == ["passed", "passed"]
    run([adding("one", one)], "--again")
    assert one.read_text() == "ran\nran\n"
    with tarfile.open(tmp_path / first_hour.ARCHIVE) as archive:
        assert {first_hour.STATE, first_hour.TABLES, "logs", "logs/one.txt"} <= set(archive.getnames())


@pytest.mark.slow
def test_another_version_of_the_code_runs_all_again(run, tmp_path, monkeypatch):
    run([adding("one", tmp_path / "one")])
    monkeypatch.setattr(first_hour, "code_version", lambda: "def")
    run([adding("one", tmp_path / "one")])
    assert (tmp_path / "one").read_text() == "ran\nran\n"


@pytest.mark.slow
def test_a_step_ends_at_its_limit_with_all_that_it_has_started(run, tmp_path):
    child = "import time, sys; time.sleep(3); open(sys.argv[1], 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]])"
    code, state = run([Step("long", ("-c", parent, str(tmp_path / "late")), limit_s=1.0)])
    assert code == 1
    assert state["steps"][0]["status"] == "out of time"
    subprocess.run(["sleep", "3"], check=True)
    assert not (tmp_path / "late").exists()


def test_no_step_is_begun_without_time_left(run, tmp_path):
    run([adding("zero", tmp_path / "zero")])
    run([adding("one", tmp_path / "one")], "--minutes", "0.5")
    assert not (tmp_path / "one").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "testacc"])
def test_all_of_it_runs_without_a_gpu(kind, tmp_path):
    surroundings = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'solvers'}"}
    command = [sys.executable, "benchmarks/first_hour.py", "--device", kind, "--output", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tables = (tmp_path / first_hour.TABLES).read_text()
    for words in (f"## bytes-{kind}", f"## reserved-{kind}", "## Beside other ways to train"):
        assert words in tables
