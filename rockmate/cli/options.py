"""Options that several commands have, and how their texts are read."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from rk_solvers import SOLVERS
from rk_solvers.limits import USUAL_LIMITS
from rockmate.cli.samples import SampleTextError, read_sample
from rockmate.cli.targets import Source, Target, TargetError, find_source
from rockmate.errors import OffloadError
from rockmate.kernels.option import KERNELS
from rockmate.layouts.option import LAYOUTS
from rockmate.memory.budget import Budget
from rockmate.offload.option import Offload
from rockmate.units import parse_bytes

Command = TypeVar("Command", bound=Callable[..., Any])


class BudgetText(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # older releases take none
    """A part of the eager peak ("0.5", "50%"), a size ("2GiB", "500 MB", "1048576", "1e9"), or "auto"."""

    name = "budget"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Budget:
        """The text: `Rockmate` reads it, and refuses it in the words in which it was written."""
        budget: Budget = value
        return budget


class Bytes(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A size, such as "2GiB"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        """The number of bytes."""
        try:
            return parse_bytes(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, context)


class OutputFile(click.Path):
    """A file to be written at the end of a command. What stands against that is told before the work begins."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        """The path. Fails for a folder that is not there, or may not be written to."""
        path = Path(os.fsdecode(super().convert(value, param, context)))
        if not path.parent.is_dir():
            self.fail(
                f"there is no folder {str(path.parent)!r} to write {path.name!r} to; make it first", param, context
            )
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"the folder {str(path.parent)!r} may not be written to", param, context)
        return path


def combined(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several decorators as one, their options listed in that order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _set_threads(context: click.Context, param: click.Parameter, value: int | None) -> None:
    if value is not None:
        torch.set_num_threads(value)


def _check_device(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        torch.empty(0, device=value)
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"there is no device {value!r} here: {str(error).splitlines()[0]}") from None
    return value


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
quiet_option = click.option("--quiet", is_flag=True, help="No progress display.")
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    expose_value=False,
    callback=_set_threads,
    is_eager=True,
    help="Threads for torch on the CPU (default: torch's own choice). Costs hold for this number.",
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The model that the command line names."""

    name: str
    samples: tuple[str, ...]
    batch: int | None
    device: str | None

    def source(self) -> Source:
        """Where it comes from. Raises `TargetError`."""
        try:
            sample = read_sample(self.samples) if self.samples else None
        except SampleTextError as error:
            raise TargetError(str(error)) from None
        return find_source(self.name, sample, self.device)

    def target(self) -> Target:
        """The model with what a step needs. Raises `TargetError`."""
        return self.source().target(self.batch)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, and what goes with it, as one argument `chosen` of the command."""

    @functools.wraps(command)
    def with_chosen(*, model: str, samples: tuple[str, ...], batch: int | None, device: str | None, **rest: Any) -> Any:
        return command(chosen=Chosen(model, samples, batch, device), **rest)

    return _target_options(with_chosen)


def sample_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same where nothing runs: MODEL is as it is made."""

    @functools.wraps(command)
    def with_chosen(*, model: str, samples: tuple[str, ...], batch: int | None, **rest: Any) -> Any:
        return command(chosen=Chosen(model, samples, batch, None), **rest)

    return _sample_options(with_chosen)


_sample_options = combined(
    click.argument("model", metavar="MODEL"),
    click.option(
        "--sample",
        "samples",
        multiple=True,
        metavar="TEXT",
        help="Arguments of the forward, such as 'float32[8,3,32,32]' or 'input_ids=int64[N,128]<1000'. "
        "May be given several times.",
    ),
    click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Rows of the sample: its N."),
)
_target_options = combined(
    _sample_options,
    click.option("--device", callback=_check_device, metavar="NAME", help="cpu, cuda, cuda:1, … (default: as made)."),
    threads_option,
)
solver_options = combined(
    click.option(
        "--solver",
        type=click.Choice(sorted(SOLVERS)),
        default="auto",
        show_default=True,
        metavar="NAME",
        help=f"One of {', '.join(sorted(SOLVERS))}.",
    ),
    click.option(
        "--time-limit",
        type=click.FloatRange(min=0),
        default=None,
        show_default=f"{USUAL_LIMITS.search_s:g}, and {USUAL_LIMITS.extra_s:g} more for a plan far from the best",
        metavar="SECONDS",
        help="For one search; Ctrl-C ends it with the best plan so far.",
    ),
    click.option(
        "--gap",
        type=click.FloatRange(min=0, max=1, max_open=True),
        default=USUAL_LIMITS.gap,
        show_default=True,
        help="The search ends once no plan is faster by more than this share of the step's time.",
    ),
)


class OffloadText(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Where data may be moved: "auto", "host", "disk", or "disk:PATH"."""

    name = "where"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        """What the text says, without a limit."""
        if not isinstance(value, str):
            return value
        where, colon, path = value.partition(":")
        try:
            return Offload(where, path if colon else None)  # type: ignore[arg-type]  # which it refuses
        except OffloadError as error:
            self.fail(str(error), param, context)


def offload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where data may be moved, and how many bytes, as one argument `offload` of the command; None where none may."""

    @functools.wraps(command)
    def with_offload(*, offload: Offload | None, offload_limit: int | None, **rest: Any) -> Any:
        if offload_limit is not None:
            if offload is None:
                raise click.UsageError("--offload-limit bounds what --offload moves: say where, such as --offload auto")
            offload = replace(offload, limit=offload_limit)
        return command(offload=offload, **rest)

    return _offload_options(with_offload)


_offload_options = combined(
    click.option(
        "--offload",
        type=OffloadText(),
        metavar="WHERE",
        help="Also move data while nothing reads them: auto (host memory for an accelerator, a file for the CPU), "
        "host, disk, or disk:PATH.",
    ),
    click.option("--offload-limit", type=Bytes(), metavar="SIZE", help="Most bytes that are moved at once."),
)
layout_option = click.option(
    "--layout",
    type=click.Choice(list(LAYOUTS)),
    default="as given",
    show_default=True,
    help="Of the weights of convolutions: auto is channels_last where that is measured to be faster.",
)
kernels_option = click.option(
    "--kernels",
    type=click.Choice(list(KERNELS)),
    default="as given",
    show_default=True,
    help="Of operations: auto is whichever of PyTorch's kernels are measured to be faster.",
)
compile_option = click.option(
    "--compile/--no-compile",
    default=False,
    help="Whether parts of the model are compiled, by inductor, where that is measured to pay.",
)
output_options = combined(json_option, quiet_option)
plan_argument = click.argument("plan", metavar="PLAN", type=click.Path(exists=True, dir_okay=False))
