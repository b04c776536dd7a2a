"""Plain values that a forward reads from its modules and their configurations: a trace holds them as they were.

A rate of dropout, a scale, a flag such as ``config.use_cache``: none is a tensor, none is in the arguments. Which ones
a forward reads is watched while it runs once; a plan holds as long as these have the values that they had.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample
from rkgb.ir.opaque import as_written, is_compiled_wrapper
from rkgb.process.turns import warnings_collected
from rkgb.recording.record import call_saving_nothing
from rkgb.state.attributes import AttributeWrite, attributes_of
from rkgb.state.generators import GeneratorsMet, MeetingGenerators
from rkgb.state.module_state import module_state_kept, training_mode
from rockmate.guards.checkpointing import CHECKPOINTING_FLAGS

_MOST_ENTRIES = 64  # of a container that is compared: longer ones are data, not settings
_DEEPEST = 4  # containers within containers: deeper ones are data, or go in a circle
_SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_DEFAULTS = (*_SCALARS, *_CONTAINERS)
_OF_CLASS = "of the class"
_MADE_IN_PYTHON, _IMMUTABLE = 1 << 9, 1 << 8  # flags of types: only such classes can have their reads watched


class _Nothing(enum.Enum):
    """What stands for a value: there is none, or it is none that can be compared."""

    ABSENT = "nothing"
    OTHER = "something that cannot be compared"
    TENSOR = "a tensor"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that the forward reads: of a submodule, or of a configuration that a submodule holds."""

    path: str  # of the submodule, "" for the root
    configuration: str | None  # attribute of the submodule that holds the configuration; None if it holds the value
    name: str
    value: Any  # as `_comparable` or `_of_class` gives it
    has_tensors: bool = False  # or is one: then it is compared which ones these are
    written: tuple[Any, ...] = ()  # keys of a dictionary, names of a namespace, that the forward writes itself

    @property
    def key(self) -> tuple[str, str | None, str]:
        """Where it is."""
        return self.path, self.configuration, self.name

    @property
    def number(self) -> int | float | None:
        """The value where it is a number that the holder itself has; None where it is not."""
        if type(self.value) is int:
            return self.value
        if isinstance(self.value, tuple) and self.value[0] is float and not self.value[1].startswith("np."):
            return float(self.value[1])
        return None

    def __str__(self) -> str:
        return ".".join(part for part in (self.path, self.configuration, self.name) if part)


@dataclass(frozen=True, slots=True)
class Settings:
    """What one forward reads of a module's plain values, and the values that it found."""

    settings: tuple[Setting, ...]
    free: frozenset[tuple[str, str | None, str]] = (
        frozenset()
    )  # numbers that may be others: the code computes with them

    @property
    def but_for_free(self) -> Any:
        """Equal for settings that differ in numbers that are free."""
        return [
            (one.key, type(one.number) if one.key in self.free else one.value, one.has_tensors) for one in self.settings
        ]

    @property
    def by_place(self) -> dict[tuple[str, str | None, str], Setting]:
        """Equal for the same settings, in whichever order they were read."""
        return {one.key: one for one in self.settings}

    @classmethod
    def read_by(
        cls,
        module: torch.nn.Module,
        sample: Sample,
        writes: Iterable[AttributeWrite] = (),
        call: Callable[[torch.nn.Module, Sample], Any] = call_saving_nothing,
    ) -> Settings:
        """Run the forward once, without gradients, and note what it reads and leaves as it is. All is given back.

        What it is known to write is none of these. `call` runs it.
        """
        written = _Written(writes)
        met = GeneratorsMet(module)
        with (
            training_mode(module),
            module_state_kept(module),
            met.given_back(),
            MeetingGenerators(met),
            as_written(),
            warnings_collected(),  # of a run that nobody asked for
        ):
            holders = _holders(module)
            before = {
                key: (_values(holder, within := written.of(path, held_by)), _tensors(holder, within))
                for key, (holder, path, held_by) in holders.items()
            }
            reads: dict[tuple[int, str], None] = {}
            kinds: set[type] = {torch.nn.Module, *(type(holder) for holder, _, held_by in holders.values() if held_by)}
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(_reads_noted(kind, lambda holder, name: reads.setdefault((id(holder), name))))
                call(module, sample.copy())
            noted = [(*holders[key], name, *before[key]) for key, name in reads if key in holders]
            noted = [entry for entry in noted if _is_setting(entry[0], entry[3])]
            found = [
                Setting(path, held_by, name, value, bool(held), tuple(within.get(name, ())))
                for holder, path, held_by, name, values, tensors in noted
                if (within := written.of(path, held_by)).get(name) != _WHOLE
                and (value := _value(values, holder, name)) is not _Nothing.OTHER
                # What forward itself sets is none of ours.
                and value == _value(_values(holder, within), holder, name)
                and _same(held := tensors.get(name, []), _tensors(holder, within).get(name, []))
            ]
        return cls(tuple(found))

    @property
    def have_tensors(self) -> bool:
        """Whether tensors are among them that are neither parameters nor buffers: a plan has these very ones."""
        return any(setting.has_tensors for setting in self.settings)

    def bound_to(self, module: torch.nn.Module) -> BoundSettings:
        """These settings on `module`: the one whose forward was watched, or a copy of it."""
        return BoundSettings(self, module)


