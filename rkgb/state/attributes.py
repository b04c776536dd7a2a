"""What a forward leaves in attributes: tensors, containers of them, plain values, of modules and of objects they hold.

What the modules hold is compared before and after a run. Each difference becomes an `AttributeWrite` of the graph: its
tensors are outputs of the graph, and whoever runs the graph in the place of the module leaves them where that does.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rkgb.errors import RockmateError
from rkgb.state.other_random import enclosed_by, is_stream, methods_of, streams_named_by
from rkgb.tree import attributes_of as held_by_object
from rkgb.tree import is_tensor, leaves, map_leaves

_PLAIN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))  # those that every module has
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_SEQUENCES = (list, collections.deque)
_DEEPEST = 4  # objects within objects: deeper ones are data, or go in a circle
_MOST_ENTRIES = 256  # of a container that is looked into: longer ones are data
# Objects of these packages are machinery (trainers, loggers, locks): what happens in them is theirs.
_MACHINERY = frozenset({"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "tqdm"})
_MADE_IN_PYTHON, _IMMUTABLE = 1 << 9, 1 << 8  # flags of types: only such classes can have their accesses noted
_PLAIN_CLASSES = (types.SimpleNamespace, collections.UserDict, collections.UserList)


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """What forward may set on `module`, by name: no parameter, buffer, submodule or hook."""
    return {name: value for name, value in vars(module).items() if name not in _PLAIN_ATTRIBUTES}


class WriteKind(enum.Enum):
    """What is done to an attribute, an entry of a dictionary, or a list."""

    SET = "set"  # to the value
    DELETE = "delete"
    EXTEND = "extend"  # a list or set, by the items of the value; one is made where there is none
    REPLACE = "replace"  # all items of a list, by those of the value
    CARRY = "carry"  # a number, computed of itself: (operator, operand, whether the operand comes first) in turn
    CHANGE = "change"  # from one plain value to another: pairs of before and after, or what nothing becomes alone


@dataclass(frozen=True, slots=True)
class Step:
    """From one object to what it holds."""

    key: Any
    is_item: bool  # of a list or a dictionary; else an attribute


@dataclass(frozen=True, slots=True)
class AttributeWrite:
    """One write of a forward: where, and what. In the `value` there is a `Ref` for each tensor of the graph."""

    path: str  # of the submodule
    steps: tuple[Step, ...]  # from there to what is written; to the list that is extended or replaced
    kind: WriteKind
    value: Any = None
    detached: tuple[int, ...] = ()  # which tensors of the value, in order, the module leaves without gradient

    @property
    def name(self) -> str:
        """Such as ``aux`` or ``stats['loss']``."""
        text = "".join(f"[{step.key!r}]" if step.is_item else f".{step.key}" for step in self.steps)
        return text.removeprefix(".")

    def __str__(self) -> str:
        return f"attribute {self.name!r} of submodule {self.path or '(root)'!r}"


# ---- what modules hold -------------------------------------------------------------------------------------


def enclosed_in(module: torch.nn.Module) -> list[Any]:
    """What functions that `module` holds have in their closures: copies of the module share it."""
    held = Snapshot(module.named_modules()).held.values()
    contents = (one.content.values() if isinstance(one.content, dict) else one.content for one in held)
    functions = {value for content in contents for value in content if isinstance(value, types.FunctionType)}
    return [value for function in functions for _, value in enclosed_by(function)]


def encloses_parts_of(copied: torch.nn.Module, original: torch.nn.Module) -> bool:
    """Whether a function that `copied` holds has a part of `original` in its closure that is no part of `copied`."""
    mine, others = (
        {id(part) for part in (*one.modules(), *one.parameters(), *one.buffers())} for one in (copied, original)
    )
    return not others <= mine and any(id(value) in others - mine for value in enclosed_in(copied))


@dataclass(slots=True)
class _Held:
    """One object that holds others, and what it held."""

    thing: Any
    path: str
    steps: tuple[Step, ...]
    content: Any  # a copy: of attributes and of dictionaries a dict, else a list or a set


class Snapshot:
    """What modules hold, through lists, dictionaries and plain objects."""

    def __init__(self, submodules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Copies what is held, not the tensors."""
        self.submodules = list(submodules)
        self.held: dict[int, _Held] = {}
        for path, submodule in self.submodules:
            self.held[id(submodule)] = _Held(submodule, path, (), attributes_of(submodule))
        for path, submodule in self.submodules:
            for name, value in attributes_of(submodule).items():
                self._look_into(value, path, (Step(name, False),))

    def _look_into(self, value: Any, path: str, steps: tuple[Step, ...]) -> None:
        if id(value) in self.held or len(steps) > _DEEPEST or not _holds_others(value):
            return
        content = _content(value)
        if not isinstance(value, tuple):
            self.held[id(value)] = _Held(value, path, steps, content)
        if len(content) <= _MOST_ENTRIES and not isinstance(value, (set, frozenset)):
            is_item = isinstance(value, (*_SEQUENCES, tuple, dict))
            for key, item in content.items() if isinstance(content, dict) else enumerate(content):
                self._look_into(item, path, (*steps, Step(key, is_item)))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are held, but for those within longer containers."""
        return [tensor for held in self.held.values() for tensor in _tensors_of(_values(held.content))]

    def generators(self) -> list[torch.Generator]:
        """All random generators that are held, in lists and objects, too."""
        values = [value for held in self.held.values() for value in _values(held.content)]
        return [value for value in values if isinstance(value, torch.Generator)]

    def streams(self) -> dict[int, tuple[str, Any]]:
        """Streams of Python and NumPy: names and streams by identity.

        Those that are held, and those that methods, or functions that are held, name.
        """
        functions = methods_of(submodule for _, submodule in self.submodules)
        found: dict[int, tuple[str, Any]] = {}
        for held in self.held.values():
            content = held.content
            for key, value in content.items() if isinstance(content, dict) else enumerate(content):
                if is_stream(value):
                    found[id(value)] = str(key if isinstance(content, dict) else held.steps[-1].key), value
                elif isinstance(value, types.FunctionType):
                    functions.append(value)
        return streams_named_by(functions) | found

    def again(self) -> Snapshot:
        """What the same modules hold now."""
        return Snapshot(self.submodules)

    def restore(self) -> None:
        """Put everything back."""
        for held in self.held.values():
            thing, content = held.thing, held.content
            if isinstance(thing, torch.nn.Module):
                for name in attributes_of(thing):
                    if name not in content:
                        del thing.__dict__[name]
                thing.__dict__.update(content)
            elif isinstance(thing, (*_SEQUENCES, set)):
                if len(thing) != len(content) or any(map(operator.is_not, thing, content)):
                    thing.clear()
                    (thing.update if isinstance(thing, set) else thing.extend)(content)
            elif isinstance(thing, dict):
                if thing.keys() != content.keys() or any(thing[key] is not item for key, item in content.items()):
                    dict.clear(thing)
                    dict.update(thing, content)
            else:
                now = held_by_object(thing)
                for name in now.keys() - content.keys():
                    object.__delattr__(thing, name)
                for name, value in content.items():
                    if now.get(name) is not value:
                        object.__setattr__(thing, name, value)

    def writes(self) -> list[AttributeWrite]:
        """How what is held now differs from what was, with tensors in the values."""
        found: list[AttributeWrite] = []
        for held in self.held.values():
            found += _writes_to(held)
        return found

    def before(self, write: AttributeWrite) -> Any:
        """What was held in the place of `write`; `ABSENT` where there was nothing."""
        holder = next(h for h in self.held.values() if (h.path, h.steps) == (write.path, _holder_steps(write)))
        key = write.steps[-1].key
        if isinstance(holder.content, dict):
            return holder.content.get(key, ABSENT)
        return holder.content[key] if isinstance(key, int) and key < len(holder.content) else ABSENT

    def content(self, write: AttributeWrite) -> Any:
        """What was in the list that `write` extends or replaces the items of; empty where there was none."""
        return next((h.content for h in self.held.values() if (h.path, h.steps) == (write.path, write.steps)), [])


class _Absent(enum.Enum):
    ABSENT = "nothing"


ABSENT = _Absent.ABSENT


def _holds_others(value: Any) -> bool:
    if isinstance(value, (*_SEQUENCES, dict, set, tuple)):
        return not isinstance(value, torch.Size)
    if is_tensor(value) or callable(value) or isinstance(value, (torch.nn.Module, torch.Generator, *_SCALARS)):
        return False
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package in _MACHINERY or (package in sys.stdlib_module_names and not issubclass(kind, _PLAIN_CLASSES)):
        return package == "__main__"
    return bool(held_by_object(value))


def _content(thing: Any) -> Any:
    if isinstance(thing, torch.nn.Module):
        return attributes_of(thing)
    if isinstance(thing, (*_SEQUENCES, tuple)):
        return list(thing)
    if isinstance(thing, (dict, set)):
        return dict(thing) if isinstance(thing, dict) else set(thing)
    return held_by_object(thing)


def _tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among `values`, in tuples and sets, too; what else holds tensors, perhaps itself, is held by itself."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, set, frozenset)):
            yield from _tensors_of(value)


def _values(content: Any) -> list[Any]:
    return list(content.values()) if isinstance(content, dict) else list(content)


def _writes_to(held: _Held) -> list[AttributeWrite]:
    before, after = held.content, _content(held.thing)

    def write(kind: WriteKind, value: Any = None, *more: Step) -> AttributeWrite:
        return AttributeWrite(held.path, (*held.steps, *more), kind, value)

    if isinstance(before, set):
        return [write(WriteKind.EXTEND, sorted(after - before, key=repr))] if after - before else []
    if isinstance(before, dict):
        is_item = isinstance(held.thing, dict)
        changed = [name for name, value in after.items() if name not in before or differ(before[name], value)]
        gone = [name for name in before if name not in after]
        return [
            *(write(WriteKind.DELETE, None, Step(name, is_item)) for name in gone),
            *(write(WriteKind.SET, after[name], Step(name, is_item)) for name in changed),
        ]
    same = [not differ(one, other) for one, other in zip(before, after, strict=False)]
    if all(same) and len(after) >= len(before):
        return [write(WriteKind.EXTEND, after[len(before) :])] if len(after) > len(before) else []
    if isinstance(held.thing, collections.deque) and held.thing.maxlen == len(after):
        for new in range(1, len(after) + 1):  # the oldest were dropped
            if not any(map(differ, (before + after[-new:])[-len(after) :], after)):
                return [write(WriteKind.EXTEND, after[-new:])]
    if len(after) == len(before):
        places = [place for place, is_same in enumerate(same) if not is_same]
        if len(places) < len(after):
            return [write(WriteKind.SET, after[place], Step(place, True)) for place in places]
    return [write(WriteKind.REPLACE, after)]


def differ(before: Any, after: Any) -> bool:
    """Whether an attribute has changed; of tensors and unknown objects, whether it is another one."""
    if before is after:
        return False
    if isinstance(before, _SCALARS) and not isinstance(before, torch.Size):
        return type(before) is not type(after) or (before != after and (before == before or after == after))
    return True


def outline(tree: Any, by_identity: bool = True) -> Any:
    """Equal for what two calls leave in an attribute where they differ in the contents of tensors at most.

    Of objects that are neither plain nor hold tensors it is compared which ones they are, or their classes alone.
    """
    if is_tensor(tree):
        return ("tensor", tuple(tree.shape), tree.dtype)
    if isinstance(tree, _SCALARS):
        return (type(tree).__name__, repr(tree))
    if isinstance(tree, (*_SEQUENCES, tuple, set)):
        parts: Iterable[tuple[Any, Any]] = enumerate(sorted(tree, key=repr) if isinstance(tree, set) else tree)
    elif isinstance(tree, dict):
        parts = ((repr(key), item) for key, item in tree.items())
    elif leaves(tree):
        parts = held_by_object(tree).items()
    else:
        return ("object", id(tree) if by_identity else type(tree).__qualname__)
    return (type(tree).__name__, *((key, outline(item, by_identity)) for key, item in parts))


def is_scalar(value: Any) -> bool:
    """Whether `value` is plain: a number, a text, None, a dtype."""
    return isinstance(value, _SCALARS)


def is_number(value: Any) -> bool:
    """Whether `value` is a number that one can count with."""
    return type(value) in (int, float)


# ---- places ------------------------------------------------------------------------------------------------


class AttributeGone(RockmateError):
    """There is no longer such an object in the module as the forward wrote into."""


def _holder_steps(write: AttributeWrite) -> tuple[Step, ...]:
    return write.steps[:-1]


def holder_of(module: torch.nn.Module, write: AttributeWrite) -> Any:
    """The object whose attribute or entry `write` writes. Raises `AttributeGone`."""
    held: Any = module.get_submodule(write.path)
    for step in _holder_steps(write):
        held = value_at(held, step)
        if held is ABSENT or is_scalar(held):
            raise AttributeGone(f"there is no {write} any more, which forward writes when it is called")
    return held


def value_at(holder: Any, step: Step) -> Any:
    """What `holder` has there; `ABSENT` where there is nothing."""
    if not step.is_item:
        return getattr(holder, str(step.key), ABSENT)
    try:
        return holder[step.key]
    except (LookupError, TypeError):
        return ABSENT


def put_at(holder: Any, step: Step, value: Any) -> None:
    """Put `value` there, as the forward does."""
    if step.is_item:
        holder[step.key] = value
    else:
        setattr(holder, str(step.key), value)


# ---- writing again -----------------------------------------------------------------------------------------


class Writing:
    """The writes of one call: places are found before the first is written, as one may put others out of reach."""

    def __init__(self, writes: Sequence[AttributeWrite], module: torch.nn.Module) -> None:
        """Raises `AttributeGone`."""
        self._writes = writes
        self._holders = [holder_of(module, write) for write in writes]

    def refusal(self) -> str | None:
        """Why the forward may do otherwise, as what is there now is not what was there when it was traced."""
        for write, holder in zip(self._writes, self._holders, strict=True):
            now = value_at(holder, write.steps[-1])
            if write.kind is WriteKind.CARRY and not is_number(now):
                return f"{write} is {_shown(now)}, but was a number when the module was planned"
            if write.kind is WriteKind.CHANGE and all(differ(_before(pair), now) for pair in write.value):
                known = " or ".join(_shown(_before(pair)) for pair in write.value)
                return f"{write} is {_shown(now)}, but was {known} when the module was planned"
            if write.kind is WriteKind.EXTEND and now is not ABSENT and now is not None and not _grows(now):
                return f"{write} is {_shown(now)}, but was a list when the module was planned"
            if write.kind is WriteKind.REPLACE and not isinstance(now, _SEQUENCES):
                return f"{write} is {_shown(now)}, but was a list when the module was planned"
        return None

    def write(self, tensor_of: Callable[[Any], Any], is_named: Callable[[object], bool]) -> None:
        """Do it, with ``tensor_of(leaf)`` in the place of what `is_named` in the values."""
        values = [_with_tensors(write, tensor_of, is_named) for write in self._writes]
        for write, holder, value in zip(self._writes, self._holders, values, strict=True):
            _write(write, holder, value)


def _before(pair: Sequence[Any]) -> Any:
    return pair[0] if len(pair) > 1 else ABSENT


def _grows(value: Any) -> bool:
    return isinstance(value, (*_SEQUENCES, set))


def _shown(value: Any) -> str:
    if value is ABSENT:
        return ABSENT.value
    return repr(value) if is_scalar(value) else f"a {type(value).__name__}"


def _with_tensors(write: AttributeWrite, tensor_of: Callable[[Any], Any], is_named: Callable[[object], bool]) -> Any:
    count = iter(range(sys.maxsize))

    def tensor(leaf: Any) -> Any:
        given = tensor_of(leaf)
        return given.detach() if next(count) in write.detached else given

    return map_leaves(tensor, write.value, is_named)


def _write(write: AttributeWrite, holder: Any, value: Any) -> None:
    step = write.steps[-1]
    if write.kind is WriteKind.SET:
        put_at(holder, step, value)
    elif write.kind is WriteKind.DELETE:
        if value_at(holder, step) is not ABSENT:
            if step.is_item:
                del holder[step.key]
            else:
                delattr(holder, step.key)
    elif write.kind in (WriteKind.EXTEND, WriteKind.REPLACE):
        now = value_at(holder, step)
        if not _grows(now):
            put_at(holder, step, list(value))
            return
        if write.kind is WriteKind.REPLACE:
            now.clear()
        (now.update if isinstance(now, set) else now.extend)(value)
    elif write.kind is WriteKind.CARRY:
        put_at(holder, step, carried(value_at(holder, step), value))
    else:
        now = value_at(holder, step)
        put_at(holder, step, next(pair[-1] for pair in value if not differ(_before(pair), now)))


def written(writes: Sequence[AttributeWrite], module: torch.nn.Module) -> list[Any]:
    """What is in the places of `writes` after a forward; of a list that it extends, the new items."""
    found = []
    for write in writes:
        with contextlib.suppress(AttributeGone):
            value = value_at(holder_of(module, write), write.steps[-1])
            if write.kind is WriteKind.EXTEND and isinstance(value, _SEQUENCES):
                value = list(value)[-len(write.value) :]
            found.append(value)
            continue
        found.append(ABSENT)
    return found


def is_a_loss(shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape, left in an attribute, is taken for a part of the loss: it is one number."""
    return math.prod(shape) == 1


