"""Plan files on disk: written at once or not at all, and believed only after every check that needs no model."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rk_solvers import check, simulate
from rk_solvers.problem import MOST
from rkgb.export.strict_json import parsed
from rockmate.errors import PlanFileError
from rockmate.plan_files.content import FORMAT, VERSION, PlanFile

MOST_BYTES = 256 << 20  # of a file, unpacked: many times what the largest models take
_DEEPEST = 40
_ADVICE = "Get the file anew, or plan the module again."


def save(plan_file: PlanFile, path: str | os.PathLike[str]) -> None:
    """Write a plan file; packed, where the name ends in ".gz". A file that is there is replaced in one go.

    Raises `OSError` where it cannot be written: then what was there is left.
    """
    path = Path(path)
    content = dumps(plan_file)
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)  # the same plan, the same bytes
    write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole, or replaces the one that is there in one go. Raises `OSError` as `save`."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> PlanFile:
    """The plan in a file that `save` wrote, checked.

    Raises `PlanFileError`, with the place, for all that is no plan of this version, or damaged, or not one that could
    be followed; `OSError` where there is no such file.
    """
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        return loads(unpacked(content))
    except PlanFileError as error:
        error.add_note(f"in the file {os.fspath(path)}")
        raise


def dumps(plan_file: PlanFile) -> bytes:
    """A plan file as JSON in UTF-8. The same plan gives the same bytes."""
    content = msgspec.to_builtins(plan_file) | {"digest": digest_of(plan_file)}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def loads(content: bytes) -> PlanFile:
    """The plan file of which `dumps` made `content`; else as `load`."""
    if len(content) > MOST_BYTES:
        _refuse(f"it is larger than {MOST_BYTES} bytes, which no plan takes")
    try:
        raw = parsed(content)
    except ValueError as error:  # no UTF-8 either
        _refuse(f"it is no JSON: {error}")
    _check_header(raw)
    _check_values(raw, "$", 0)
    digest = raw.pop("digest", None)
    written = _digest(raw)
    _take_names_of_today(raw)
    try:
        plan_file = msgspec.convert(raw, PlanFile, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        _refuse(str(error))
    if digest not in (written, digest_of(plan_file)):
        _refuse("what it holds is not what was written: it was cut, or changed on the way")
    _check_content(plan_file)
    return plan_file


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of plan files. What it accepts may still be refused: parts must belong together."""
    found = msgspec.json.schema(PlanFile)
    of_file = found["$defs"]["PlanFile"]
    of_file["properties"]["digest"] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    of_file["required"].append("digest")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A plan of Rockmate", **found}


def digest_of(plan_file: PlanFile) -> str:
    """Of all that a plan file holds."""
    return _digest(plan_file)


def _digest(content: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def _refuse(reason: str) -> NoReturn:
    raise PlanFileError(f"this is no plan that can be used: {reason}. {_ADVICE}") from None


def unpacked(content: bytes) -> bytes:
    """Nothing is unpacked beyond the largest file, however small it is packed."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            return packed.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        _refuse(f"it is packed by gzip, and damaged: {error}")


def _check_header(raw: Any) -> None:
    """Say the version before what else differs in it."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        _refuse(f'it does not say "format": "{FORMAT}"')
    version = raw.get("version")
    if type(version) is int and version > VERSION:
        raise PlanFileError(
            f"the plan is of version {version if version < MOST else 'beyond all'}, and this Rockmate reads up to "
            f"{VERSION}. Update Rockmate, or plan the module again."
        )
    if type(version) is int and version < VERSION:
        raise PlanFileError(
            f"the plan is of version {max(version, 0)}, by an older Rockmate that told less of each operation; this "
            f"one reads version {VERSION}: plan the module again."
        )


def _take_names_of_today(raw: dict[str, Any]) -> None:
    """Files of before told times under the name of the one way that there was, and calls in names of backwards."""
    problem = raw.get("problem")
    backward = problem.get("backward") if isinstance(problem, dict) else None
    for op in backward if isinstance(backward, list) else ():
        if isinstance(op, dict) and isinstance(op.get("name"), str) and "op" not in op:
            call, mark, _ = op["name"].partition(".backward")
            op["op"] = call if mark else ""
    measured = raw.get("measured")
    blocks = measured.get("blocks") if isinstance(measured, dict) else None
    for block in blocks if isinstance(blocks, list) else ():
        profile = block.get("profile") if isinstance(block, dict) else None
        if isinstance(profile, dict) and "normalise_ms" in profile:
            profile["restore_ms"] = profile.pop("normalise_ms")


def _check_values(raw: Any, place: str, depth: int) -> None:
    """No number beyond what other readers of JSON keep, and no half of a character."""
    if depth > _DEEPEST:
        _refuse(f"more than {_DEEPEST} levels are nested at {place[:200]}")
    if isinstance(raw, dict):
        for key, value in raw.items():
            _check_values(key, f"{place} (a key)", depth + 1)
            _check_values(value, f"{place}.{key}", depth + 1)
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            _check_values(value, f"{place}[{index}]", depth + 1)
    elif isinstance(raw, str):
        if not raw.isascii() and any("\ud800" <= character <= "\udfff" for character in raw):
            _refuse(f"the text at {place[:200]!a} holds half of a character")
    elif isinstance(raw, int | float) and not abs(raw) <= MOST:
        _refuse(f"the number at {place[:200]} is beyond {MOST}")


def _check_content(found: PlanFile) -> None:
    """What the types do not tell: that the parts belong together, and the schedule is one of the problem's."""
    problem = found.problem
    try:
        found.solver_chain.check(problem)
        schedule = found.parsed_schedule
        checked = check(problem, schedule, None, found.promise.memory)
        simulation = simulate(problem, schedule, found.promise.memory)
    except (ValueError, IndexError) as error:  # ScheduleError among them
        _refuse(str(error))
    if simulation.peak_bytes != found.promise.peak_bytes:
        _refuse(f"its schedule takes {simulation.peak_bytes} bytes, but it promises {found.promise.peak_bytes}")
    if checked.stored_bytes != found.promise.stored_bytes:
        stored_bytes = found.promise.stored_bytes
        _refuse(f"its schedule stores {checked.stored_bytes} bytes elsewhere, but it promises {stored_bytes}")
    if (found.promise.measured_peak_bytes or 0) > found.promise.budget_bytes:
        _refuse("what was measured of it is above its budget")
    nodes = {op.node for op in found.graph.operations} - {""}
    forward = {op.name for op in problem.forward}
    if nodes != forward:
        _refuse(f"the operation {min(nodes ^ forward)!r} is in one of its graph and its problem, and not in the other")
    repeated = [name for name, count in Counter(op.name for op in found.graph.operations).items() if count > 1]
    if repeated:
        _refuse(f"two operations are called {repeated[0]!r}")
    calls = {op.name for op in found.graph.operations} | {""}
    for backward in problem.backward:
        if backward.op not in calls:
            _refuse(f"{backward.name!r} is the backward of {backward.op!r}, which is no operation of its graph")
    if found.promise.time_ms < 0 or found.promise.baseline_time_ms < 0:
        _refuse("a time in it is below zero")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
