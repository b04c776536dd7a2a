"""How the graph of a module differs from the one that a plan was made for, in words."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from rockmate.plan_files.content import GraphRecord, LeafRecord, OperationRecord

_SHOWN = 8  # lines: who needs more of them has another model
_LONGEST = 160  # characters of what is called on what


def differences(here: GraphRecord, planned: GraphRecord) -> list[str]:
    """A line for each difference, the parameters, buffers and inputs first; none for equal graphs."""
    found = [*_of_leaves(here.leaves, planned.leaves), *_of_operations(here.operations, planned.operations)]
    if here.output != planned.output:
        found.append(f"it returns {_cut(here.output)}, but returned {_cut(planned.output)}")
    found += [f"it writes the {write}, but did not" for write in here.attributes if write not in planned.attributes]
    found += [f"it wrote the {write}, but does not" for write in planned.attributes if write not in here.attributes]
    if not found and here.digest != planned.digest:
        found.append(
            "its operations read the same, but a tensor of it has other strides or storage, a constant or a part that "
            "is called whole computes otherwise, or the loss trains other outputs"
        )
    return found


def report(here: GraphRecord, planned: GraphRecord) -> str:
    """The differences as a paragraph: what the plan was made for, and the first few lines."""
    found = differences(here, planned)
    shown = found[:_SHOWN]
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    lines = "".join(f"\n  {line}" for line in shown)
    return (
        f"the plan was made for {planned.model} on {planned.calls} ({len(planned.operations)} operations), and this is "
        f"{here.model} on {here.calls} ({len(here.operations)} operations):{lines}"
    )


def _of_leaves(here: Sequence[LeafRecord], planned: Sequence[LeafRecord]) -> Iterator[str]:
    now = {_key(leaf): leaf for leaf in here}
    before = {_key(leaf): leaf for leaf in planned}
    for key, leaf in before.items():
        if key not in now:
            yield f"{_named(leaf)}, {leaf.value.text}, is not read here"
        elif now[key].value.text != leaf.value.text:
            yield f"{_named(leaf)} is {now[key].value.text}, but was {leaf.value.text}"
        elif now[key].digest != leaf.digest:
            yield f"{_named(leaf)}, {leaf.value.text}, holds other numbers than it did"
        elif now[key].value.storage != leaf.value.storage:
            yield f"{_named(leaf)} shares its storage with others than it did"
    for key, leaf in now.items():
        if key not in before:
            yield f"{_named(leaf)}, {leaf.value.text}, was not read there"


def _key(leaf: LeafRecord) -> tuple[str, str, int]:
    return leaf.kind, leaf.path or leaf.value.name, leaf.index


def _named(leaf: LeafRecord) -> str:
    return f"input {leaf.index}" if leaf.kind == "input" else f"{leaf.kind} {leaf.path or leaf.value.name}"


def _of_operations(here: Sequence[OperationRecord], planned: Sequence[OperationRecord]) -> Iterator[str]:
    """By what is called and made: names are numbered, and move with every operation that comes or goes."""
    matcher = difflib.SequenceMatcher(None, list(map(_kind, planned)), list(map(_kind, here)), autojunk=False)
    for change, start, end, new_start, new_end in matcher.get_opcodes():
        gone, come = planned[start:end], here[new_start:new_end]
        if change == "equal":
            yield from (line for old, new in zip(gone, come, strict=True) if (line := _otherwise(old, new)))
            continue
        for old, new in zip(gone, come, strict=False):
            if old.function == new.function:
                yield f"{_place(new)} makes {_made(new)}, but made {_made(old)}"
            else:
                yield f"{_place(new)} is {_call(new)}, but was {_call(old)}"
        for old in gone[len(come) :]:
            yield f"{_call(old)} ({_place(old)}) does not run here"
        for new in come[len(gone) :]:
            yield f"{_call(new)} ({_place(new)}) did not run there"


def _kind(op: OperationRecord) -> tuple[object, ...]:
    return op.function, op.module, tuple(value.text for value in op.makes)


def _otherwise(old: OperationRecord, new: OperationRecord) -> str | None:
    if old.name != new.name:
        return None  # moved: what it reads is named otherwise as well
    if old.arguments != new.arguments:
        return f"{_place(new)} calls {new.function} with ({_cut(new.arguments)}), but did with ({_cut(old.arguments)})"
    if old.facts != new.facts:
        return f"{_place(new)} runs with {new.facts or 'gradients'}, but did with {old.facts or 'gradients'}"
    if old.node != new.node:
        return f"{_place(new)} belongs to {new.node or 'no node'}, but did to {old.node or 'none'}"
    return None


def _call(op: OperationRecord) -> str:
    return f"{op.function} making {_made(op)}"


def _made(op: OperationRecord) -> str:
    return _cut(", ".join(value.text for value in op.makes) or "nothing")


def _place(op: OperationRecord) -> str:
    return " ".join(part for part in (op.name, "in", op.module or "(root)", op.source) if part)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