class FreshTensors:
    """Tells the tensors that a forward has left in attributes."""

    def __init__(self, module: torch.nn.Module) -> None:
        """From before the forward. Holds none of the tensors."""
        self._module = module
        self._before = {id(tensor): weakref.ref(tensor) for tensor in self._held()}

    def now(self) -> list[torch.Tensor]:
        """Those that are there and were not before, each once; no parameters and buffers."""
        own = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        found = {id(tensor): tensor for tensor in self._held() if id(tensor) not in own}
        return [tensor for key, tensor in found.items() if key not in self._before or self._before[key]() is not tensor]

    def _held(self) -> list[torch.Tensor]:
        return Snapshot(self._module.named_modules()).tensors()


# ---- numbers that are counted on ---------------------------------------------------------------------------

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
}


def carried(number: Any, operations: Iterable[Any]) -> Any:
    """What the operations of a `CARRY` make of `number`."""
    for name, operand, comes_first in operations:
        function = _OPERATORS[name]
        number = function(operand, number) if comes_first else function(number, operand)
    return number


class _Watched:
    """A number that notes what is computed of it, and whether anything else is done with it."""

    operations: tuple[tuple[str, Any, bool], ...]
    read: list[bool]  # of all numbers made of one, whether one was used otherwise


def watched(number: Any) -> Any:
    """`number` as one that notes what is computed of it."""
    made = _KINDS[type(number)](number)
    made.operations, made.read = (), []
    return made


