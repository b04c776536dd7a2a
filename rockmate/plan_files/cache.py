"""The user's own plans, kept between processes: a second start of the same training finds its plan here.

A folder of plan files, each under a digest of what decides a plan. It is on unless `ROCKMATE_CACHE` says "0";
`ROCKMATE_CACHE_DIR` puts it elsewhere, `ROCKMATE_CACHE_SIZE` bounds it (256 MiB by default): what was not used for
longest goes first. Several processes may use it at once: files appear whole, and one that is gone was not there.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import platformdirs

from rockmate.errors import PlanFileError
from rockmate.plan_files.content import PlanFile
from rockmate.plan_files.files import load, save, write_whole
from rockmate.units import parse_bytes

Noted = TypeVar("Noted")

_MOST_BYTES = 256 << 20
_SUFFIX = ".json.gz"
_NOTE = ".note.json"  # what was found out beside plans
_MOST_NOTES = 1024
_KEY = re.compile(r"[0-9a-f]{64}")
_ABANDONED_S = 3600.0  # a part of a file that is older was left by a process that ended


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan in the cache."""

    key: str
    path: Path
    size_bytes: int
    used_at: float  # seconds since the epoch

    def load(self) -> PlanFile:
        """The plan; raises as `plan_files.load`."""
        return load(self.path)


def is_enabled() -> bool:
    """Whether the user lets plans be kept: yes, unless `ROCKMATE_CACHE` is "0", "off", "no" or "false"."""
    return os.environ.get("ROCKMATE_CACHE", "1").strip().lower() not in ("0", "off", "no", "false")


def folder() -> Path:
    """Where the plans are. It may not exist yet."""
    chosen = os.environ.get("ROCKMATE_CACHE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("rockmate", appauthor=False)) / "plans"


def most_bytes() -> int:
    """How large all plans together may be. A size that cannot be read counts as none given."""
    try:
        return parse_bytes(os.environ["ROCKMATE_CACHE_SIZE"])
    except (KeyError, ValueError):
        return _MOST_BYTES


def entries() -> list[Entry]:
    """All plans, the one used last first."""
    found = []
    for path in _files(f"*{_SUFFIX}"):
        key = path.name.removesuffix(_SUFFIX)
        with contextlib.suppress(OSError):  # another process took it away
            status = path.stat()
            if _KEY.fullmatch(key):
                found.append(Entry(key, path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: (-entry.used_at, entry.key))


def get(key: str) -> PlanFile | None:
    """The plan under `key`; None where there is none that can be read. A damaged one is taken away."""
    path = _path(key)
    try:
        plan_file = load(path)
    except OSError:
        return None
    except PlanFileError:
        drop(key)
        return None
    with contextlib.suppress(OSError):  # a folder that only may be read
        os.utime(path)
    return plan_file


def keys(beginning: str) -> list[str]:
    """Those that begin so, the one used last first."""
    return [entry.key for entry in entries() if entry.key.startswith(beginning)]


def put(key: str, plan_file: PlanFile) -> bool:
    """Keep a plan, and let go of the oldest where they are too many. Whether it is there now.

    A folder that cannot be written keeps nothing, and that is no error.
    """
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        save(plan_file, _path(key))
    except OSError:
        return False
    _shrink(most_bytes())
    return _path(key).exists()


def get_note(key: str, kind: type[Noted]) -> Noted | None:
    """What was noted of that kind, as JSON, under `key`; None where there is nothing, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError):  # msgspec's own errors are `ValueError`s
        return msgspec.json.decode((folder() / f"{key}{_NOTE}").read_bytes(), type=kind)
    return None


def put_note(key: str, text: str) -> None:
    """Keep a short text. A folder that cannot be written keeps nothing, and that is no error."""
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder() / f"{key}{_NOTE}", text.encode())
        notes = sorted(_files(f"*{_NOTE}"), key=lambda path: path.stat().st_mtime)
        for path in notes[:-_MOST_NOTES]:
            path.unlink(missing_ok=True)


def noted(key: str | None, kind: type[Noted], find: Callable[[], Noted]) -> Noted:
    """What was noted under `key`, else what `find` gives, which is noted then. Nothing is where there is no key."""
    found = None if key is None else get_note(key, kind)
    if found is None:
        found = find()
        if key is not None:
            put_note(key, msgspec.json.encode(found).decode())
    return found


def drop(key: str) -> None:
    """Let go of one plan, if it is there."""
    with contextlib.suppress(OSError):
        _path(key).unlink()


def clear() -> int:
    """Let go of all plans. Returns how many there were; other files in the folder are left."""
    there = entries()
    for entry in there:
        drop(entry.key)
    for note in _files(f"*{_NOTE}"):
        with contextlib.suppress(OSError):
            note.unlink()
    return len(there)


def _path(key: str) -> Path:
    return folder() / f"{key}{_SUFFIX}"


def _shrink(allowed_bytes: int) -> None:
    total_bytes = 0
    for entry in entries():
        total_bytes += entry.size_bytes
        if total_bytes > allowed_bytes:
            drop(entry.key)
    for part in (*_files(f".*{_SUFFIX}.*"), *_files(f".*{_NOTE}.*")):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


def _files(pattern: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from folder().glob(pattern)
