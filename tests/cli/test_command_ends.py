"""How commands end, what they load, and what they say on the way."""

import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch

from rockmate import plan_files
from rockmate.cli.app import _plain_warnings
from rockmate.cli.output import GOOD, INTERRUPTED
from tests.cli.command_line import MODEL, run
from tests.scripts import ROOT, run_script


def test_an_interrupted_command_ends_with_status_130(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_files, "load", interrupt)
    status, out, err = run(capsys, "explain", MODEL)
    assert (status, out, err.strip()) == (INTERRUPTED, "", "interrupted")


def started(*arguments):
    """A command in a process of its own."""
    search_path = os.pathsep.join([str(ROOT), str(ROOT / "solvers")])
    return subprocess.Popen(
        [sys.executable, "-m", "rockmate", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": search_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ci
def test_ctrl_c_ends_a_process_with_status_130(tmp_path):
    (tmp_path / "forever.py").write_text(
        "import sys, time\n\ndef make():\n    print('here', flush=True)\n    time.sleep(300)\n"
    )
    with started("plan", f"{tmp_path / 'forever.py'}:make") as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in err
    assert err.endswith("interrupted\n")


@pytest.mark.ci
def test_a_reader_that_goes_away_ends_a_process_quietly():
    with started("zoo", "list", "--json") as process:
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode != GOOD
    assert "Traceback" not in err


def test_warnings_are_lines_for_people(capsys):
    with warnings.catch_warnings(), _plain_warnings():
        warnings.simplefilter("always")
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: mind the gap\n"


def test_the_version_and_the_help_are_good(capsys):
    status, out, _ = run(capsys, "--version")
    assert status == GOOD
    assert torch.__version__.partition("+")[0] in out
    assert run(capsys, "--help")[0] == GOOD
    status, out, err = run(capsys, "plan", "-h")
    assert status == GOOD, err
    assert "Examples:" in out


def test_what_draws_and_reads_options_is_loaded_where_it_is_used():
    code = (
        "import sys, rockmate; heavy = {'click', 'jinja2', 'matplotlib', 'rich'};"
        "print(heavy & set(sys.modules) or '');"
        "from rockmate.cli import main; status = main(['--help']); print(status, sorted(heavy & set(sys.modules)))"
    )
    lines = run_script("-c", code).splitlines()
    assert lines[0] == ""
    assert lines[-1] == "0 ['click']"