class BoundSettings:
    """Settings, and the module whose values are compared with them."""

    def __init__(self, settings: Settings, module: torch.nn.Module) -> None:
        self._module = module
        self._free = settings.free
        # Every submodule on the way to one with settings, after the one that holds it: (place of that, name).
        self._steps: list[tuple[int, str]] = []
        # Of each holder the settings with what it holds and what its class has now: what is the same object still
        # needs no closer look.
        self._holders: list[tuple[int, str | None, list[tuple[str, Setting, Any, Any]]]] = []
        self._tensors: dict[Setting, list[weakref.ref[torch.Tensor]]] = {}
        held: dict[tuple[str, str | None], list[Setting]] = {}
        for setting in settings.settings:
            held.setdefault((setting.path, setting.configuration), []).append(setting)
        places = {"": 0}
        for (path, configuration), there in held.items():
            place = self._place_of(path, places)
            holder: Any = module.get_submodule(path)
            if configuration is not None:
                holder = vars(holder)[configuration]
            self._holders.append((place, configuration, [self._entry(setting, holder) for setting in there]))

    def _place_of(self, path: str, places: dict[str, int]) -> int:
        if path not in places:
            parent, _, name = path.rpartition(".")
            self._steps.append((self._place_of(parent, places), name))
            places[path] = len(self._steps)
        return places[path]

    def _entry(self, setting: Setting, holder: Any) -> tuple[str, Setting, Any, Any]:
        value = _without(vars(holder).get(setting.name, _Nothing.ABSENT), setting.written)
        if setting.has_tensors:  # of this module: a copy of the one that was planned has others
            self._tensors[setting] = [weakref.ref(tensor) for tensor in _tensors_in(value)]
        of_class = getattr(type(holder), setting.name, _Nothing.ABSENT)
        now = _of_class(type(holder), setting.name) if value is _Nothing.ABSENT else _comparable(value)
        if now != setting.value:  # it differs from the start
            return setting.name, setting, _Nothing.OTHER, _Nothing.OTHER
        same = value if isinstance(value, (_Nothing, *_SCALARS, *_CODE)) else _Nothing.OTHER
        return setting.name, setting, same, of_class if not isinstance(of_class, _CONTAINERS) else _Nothing.OTHER

    def difference(self) -> str | None:
        """The first value that is not what it was, in words; None where all are. The module has the same parts."""
        # Found anew in every call: a part may have been replaced by one that differs in nothing but its settings.
        parts = [self._module]
        for parent, name in self._steps:
            part = parts[parent]._modules[name]
            assert part is not None, "parts are compared before"
            parts.append(part)
        absent = _Nothing.ABSENT
        for place, configuration, entries in self._holders:
            holder: Any = parts[place]
            if configuration is not None:
                holder = holder.__dict__.get(configuration)
            kind, values = type(holder), getattr(holder, "__dict__", {})
            for name, setting, same, same_of_class in entries:
                value = values.get(name, absent)
                if value is not same or (value is absent and getattr(kind, name, absent) is not same_of_class):
                    difference = self._difference(setting, kind, value)
                    if difference is not None:
                        return difference
        return None

    def _difference(self, setting: Setting, kind: type, value: Any) -> str | None:
        value = _without(value, setting.written)
        now = _of_class(kind, setting.name) if value is _Nothing.ABSENT else _comparable(value)
        if setting.key in self._free and type(value) is type(setting.number):
            return None
        if now != setting.value:
            return f"{setting} is {_shown(now)}, but was {_shown(setting.value)} when the module was planned"
        if setting.has_tensors and not self._holds_same_tensors(setting, value):
            return f"{setting} is another tensor than when the module was planned"
        return None

    def _holds_same_tensors(self, setting: Setting, value: Any) -> bool:
        return _same([then() for then in self._tensors[setting]], _tensors_in(value))


