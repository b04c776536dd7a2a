"""The page of the command line is true: its commands run in order, and print what it shows; it has every option."""

import doctest
import re
import shlex
from pathlib import Path

import click
import pytest

from rkgb.kernels import bernoulli
from rockmate.cli.app import COMMANDS
from tests.cli.command_line import run, run_json
from tests.cli.test_examples import commands
from tests.scripts import ROOT

PAGE = (ROOT / "docs" / "command_line.md").read_text("utf-8")
CONSOLE = re.compile(r"^```console\n\$ rockmate (?P<command>.*)\n(?P<shown>(?:.*\n)*?)```$", re.MULTILINE)
MODEL = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
# In the help of every command, or said for all commands at once.
FOR_ALL = {"--help", "--json", "--quiet", "--threads", "--device", "--batch", "--sample", "--output"}


def section(name):
    """What the page says of a command."""
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path / "cache"))
    Path("model.py").write_text(MODEL)
    Path("train.py").write_text(re.search(r"^```python\n(.*?)^```$", section("peak"), re.MULTILINE | re.DOTALL)[1])
    return tmp_path


@pytest.mark.slow
def test_what_the_page_shows_is_what_commands_print(folder, capsys, monkeypatch):
    monkeypatch.setattr(bernoulli, "drawing", lambda: None)  # as without numba: with it, a plan may be the faster one
    shown = list(CONSOLE.finditer(PAGE))
    assert {match["command"].split()[0] for match in shown} == set(COMMANDS)
    assert len(shown) == PAGE.count("```console")
    for match in shown:
        status, out, err = run(capsys, *shlex.split(match["command"]))
        assert status in (0, 1), err
        printed = out or err
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        # Rules are as wide as the times below them.
        expected, found = (re.sub("─+", "─", text) for text in (match["shown"], printed))
        assert doctest.OutputChecker().check_output(expected, found, flags), f"{match['command']}:\n{printed}"


def test_the_page_names_every_command_and_its_own_options():
    for path, command in commands():
        text = section(path[0])
        assert f"`{path[0]}`](#{path[0]})" in PAGE
        own = {option for item in command.params if isinstance(item, click.Option) for option in item.opts}
        for option in sorted(own - FOR_ALL):
            if option.startswith("--"):
                assert option in text + section("plan") + section("verify"), f"{path}: {option}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "model.py:make", "--budget", "0.9", "--solver", "greedy", "--time-limit", "0.5", "-o", "plan.json"),
        ("check", "plan.json", "model.py:make", "--steps", "1"),
        ("profile", "plan.json", "model.py:make", "--steps", "1"),
        ("sweep", "model.py:make", "--budgets", "1.0", "--solvers", "keep-all", "--time-limit", "0.5"),
        ("explain", "plan.json"),
        ("verify", "model.py:make", "--budget", "1.0", "--steps", "1"),
        ("zoo", "list"),
        ("cache", "list"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_field_of_json_is_on_the_page(arguments, folder, capsys):
    if "plan.json" in arguments and arguments[0] != "plan":
        plan = ("plan", "model.py:make", "--budget", "0.9", "--solver", "greedy", "--time-limit", "0.5")
        assert run(capsys, *plan, "-o", "plan.json")[0] == 0
    _, content = run_json(capsys, *arguments)
    text = section(arguments[0]) + section("For programs")
    assert content
    for name, value in content.items():
        assert f"`{name}`" in text
        parts = value if isinstance(value, list) else [value]
        for part in parts[:1] if arguments[0] not in ("explain", "zoo") else []:
            assert all(f"`{field}`" in text for field in (part if isinstance(part, dict) else ()))
