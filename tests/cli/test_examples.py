"""Every example in the help of a command does run as it stands, in a folder that has the model it names."""

import itertools
import json
import shlex
import shutil

import click
import pytest
from click.testing import CliRunner

from rockmate.cli.app import COMMANDS, rockmate
from tests.cli.command_line import MODEL, run

SLOW = ("mixer-tiny", "max-batch", "sweep", "--level", "--measured", "--per-op")  # in examples that take seconds


def commands(group=rockmate, path=()):
    """(path, command) of every command that does something."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def help_of(path):
    return CliRunner().invoke(rockmate, [*path, "--help"]).output


def examples():
    """Every example: those that write a plan first, for others read it."""
    found = []
    for path, _ in commands():
        text = help_of(path)
        if "Examples:" in text:
            found += [line.strip() for line in text.split("Examples:")[1].splitlines() if line.strip()]
    return sorted(found, key=lambda line: not line.startswith("rockmate plan"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("examples")
    shutil.copy(MODEL, found / "model.py")
    (found / "train.py").write_text("import torch\n\ntorch.ones(100, requires_grad=True).exp().sum().backward()\n")
    return found


def test_every_command_has_help_that_fits_a_terminal_and_examples():
    for path, command in commands():
        text = help_of(path)
        assert all(len(line) <= 100 for line in text.splitlines()), path
        assert command.help, path
        assert "Examples:" in text or path == ("zoo", "get"), path  # what it gets is data of the package
        for line in text.split("Examples:")[1:]:
            assert f"  rockmate {' '.join(path)}" in line
    assert {path[0] for path, _ in commands()} == set(COMMANDS)


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=pytest.mark.slow) if any(name in line for name in SLOW) else line for line in examples()],
)
def test_examples_run(line, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(folder / "cache"))  # the examples clear it
    if "plan.json" in line and not line.startswith("rockmate plan") and not (folder / "plan.json").exists():
        plan = ("plan", "model.py:make", "--budget", "0.8", "--solver", "greedy", "-o", "plan.json")
        assert run(capsys, *plan)[0] == 0
    program, *arguments = shlex.split(line)
    assert program == "rockmate"
    status, out, err = run(capsys, *arguments)
    assert status == 0, err
    if "--json" in arguments:
        assert json.loads(out)["version"] == 1
    else:
        assert out
    for option, value in itertools.pairwise(arguments):
        if option in ("-o", "--figure") and "all" not in value:
            assert (folder / value).stat().st_size > 100
