"""Rockmate from the command line.

python -m rockmate verify gpt2-tiny --budget 0.5
python -m rockmate verify package.module:factory --budget 2GiB --steps 3 --optimizer adamw

A factory takes no argument and returns (model, sample) or (model, sample, loss). The exit status is 0 where training
under the plan is exactly eager training, 1 where it is not, and 2 where the input is wrong or cannot be planned.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from rkgb import RockmateError
from rockmate import zoo
from rockmate.memory.budget import Budget
from rockmate.verify import OPTIMIZERS, verify

EXACT, DIFFERENT, WRONG_INPUT = 0, 1, 2


class TargetError(ValueError):
    """What the command line names is neither an entry of the zoo nor a factory of a model and its sample."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Raises `SystemExit`, as argparse does, on unknown options."""
    options = _parser().parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        status: int = options.run(options)
    except (RockmateError, TargetError) as error:
        sys.stderr.write(f"error: {error}\n")
        return WRONG_INPUT
    except Exception as error:  # noqa: BLE001  of the user's code; 1, Python's status for it, would say that bits differ
        traceback.print_exc()
        sys.stderr.write(f"error: {options.command} ended by {type(error).__name__}, as above\n")
        return WRONG_INPUT
    return status


def load_target(name: str) -> tuple[torch.nn.Module, Any, Any]:
    """Model, sample and loss (None where there is none) of a zoo name or of "package.module:factory".

    Raises:
        TargetError: there is no such entry or factory, or the factory fails or returns something else.
    """
    if ":" not in name:
        try:
            entry = zoo.get(name)
        except KeyError as error:
            raise TargetError(f"{error.args[0]}. For a model of your own, give package.module:factory") from None
        return entry.model, entry.sample, entry.loss
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        made = factory()
    except Exception as error:  # whatever the user's code raises
        raise TargetError(f"{name} gives no model: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise TargetError(f"{name} must return (model, sample) or (model, sample, loss), not a {_described(made)}")
    model, sample, loss = (*made, None)[:3]
    return model, sample, loss


def _described(made: object) -> str:
    return f"tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rockmate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_verify(commands)
    return parser


def _add_target(command: argparse.ArgumentParser) -> None:
    """What every subcommand takes that plans a model."""
    command.add_argument("target", metavar="MODEL", help="package.module:factory, or a name of rockmate.zoo")
    command.add_argument(
        "--budget", type=_budget, default=0.6, help="part of the eager peak (default 0.6), bytes, or a size: 2GiB"
    )
    command.add_argument("--threads", type=_positive, metavar="N", help="threads for torch (default: torch's own)")


def _budget(text: str) -> Budget:
    """A number without a unit is a part of the eager peak if it is at most 1, and bytes if not."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if number <= 1 else text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


# ---- verify ------------------------------------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    command = commands.add_parser("verify", help="compare training under a budget with eager training, bit by bit")
    _add_target(command)
    command.add_argument("--steps", type=_positive, default=3, help="training steps to compare (default 3)")
    command.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="default: sgd")
    command.add_argument("--learning-rate", type=float, default=1e-2, metavar="RATE", help="default: 0.01")
    command.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    model, sample, loss = load_target(options.target)
    found = verify(
        model,
        sample,
        options.budget,
        loss=loss,
        steps=options.steps,
        learning_rate=options.learning_rate,
        optimizer=options.optimizer,
    )
    sys.stdout.write(f"{found}\n{found.plan}\n")
    return EXACT if found.exact else DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
