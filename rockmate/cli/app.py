"""The command `rockmate`: its commands, and how it ends."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

# Nothing that imports PyTorch, which takes seconds: help and version are there at once.
from rockmate.cli.output import DIFFERENT, GOOD, INTERRUPTED, WRONG_INPUT, note

COMMANDS = {
    "estimate": "Tell whether training fits a device, without the device.",
    "peak": "Run a training script and tell who holds its memory.",
    "plan": "Plan a model for a budget.",
    "check": "Check a plan: does it fit the model, and is training under it exact?",
    "profile": "Measure a plan's step beside eager's, and beside what was predicted.",
    "sweep": "Compare memory and time over budgets and solvers.",
    "explain": "Tell why each tensor of a plan is kept or recomputed.",
    "report": "Make a page, a figure or a text of a plan, to look at.",
    "max-batch": "Find the largest batch for a budget, or the smallest budget for a slowdown.",
    "graph": "Draw the graphs of a model.",
    "verify": "Compare training under a budget with eager training, bit by bit.",
    "zoo": "List, show and get built-in models and plans.",
    "cache": "Look at, or clear, the cache of plans.",
}
_ROOMS = {"estimate": "unplanned.", "peak": "unplanned."}  # of those that are not among the others
_PIPE_CLOSED = 141  # what shells report of a program that ended because nobody read on


class Commands(click.Group):
    """Commands, each in a module of its own that is imported when it is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Their names, in the order in which people come to need them."""
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command of that name; None where there is none."""
        if name not in COMMANDS:
            return None
        found = importlib.import_module(f"rockmate.cli.commands.{_ROOMS.get(name, '')}{name.replace('-', '_')}").command
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help: nothing is imported for it."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
MODEL is a name of the zoo (rockmate zoo list), package.module:factory or
path/to/file.py:factory: a function that returns (model, sample) or
(model, sample, loss), and that may take a batch; or, with --sample, a model
or what makes one.
\b
Exit status: 0 all is well; 1 what was checked differs, or does not fit;
2 the input is wrong, or cannot be planned; 130 interrupted.""",
)
@click.version_option(
    _version("rockmate-rk"), prog_name="rockmate", message=f"%(prog)s %(version)s, torch {_version('torch')}"
)
def rockmate() -> None:
    """Train PyTorch modules under a memory budget: plans, checks and pictures from the command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default, that of this process); returns the exit status."""
    name = ""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        name = next((argument for argument in given if argument in COMMANDS), "rockmate")
        with _plain_warnings():
            status: Any = rockmate.main(args=given, prog_name="rockmate", standalone_mode=False)
            sys.stdout.flush()
        return status if isinstance(status, int) else GOOD
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt):
        note("interrupted")
        return INTERRUPTED
    except click.ClickException as error:  # among them wrong options: what is right is shown, too
        error.show()
        return WRONG_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes
        return _PIPE_CLOSED
    except Exception as error:  # noqa: BLE001  of the user's code; 1, Python's status for it, would say something else
        if _is_told(error):
            note("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
            return DIFFERENT if _does_not_fit(error) and name != "verify" else WRONG_INPUT  # nothing was compared then
        traceback.print_exc()
        note(f"error: {name} ended by {type(error).__name__}, as above")
        return WRONG_INPUT


def _is_told(error: Exception) -> bool:
    """Whether the message says all, to people who do not know the code."""
    from rk_solvers import BackendUnavailable
    from rkgb import RockmateError
    from rockmate.cli.targets import TargetError

    return isinstance(error, (RockmateError, TargetError, BackendUnavailable, OSError))


def _does_not_fit(error: Exception) -> bool:
    from rockmate.errors import BudgetTooSmall

    return isinstance(error, BudgetTooSmall)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as lines for people, without the place in our code that gives them."""
    usual = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    try:
        yield
    finally:
        warnings.showwarning = usual


def examples(*lines: str) -> str:
    """The end of a command's help: commands that can be run as they stand."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