def operations_of(value: Any) -> tuple[tuple[str, Any, bool], ...] | None:
    """How `value` was computed of a watched number; None where it is none, or that was used otherwise, too."""
    return value.operations if isinstance(value, _Watched) and not value.read else None


def note_use(tree: Any) -> None:
    """Note that the watched numbers in `tree` are used otherwise."""
    for number in leaves(tree, lambda leaf: isinstance(leaf, _Watched)):
        number.read.append(True)


def _computing(name: str, comes_first: bool) -> Callable[[Any, Any], Any]:
    function = _OPERATORS[name]

    def compute(self: Any, other: Any) -> Any:
        if type(other) not in (int, float):
            note_use([self, other])
            return NotImplemented
        plain = type(self).plain(self)
        result = function(other, plain) if comes_first else function(plain, other)
        made = _KINDS[type(result)](result)
        made.operations, made.read = (*self.operations, (name, other, comes_first)), self.read
        return made

    return compute


def _using(kind: type, name: str) -> Callable[..., Any]:
    function = getattr(kind, name)

    def use(self: Any, *args: Any) -> Any:
        self.read.append(True)
        return function(self, *args)

    return use


_USES = (
    "__bool__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __index__ __int__ __float__ __str__ __repr__ "
    "__format__ __neg__ __pos__ __abs__ __round__ __pow__ __rpow__ __divmod__ __rdivmod__ __trunc__ __and__ __or__ "
    "__xor__ __lshift__ __rshift__ __invert__ is_integer"
).split()


