"""An operation by another kernel, as data, and the arguments of calls by their names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rkgb.ir.call import Call


@dataclass(frozen=True, slots=True)
class Alternative:
    """An operation by another kernel. Of several things that the operation gives, it gives the first."""

    kernel: str  # what runs, in words and in the plural
    call: Call
    is_picked: bool = False  # by PyTorch itself, for calls of these sizes
    mask: str = ""  # of what it reads, what is a mask of an attention: kernels differ where a row is masked wholly


def given(call: Call, *names: str) -> list[Any]:
    """What the arguments of these names are; None where one is left out."""
    found = {argument.name: value for argument, value in call.schema_pairs()}
    return [found.get(name) for name in names]


def replaced(call: Call, name: str, value: Any) -> Call | None:
    """`call` with another value for the argument of that name; None where it has no such argument."""
    names = [argument.name for argument, _ in call.schema_pairs()]
    if name not in names:
        return None
    place = names.index(name)
    if place < len(call.args):
        return replace(call, args=(*call.args[:place], value, *call.args[place + 1 :]))
    return replace(call, kwargs={**call.kwargs, name: value})
