"""Tensors that a forward leaves where no run of the graph can: in globals, in variables of functions, in classes."""

from __future__ import annotations

import collections
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from rkgb.torch_private.autograd import FunctionBase

_FURTHEST = 4  # from a tensor to what has a name: a dictionary in a list in an object in a global
_OWN_CODE = ("rkgb", "rockmate", "torch")


def outliving(candidates: dict[str, torch.Tensor], known: Iterable[torch.Tensor]) -> tuple[str, str] | None:
    """The first of the `candidates`, tensors by name, that something with a name of its own still holds, and that name.

    Tensors that are `known` to be held, and what these are views of, are not looked for. Those that are found are taken
    out of the list that they are in: nobody is to add up there what was made to be looked at.
    """
    held = {id(tensor) for tensor in known} | {id(tensor._base) for tensor in known if tensor._base is not None}
    wanted = {id(tensor): name for name, tensor in candidates.items() if id(tensor) not in held}
    if not wanted:
        return None
    found = [tensor for tensor in candidates.values() if id(tensor) in wanted]
    # By what holds them, level by level: which tensor it leads to.
    level: list[tuple[Any, str]] = [(tensor, wanted[id(tensor)]) for tensor in found]
    if gc.get_freeze_count():
        gc.unfreeze()  # who freezes objects saves time in collections, but nobody finds what frozen ones hold
    seen = {id(candidates), id(found), id(level)}
    for _ in range(_FURTHEST):
        things = [thing for thing, _ in level]
        seen.update((id(things), id(level)))
        above: list[tuple[Any, str]] = []
        seen.add(id(above))
        for holder in gc.get_referrers(*things):
            if id(holder) in seen or isinstance(holder, (types.FrameType, torch.Tensor, FunctionBase)):
                continue
            seen.add(id(holder))
            place = _first_within(holder, level)
            if place is None:
                continue
            thing, name = level[place]
            named = _name_of(holder, thing)
            if named:
                _take_out(found)
                return name, named
            above.append((holder, name))
        if not above:
            return None
        level = above
    return None


def _take_out(tensors: list[torch.Tensor]) -> None:
    own = {id(tensor) for tensor in tensors}
    for holder in gc.get_referrers(*tensors):
        if holder is tensors:
            continue
        if isinstance(holder, (list, collections.deque)):
            kept = [item for item in holder if id(item) not in own]
            holder.clear()
            holder.extend(kept)


def _first_within(holder: Any, level: list[tuple[Any, str]]) -> int | None:
    within = {id(part) for part in gc.get_referents(holder)}
    return next((place for place, (thing, _) in enumerate(level) if id(thing) in within), None)


def _name_of(holder: Any, thing: Any) -> str:
    """What `holder` is called where it has a name: it holds `thing`. Empty where it has none."""
    if isinstance(holder, dict) and isinstance(holder.get("__name__"), str):
        module = sys.modules.get(holder["__name__"])
        if module is not None and vars(module) is holder and not _is_own(holder["__name__"]):
            name = next((key for key, value in holder.items() if value is thing), "?")
            return f"the global {name!r} of {holder['__name__']}"
    if isinstance(holder, types.CellType):
        for closure in gc.get_referrers(holder):
            for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
                if isinstance(function, types.FunctionType) and not _is_own(function.__module__ or ""):
                    place = next((i for i, cell in enumerate(function.__closure__ or ()) if cell is holder), None)
                    if place is not None:
                        return f"the variable {function.__code__.co_freevars[place]!r} of {function.__qualname__}"
    if isinstance(holder, type) and not _is_own(holder.__module__):
        return f"an attribute of the class {holder.__qualname__}"
    return ""


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN_CODE
