"""What commands print: tables of plain text for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

GOOD, DIFFERENT, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: all is well; what was checked differs, or does not fit; the input is wrong; Ctrl-C."""

JSON_VERSION = 1


def tell(text: str = "") -> None:
    """A line of what was asked for, to standard output."""
    click.echo(text)


def note(text: str) -> None:
    """A line about how it goes, to standard error."""
    click.echo(text, err=True)


def tell_json(command: str, content: dict[str, Any]) -> None:
    """One object to standard output: `command`, `version`, and the content, records as objects of their fields.

    JSON has no infinities: they are null.
    """
    built = msgspec.to_builtins({"command": command, "version": JSON_VERSION} | content)
    click.echo(json.dumps(finite(built), indent=1, allow_nan=False, ensure_ascii=False))


def finite(value: Any) -> Any:
    """`value` with null in the place of infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A table of two columns: what, and how much."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table: the first `left` columns to the left, and the rest, numbers mostly, to the right."""
    cells = [list(headings), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def counted(count: int, thing: str) -> str:
    """How many: "1 plan", "2 plans"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def wants_progress(quiet: bool) -> bool:
    """Whether somebody is there to watch a display."""
    return not quiet and sys.stderr.isatty()
