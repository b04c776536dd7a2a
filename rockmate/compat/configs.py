"""What planning is asked for, as a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from rk_solvers import Limits
from rkgb import RockmateError
from rockmate import module
from rockmate.compat.configured import configured, options_of
from rockmate.memory.budget import check_budget
from rockmate.memory.split import SCOPES, Scope
from rockmate.options import SHAPES, Shapes
from rockmate.planning.request import limits_of

FORMAT: Literal["rockmate-config"] = "rockmate-config"
VERSION: Literal[1] = 1


class ConfigError(RockmateError, ValueError):
    """A file is no configuration of this version, or says something that planning cannot be asked for."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `rockmate.Rockmate` that are plain values. None for `budget` is the free memory."""

    format: Literal["rockmate-config"] = FORMAT
    version: Literal[1] = VERSION
    solver: str = "auto"
    solver_options: dict[str, int | float | str] = {}
    budget: int | float | str | None = None
    scope: Scope = "step"
    time_limit: float | None = None
    gap: float = Limits().gap
    shapes: Shapes = "replan"


def generate_config(solver: str = "auto", **changes: Any) -> Config:
    """The configuration of that solver, with all of its options written out; `changes` are other fields of `Config`.

    Options that are changed are given as ``solver_options={"slots": 1000}``: the others stay as they are.
    Raises `ConfigError` for what planning cannot be asked for.
    """
    given = changes.pop("solver_options", {})
    try:
        return _checked(Config(solver=solver, solver_options={**_usual(solver), **given}, **changes))
    except TypeError as error:  # no such field
        raise ConfigError(f"{error}: the fields are {', '.join(Config.__struct_fields__)}.") from None


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write a configuration as JSON. Raises `OSError` where it cannot be written."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")


def load_config(path: str | os.PathLike[str]) -> Config:
    """The configuration in a file that `save_config` wrote, or a person; fields with a default may be left out.

    Raises `ConfigError` for another format or version, for fields that are unknown or of another type, and for values
    that planning cannot be asked for; `OSError` where there is no such file.
    """
    content = Path(path).read_bytes()
    try:
        raw = msgspec.json.decode(content)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != VERSION:
            raise ConfigError(f'it does not say "format": "{FORMAT}", "version": {VERSION}')
        return _checked(msgspec.convert(raw, Config, strict=True))
    except (msgspec.MsgspecError, ConfigError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)} is no configuration: {error}") from None


def from_config(
    model: torch.nn.Module, sample: Any = None, config: Config | None = None, **options: Any
) -> module.Rockmate:
    """`rockmate.Rockmate(model, sample)` as the configuration says.

    `options` are arguments that are no plain values, such as loss and optimizer, or that are to differ from it.
    Raises what `rockmate.Rockmate` raises.
    """
    config = _checked(config or Config())
    solver = configured(config.solver, config.solver_options, limits_of(config.time_limit, config.gap))
    said = {"budget": config.budget, "solver": solver, "scope": config.scope, "time_limit": config.time_limit}
    return module.Rockmate(model, sample, **{**said, "gap": config.gap, "shapes": config.shapes, **options})


def _usual(solver: str) -> dict[str, int | float | str]:
    try:
        return options_of(solver)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _checked(config: Config) -> Config:
    """Raise `ConfigError` for values that planning cannot be asked for."""
    try:
        configured(config.solver, config.solver_options)
        check_budget(config.budget)
    except RockmateError as error:
        raise ConfigError(str(error)) from None
    if config.scope not in SCOPES or config.shapes not in SHAPES:
        raise ConfigError(f"scope is {config.scope!r} and shapes is {config.shapes!r}: one of them is not known.")
    if not (config.time_limit is None or config.time_limit >= 0) or not 0 <= config.gap < 1:
        raise ConfigError(f"time_limit is {config.time_limit!r} and gap is {config.gap!r}: give seconds, and a share.")
    return config
