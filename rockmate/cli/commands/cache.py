"""`rockmate cache`: the plans that are kept between processes."""

from __future__ import annotations

import time
from typing import Any

import click

from rockmate.cli.app import examples
from rockmate.cli.options import json_option
from rockmate.cli.output import GOOD, counted, table, tell, tell_json
from rockmate.errors import PlanFileError
from rockmate.plan_files import cache
from rockmate.units import format_bytes

_SHOWN = 12  # letters of a key


@click.group("cache")
def command() -> None:
    """Look at the cache of plans, in which a second start of the same training finds its plan.

    ROCKMATE_CACHE=0 switches it off, ROCKMATE_CACHE_DIR puts it elsewhere, ROCKMATE_CACHE_SIZE bounds it.
    """


@command.command("path", epilog=examples("rockmate cache path"))
@json_option
def path_command(as_json: bool) -> int:
    """Print the cache's folder, which may not exist yet."""
    if as_json:
        tell_json("cache path", {"path": str(cache.folder()), "enabled": cache.is_enabled()})
    else:
        tell(str(cache.folder()))
    return GOOD


@command.command("list", epilog=examples("rockmate cache list", "rockmate cache list --json"))
@json_option
def list_command(as_json: bool) -> int:
    """List the plans in the cache, the one used last first."""
    found = [_facts(entry) for entry in cache.entries()]
    if as_json:
        content = {"path": str(cache.folder()), "enabled": cache.is_enabled(), "most_bytes": cache.most_bytes()}
        tell_json("cache list", content | {"plans": found})
        return GOOD
    if found:
        tell(table(("plan", "model", "calls", "budget", "size", "used"), [_row(facts) for facts in found], left=3))
    total_bytes = sum(facts["size_bytes"] for facts in found)
    state = "" if cache.is_enabled() else "; it is switched off"
    most = format_bytes(cache.most_bytes())
    tell(f"{counted(len(found), 'plan')}, {format_bytes(total_bytes)} of at most {most}{state}")
    return GOOD


def _facts(entry: cache.Entry) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "key": entry.key,
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "used_at": entry.used_at,
        "model": None,
        "calls": None,
        "budget_bytes": None,
    }
    try:
        found = entry.load()
    except (PlanFileError, OSError):  # damaged, or taken away meanwhile
        return facts
    return facts | {
        "model": found.graph.model,
        "calls": found.graph.calls,
        "budget_bytes": found.promise.budget_bytes,
    }


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["used_at"]))
    size = format_bytes(facts["size_bytes"])
    if facts["model"] is None:
        return (facts["key"][:_SHOWN], "cannot be read", "", "", size, used)
    return (facts["key"][:_SHOWN], facts["model"], facts["calls"], format_bytes(facts["budget_bytes"]), size, used)


@command.command("clear", epilog=examples("rockmate cache clear"))
@json_option
def clear_command(as_json: bool) -> int:
    """Take all plans out of the cache."""
    count = cache.clear()
    if as_json:
        tell_json("cache clear", {"path": str(cache.folder()), "cleared": count})
    else:
        tell(f"{counted(count, 'plan')} cleared from {cache.folder()}")
    return GOOD
