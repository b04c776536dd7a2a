"""Which writes to attributes a forward makes at every call: found by runs of it, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rkgb.errors import TraceError
from rkgb.ir.call import is_ref
from rkgb.process.uncompiled import DispatchMode
from rkgb.state.attributes import (
    ABSENT,
    WATCHED_LISTS,
    AttributeWrite,
    Snapshot,
    Step,
    WriteKind,
    accesses_noted,
    differ,
    is_number,
    is_scalar,
    note_use,
    operations_of,
    outline,
    put_at,
    value_at,
    watched,
    watched_list,
)
from rkgb.state.side_effects import Unrepeatable
from rkgb.torch_private.identity import storage_key
from rkgb.tree import leaves

_Place = tuple[str, tuple[Step, ...]]


class CarriedState(Unrepeatable):
    """What a forward keeps somewhere cannot be written by a run of the graph."""

    def __init__(self, told: str, place: object, path: str) -> None:
        super().__init__(
            f"forward {told} in {place}: what a planned call leaves there would not be what the module does. "
            "Keep it in a buffer that is written in place (copy_, add_), pass it as an argument and return it, or let "
            "the submodule be one operation (opaque=[it]).",
            path,
        )


def _refused(write: AttributeWrite, told: str) -> CarriedState:
    return CarriedState(told, f"the {write}", write.path)


class LeftBehind:
    """Compares what modules hold before and after runs of a forward."""

    def __init__(self, module: torch.nn.Module, before: Snapshot) -> None:
        self._module = module
        self._before = before
        self._own = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._first: list[AttributeWrite] = []
        self._middle = before
        self._first_notes_hooks = False
        self._set_first: set[tuple[int, str]] = set()  # by holder and name: attributes that are set and not read before

    def look(self, was_set: set[tuple[int, str]]) -> bool:
        """Note what the first run left; whether there is anything, or something that it `was_set` to as it was."""
        self._first = self._before.writes()
        self._middle = self._before.again()
        held = self._before.held
        return bool(self._first) or any(key in held and name in held[key].content for key, name in was_set)

    def first_decides_nothing(self) -> None:
        """What the first call alone sets to plain values only notes that it has put hooks on modules.

        No planned call writes it, as none puts them there: a later call of the module itself is to do both.
        """
        self._first_notes_hooks = True

    def writes(
        self, run_again: Callable[[], object], is_from_data: Callable[[torch.Tensor], bool]
    ) -> list[AttributeWrite]:
        """What every call writes, with the tensors of the first run in the values.

        `run_again` runs the forward again, on the same data. Raises `CarriedState` where calls differ.
        """
        accessed: dict[tuple[int, str], bool] = {}
        kinds: set[type] = {
            torch.nn.Module,
            *(type(h.thing) for h in self._middle.held.values() if _has_attributes(h.thing)),
        }
        stale = _StaleReads(self._stale_storages())
        with (
            accesses_noted(kinds, lambda holder, name, is_set: accessed.setdefault((id(holder), name), is_set)),
            stale,
        ):
            run_again()
        self._set_first = {key for key, is_set in accessed.items() if is_set}
        second = {_place(write): write for write in self._middle.writes()}
        first = {_place(write): write for write in self._first}
        for place in filter(second.__contains__, stale.found):
            raise _refused(first[place], "computes with the tensor that its previous call has left")
        found: list[AttributeWrite] = []
        counted: dict[_Place, AttributeWrite] = {}
        for place in {**first, **second}:
            self._merge(place, first.get(place), second.get(place), is_from_data, found, counted)
        found += self._set_as_they_were(first | second)
        lists = [write for write in found if write.kind is WriteKind.EXTEND and type(self._now(write)) in WATCHED_LISTS]
        return found + (self._counted(counted, lists, second, run_again) if counted or lists else [])

    # ---- two runs ------------------------------------------------------------------------------------

    def _merge(
        self,
        place: _Place,
        one: AttributeWrite | None,
        two: AttributeWrite | None,
        is_from_data: Callable[[torch.Tensor], bool],
        found: list[AttributeWrite],
        counted: dict[_Place, AttributeWrite],
    ) -> None:
        if one is None:
            assert two is not None
            raise _refused(two, "leaves something else at its second call than at its first")
        self._refuse_old_tensors(one)
        if two is None:
            once = self._only_at_first(one, is_from_data)
            if once is not None and once.kind is WriteKind.CHANGE and is_number(one.value):
                counted[place] = once
            elif once is not None:
                found.append(once)
        elif one.kind is WriteKind.SET and is_number(one.value) and is_number(two.value):
            counted[place] = one
        else:
            found.append(self._at_both(one, two))

    def _at_both(self, one: AttributeWrite, two: AttributeWrite) -> AttributeWrite:
        before = self._before.before(one) if one.kind is WriteKind.SET else None
        if one.kind is WriteKind.SET and two.kind is WriteKind.SET and is_scalar(one.value) and is_scalar(two.value):
            if isinstance(one.value, torch.Size) and one.value == two.value:
                return one
            if differ(before, two.value):
                raise _refused(one, f"leaves {one.value!r} at one call and {two.value!r} at the next")
            return replace(one, kind=WriteKind.CHANGE, value=[(before, one.value), (one.value, before)])
        if one.kind is WriteKind.SET and two.kind is WriteKind.EXTEND and (before is ABSENT or before is None):
            one = replace(one, kind=WriteKind.EXTEND, value=list(one.value))
        elif one.kind is WriteKind.EXTEND and two.kind is WriteKind.REPLACE and not self._before.content(one):
            one = replace(one, kind=WriteKind.REPLACE)  # there was nothing in it to be replaced
        if one.kind is not two.kind or outline(one.value) != outline(two.value):
            raise _refused(one, "leaves something else at every call")
        pairs = zip(leaves(one.value), leaves(two.value), strict=True)
        # Within a checkpoint of the module's own, what runs without gradient is recorded with it.
        plain = [place for place, (mine, eager) in enumerate(pairs) if mine.requires_grad and not eager.requires_grad]
        return replace(one, detached=tuple(plain))

    def _only_at_first(
        self, write: AttributeWrite, is_from_data: Callable[[torch.Tensor], bool]
    ) -> AttributeWrite | None:
        """What to write of what the second call left as it was; None for what a first call makes for all others."""
        tensors = leaves(write.value)
        others = [tensor for tensor in tensors if storage_key(tensor) not in self._own]
        if any(is_from_data(tensor) or tensor.requires_grad for tensor in others):
            raise _refused(write, "keeps, at its first call alone, a tensor that depends on its data")
        if tensors:  # such as a table of positions: the graph computes it in every call, and leaves it where that is
            return write if write.kind is WriteKind.SET and len(others) == len(tensors) else None
        if write.kind is WriteKind.SET and (self._first_notes_hooks or not is_scalar(write.value)):
            return None
        if write.kind is not WriteKind.SET:
            is_list = write.kind is WriteKind.EXTEND and isinstance(self._now(write), list)
            return None if is_list else write
        if (id(self._holder(write)), write.steps[-1].key) in self._set_first and not write.steps[-1].is_item:
            return write
        before, after = self._before.before(write), write.value
        pairs: list[tuple[Any, ...]] = [(after,) if before is ABSENT else (before, after), (after, after)]
        return replace(write, kind=WriteKind.CHANGE, value=pairs)

    def _set_as_they_were(self, known: dict[_Place, AttributeWrite]) -> list[AttributeWrite]:
        """Plain values that every call sets, though they had them already."""
        found = []
        for held in self._before.held.values():
            if not _has_attributes(held.thing):
                continue
            for name, value in held.content.items():
                place = (held.path, (*held.steps, Step(name, False)))
                if is_scalar(value) and place not in known and (id(held.thing), name) in self._set_first:
                    found.append(AttributeWrite(*place, WriteKind.SET, value))
        return found

    def _refuse_old_tensors(self, write: AttributeWrite) -> None:
        old = {
            id(tensor)
            for other in self._first
            if other.kind is WriteKind.SET
            for tensor in leaves(self._before.before(other))
            if storage_key(tensor) not in self._own
        }
        if any(id(tensor) in old for tensor in leaves(write.value)):
            raise _refused(write, "keeps a tensor of its previous call")

    def _stale_storages(self) -> dict[int, _Place]:
        """Storages of what the first run left, by their addresses: what the second run reads of them is stale."""
        held = set(self._own)
        changed = {id(tensor) for write in self._first for tensor in leaves(write.value)}
        for tensor in self._before.tensors():
            if id(tensor) not in changed:
                held.add(storage_key(tensor))
        return {
            storage_key(tensor): _place(write)
            for write in self._first
            for tensor in leaves(write.value)
            if storage_key(tensor) not in held
        }

    # ---- numbers -------------------------------------------------------------------------------------

    def _counted(
        self,
        counted: dict[_Place, AttributeWrite],
        lists: list[AttributeWrite],
        second: dict[_Place, AttributeWrite],
        run: Callable[[], object],
    ) -> list[AttributeWrite]:
        """Run once more, with numbers that note what is computed of them, and lists that note whether they are read."""
        planted = {}
        for place, write in counted.items():
            planted[place] = watched(self._now(write))
            put_at(self._holder(write), write.steps[-1], planted[place])
        growing = [(write, self._plant(self._now(write))) for write in lists]
        for _, planted_list in growing:
            planted_list.read = False  # it was, while the others were put in their places
        with _UsesNoted():
            run()
        for write, planted_list in growing:
            if planted_list.read:
                raise _refused(write, "reads what its previous calls have left")
        found = []
        for place, write in counted.items():
            now, number = self._now(write), planted[place]
            operations = operations_of(now)
            if operations:
                found.append(replace(write, kind=WriteKind.CARRY, value=[list(one) for one in operations]))
            elif not number.read and now is not number and place not in second:
                found.append(replace(write, kind=WriteKind.SET, value=now))
            elif place not in second:
                found.append(write)
            else:
                raise _refused(write, "goes by a number that it counts")
        return found

    def _plant(self, held: Any) -> Any:
        """Put a list that notes whether it is read in all places of `held`."""
        planted = watched_list(held)
        for holder in self._middle.again().held.values():
            content = holder.content.items() if isinstance(holder.content, dict) else enumerate(holder.content)
            is_item = not _has_attributes(holder.thing)
            for key in [key for key, item in content if item is held]:
                put_at(holder.thing, Step(key, is_item), planted)
        return planted

    def _holder(self, write: AttributeWrite) -> Any:
        steps = write.steps[:-1]
        return next(h.thing for h in self._before.held.values() if (h.path, h.steps) == (write.path, steps))

    def _now(self, write: AttributeWrite) -> Any:
        return value_at(self._holder(write), write.steps[-1])


def tensors_again(before: Snapshot, writes: list[AttributeWrite]) -> list[torch.Tensor]:
    """The tensors of `writes`, in their order, as another run of the same forward has left them since `before`.

    Raises `TraceError` where it has left others.
    """
    now = {_place(write): write for write in before.writes()} if writes else {}
    found: list[torch.Tensor] = []
    for write in writes:
        expected = leaves(write.value, is_ref)
        if not expected:
            continue  # numbers: that tracer makes tensors of those that come from shapes
        again = now.get(_place(write))
        tensors = [] if again is None else leaves(again.value)
        if len(tensors) != len(expected):
            raise TraceError(f"forward leaves other tensors in the {write} where torch.jit.trace runs it.")
        found += tensors
    return found


def _place(write: AttributeWrite) -> _Place:
    return write.path, write.steps


def _has_attributes(thing: Any) -> bool:
    return not isinstance(thing, (list, dict, set, tuple)) and hasattr(thing, "__dict__")


class _StaleReads(DispatchMode):
    """Notes which of some storages are read."""

    def __init__(self, storages: dict[int, _Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self.found: list[_Place] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in leaves((args, kwargs)):
            place = self._storages.get(storage_key(tensor))
            if place is not None:
                self.found.append(place)
        return func(*args, **(kwargs or {}))


class _UsesNoted(TorchFunctionMode):
    """Notes watched numbers that are given to PyTorch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note_use((args, kwargs))
        return func(*args, **(kwargs or {}))
