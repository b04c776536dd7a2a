"""JSON from others: nothing in it is taken for something else than it says."""

from __future__ import annotations

import json
from typing import Any


def parsed(content: str | bytes) -> Any:
    """The value of a JSON text, which is in UTF-8 if it is bytes.

    Raises `ValueError` for anything else, for objects with a key that is there twice, for NaN and infinities, and for
    what is nested too deeply to be read.
    """
    try:
        return json.loads(content, object_pairs_hook=_without_repetition, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