def _holders(module: torch.nn.Module) -> dict[int, tuple[Any, str, str | None]]:
    """By identity: submodules, and configurations with the attribute that holds them."""
    found: dict[int, tuple[Any, str, str | None]] = {}
    for path, submodule in module.named_modules():
        found[id(submodule)] = (submodule, path, None)
        for name, value in attributes_of(submodule).items():
            if _is_configuration(value):
                found.setdefault(id(value), (value, path, name))
    return found


def _is_configuration(value: Any) -> bool:
    """Whether an object is there for the values that it holds: by its name, or as it holds nothing else."""
    kind = type(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, *_SCALARS, *_CODE, *_CONTAINERS)) or callable(value):
        return False
    if not hasattr(value, "__dict__"):
        return False
    if kind.__name__.endswith("Config"):
        return True
    held = vars(value)
    is_plain = bool(kind.__flags__ & _MADE_IN_PYTHON) and not kind.__flags__ & _IMMUTABLE
    return is_plain and 0 < len(held) <= _MOST_ENTRIES and all(_is_plain(part) for part in held.values())


def _is_plain(value: Any) -> bool:
    return _comparable(value) is not _Nothing.OTHER and not _tensors_in(value)


_WHOLE: frozenset[Any] = frozenset({...})  # in the place of keys: an attribute is written itself


class _Written:
    """What a forward writes itself, by where it is held."""

    def __init__(self, writes: Iterable[AttributeWrite]) -> None:
        self._keys: dict[tuple[Any, ...], dict[Any, frozenset[Any]]] = {}
        for write in writes:
            keys = [step.key for step in write.steps]
            for length in range(len(keys)):  # of a module, or of a configuration that it holds
                *holder, name = (write.path, *keys[: length + 1])
                within = self._keys.setdefault(tuple(holder), {})
                more = _WHOLE if length + 1 == len(keys) else frozenset({keys[length + 1]})
                within[name] = _WHOLE if _WHOLE in (more, within.get(name)) else within.get(name, frozenset()) | more

    def of(self, path: str, configuration: str | None) -> dict[Any, frozenset[Any]]:
        """By attribute of what is held there, the keys of a dictionary, or `_WHOLE`."""
        return self._keys.get((path,) if configuration is None else (path, configuration), {})


def _without(value: Any, written: Iterable[Any]) -> Any:
    """A dictionary or namespace without what the forward writes in it; anything else as it is."""
    if not written or not isinstance(value, (dict, types.SimpleNamespace)):
        return value
    content = value if isinstance(value, dict) else vars(value)
    return {key: item for key, item in content.items() if key not in written}


def _tensors(holder: Any, written: dict[Any, frozenset[Any]]) -> dict[str, list[torch.Tensor]]:
    """By attribute of a module, where there are any. Held here, so that no other one can come in their places."""
    if not isinstance(holder, torch.nn.Module):
        return {}
    return {
        name: held
        for name, value in attributes_of(holder).items()
        if (held := _tensors_in(_without(value, written.get(name, ()))))
    }