def _watched_kind(kind: Any) -> Any:
    methods: dict[str, Any] = {name: _using(kind, name) for name in _USES if hasattr(kind, name)}
    for name in _OPERATORS:
        methods[f"__{name}__"], methods[f"__r{name}__"] = _computing(name, False), _computing(name, True)
    return type(f"Watched{kind.__name__}", (_Watched, kind), {**methods, "plain": kind.__pos__})


_KINDS: dict[type, Any] = {int: _watched_kind(int), float: _watched_kind(float)}


def _watched_list_kind(kind: Any) -> Any:
    def using(name: str) -> Callable[..., Any]:
        function = getattr(kind, name)

        def use(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.read = True
            return function(self, *args, **kwargs)

        return use

    uses = (
        "__len__ __iter__ __getitem__ __contains__ __eq__ __add__ __setitem__ __delitem__ pop popleft index count copy"
    )
    methods = {name: using(name) for name in uses.split() if hasattr(kind, name)}
    return type(f"Watched{kind.__name__}", (kind,), {**methods, "read": False, "__hash__": None})


WATCHED_LISTS: Mapping[type, Any] = {kind: _watched_list_kind(kind) for kind in _SEQUENCES}
"""Kinds of lists, and of lists like them that note in `read` whether they are used other than to be extended."""


def watched_list(held: Any) -> Any:
    """A list like `held` that notes whether it is read."""
    limit = [held.maxlen] if isinstance(held, collections.deque) else []
    return WATCHED_LISTS[type(held)](held, *limit)


def with_refs(
    write: AttributeWrite, ref: Callable[[Any], Any], is_leaf: Callable[[object], bool] = is_tensor
) -> AttributeWrite:
    """`write` with references in the place of its tensors, or of what else `is_leaf`."""
    return replace(write, value=map_leaves(ref, write.value, is_leaf))


@contextlib.contextmanager
def accesses_noted(
    kinds: Iterable[type], note: Callable[[Any, str, bool], object], reads: bool = True
) -> Iterator[None]:
    """Call `note` with the object, the name, and whether it is set, at every access to an attribute of such classes.

    Without `reads`, where one is set alone.
    """
    before: list[tuple[Any, str, Any]] = []
    me = threading.get_ident()

    def patch(kind: Any, method: str, is_set: bool) -> None:
        inherited: Any = getattr(kind, method)
        before.append((kind, method, vars(kind).get(method)))

        def noting(holder: Any, name: str, *value: Any) -> Any:
            if threading.get_ident() == me:
                note(holder, name, is_set)
            return inherited(holder, name, *value)

        setattr(kind, method, noting)

    try:
        for kind in dict.fromkeys(kinds):
            if kind.__flags__ & _IMMUTABLE or not kind.__flags__ & _MADE_IN_PYTHON:
                continue  # of the interpreter's own
            if reads:
                patch(kind, "__getattribute__", False)
            patch(kind, "__setattr__", True)
        yield
    finally:
        for kind, method, own in reversed(before):
            if own is None:
                delattr(kind, method)
            else:
                setattr(kind, method, own)