def _tensors_in(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Those that `_comparable` puts a word in the place of, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, _CONTAINERS) or depth == _DEEPEST or len(value) > _MOST_ENTRIES:
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in _tensors_in(part, depth + 1)]


def _same(tensors: Sequence[torch.Tensor | None], others: list[torch.Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


def _values(holder: Any, written: dict[Any, frozenset[Any]]) -> dict[str, Any]:
    """Copies, so that a list that grows in the forward is seen to."""
    attributes = attributes_of(holder) if isinstance(holder, torch.nn.Module) else vars(holder)
    return {name: _comparable(_without(value, written.get(name, ()))) for name, value in attributes.items()}


def _value(values: dict[str, Any], holder: Any, name: str) -> Any:
    return values[name] if name in values else _of_class(type(holder), name)


def _of_class(kind: type, name: str) -> Any:
    """What a class gives its instances that have nothing of their own under this name, such as a method.

    Methods and properties that compute something are not compared: what they read is.
    """
    value = getattr(kind, name, _Nothing.ABSENT)
    if isinstance(value, _DEFAULTS):
        return (_OF_CLASS, _comparable(value))
    return _Nothing.ABSENT


def _is_setting(holder: Any, name: str) -> bool:
    """Parameters, buffers, submodules, hooks and modes are compared elsewhere; Python's own names are not settings.

    Nor is checkpointing of the module's own: it changes no value, and no plan has it.
    """
    if not isinstance(holder, torch.nn.Module):
        return True
    if is_compiled_wrapper(holder):
        return False
    registered = (holder._parameters, holder._buffers, holder._modules, vars(torch.nn.Module()))
    own_affair = name[:2] == "__" or name in ("_call_impl", "_compiled_call_impl") or name in CHECKPOINTING_FLAGS
    return not own_affair and not any(name in names for names in registered)


@contextlib.contextmanager
def _reads_noted(kind: type, note: Callable[[Any, str], object]) -> Iterator[None]:
    """Call `note` with the object and the name of every attribute that is read of an instance of `kind`."""
    own = vars(kind).get("__getattribute__")
    inherited: Any = kind.__getattribute__

    me = threading.get_ident()

    def noting(holder: Any, name: str) -> Any:
        if threading.get_ident() == me:
            note(holder, name)
        return inherited(holder, name)

    any_kind: Any = kind
    any_kind.__getattribute__ = noting
    try:
        yield
    finally:
        if own is None:
            del any_kind.__getattribute__
        else:
            any_kind.__getattribute__ = own


def _comparable(value: Any, depth: int = 0) -> Any:
    """A value that equals another's exactly where the two are of one type and equal; what is no setting is `OTHER`."""
    if isinstance(value, bool):
        return (bool, value)  # True is not 1
    if isinstance(value, float):
        return (float, repr(value))  # 1.0 is not 1, and a NaN is itself
    if isinstance(value, (*_SCALARS, *_CODE)):
        return value
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):  # those are compared elsewhere
        return _Nothing.TENSOR
    if depth == _DEEPEST:
        return _Nothing.OTHER
    if type(value) is types.SimpleNamespace:  # whose reads cannot be watched; those of a class made of it can
        value = vars(value)
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MOST_ENTRIES:
        return _container(type(value), value, depth)
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return _container(dict, (part for entry in value.items() for part in entry), depth)
    return _Nothing.OTHER


def _container(kind: type, parts: Iterable[Any], depth: int) -> Any:
    parts = [_comparable(part, depth + 1) for part in parts]
    if any(part is _Nothing.OTHER for part in parts):
        return _Nothing.OTHER
    return (kind, frozenset(parts) if issubclass(kind, (set, frozenset)) else tuple(parts))


def _shown(value: Any) -> str:
    if isinstance(value, _Nothing):
        return value.value
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        held = value[1]
        if value[0] is _OF_CLASS:
            return _shown(held)
        return f"[{', '.join(map(_shown, held))}]" if isinstance(held, (tuple, frozenset)) else str(held)
    return getattr(value, "__qualname__", None) or repr(value)
