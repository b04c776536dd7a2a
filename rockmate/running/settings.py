"""Plain values that a forward reads from its modules and their configurations: a trace holds them as they were.

A rate of dropout, a scale, a flag such as ``config.use_cache``: none is a tensor, none is in the arguments. Which ones
a forward reads is watched while it runs once; a plan holds as long as these have the values that they had.
"""

from __future__ import annotations

import contextlib
import enum
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rkgb import Sample
from rkgb.state import borrowed, training_mode
from rkgb.tracing.generators import GeneratorsMet, MeetingGenerators
from rkgb.tracing.opaque import as_written, is_compiled_wrapper
from rkgb.tracing.side_effects import attributes_of
from rockmate.running.checkpointing import CHECKPOINTING_FLAGS

_MOST_ENTRIES = 64  # of a container that is compared: longer ones are data, not settings
_DEEPEST = 4  # containers within containers: deeper ones are data, or go in a circle
_SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType)


class _Nothing(enum.Enum):
    """What stands for a value: there is none, or it is none that can be compared."""

    ABSENT = "nothing"
    OTHER = "something that cannot be compared"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that the forward reads: of a submodule, or of a configuration that a submodule holds."""

    path: str  # of the submodule, "" for the root
    configuration: str | None  # attribute of the submodule that holds the configuration; None if it holds the value
    name: str
    value: Any  # as `_comparable` gives it

    def __str__(self) -> str:
        return ".".join(part for part in (self.path, self.configuration, self.name) if part)


@dataclass(frozen=True, slots=True)
class Settings:
    """What one forward reads of a module's plain values, and the values that it found."""

    settings: tuple[Setting, ...]

    @classmethod
    def read_by(cls, module: torch.nn.Module, sample: Sample) -> Settings:
        """Run the forward once, without gradients, and note what it reads and leaves as it is. All is given back."""
        met = GeneratorsMet(module)
        with (
            training_mode(module),
            borrowed(module),
            met.given_back(),
            MeetingGenerators(met),
            torch.no_grad(),
            as_written(),
            warnings.catch_warnings(action="ignore"),  # of a run without gradients, which nobody asked for
        ):
            holders = _holders(module)
            before = {key: _values(holder) for key, (holder, *_) in holders.items()}
            reads: dict[tuple[int, str], None] = {}
            kinds: set[type] = {torch.nn.Module, *(type(holder) for holder, _, held_by in holders.values() if held_by)}
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(_reads_noted(kind, lambda holder, name: reads.setdefault((id(holder), name))))
                sample.copy().call(module)
            noted = [(*holders[key], name, before[key]) for key, name in reads if key in holders]
            noted = [entry for entry in noted if _is_setting(entry[0], entry[3])]
            found = [
                Setting(path, held_by, name, value)
                for holder, path, held_by, name, values in noted
                if (value := _value(values, name, held_by)) is not _Nothing.OTHER
                and value == _value(_values(holder), name, held_by)  # what forward itself sets is none of ours
            ]
        return cls(tuple(found))

    def bound_to(self, module: torch.nn.Module) -> BoundSettings:
        """These settings on `module`: the one whose forward was watched, or a copy of it."""
        return BoundSettings(self, module)


class BoundSettings:
    """Settings, and the module whose values are compared with them."""

    def __init__(self, settings: Settings, module: torch.nn.Module) -> None:
        submodules = dict(module.named_modules())
        self._entries: list[tuple[Setting, dict[str, Any]]] = []
        for setting in settings.settings:
            holder: Any = submodules[setting.path]
            if setting.configuration is not None:
                holder = getattr(holder, setting.configuration)
            self._entries.append((setting, vars(holder)))

    def difference(self) -> str | None:
        """The first value that is not what it was, in words; None where all are."""
        for setting, values in self._entries:
            value = values.get(setting.name, _Nothing.ABSENT)
            if value is setting.value:
                continue
            now = _comparable(value)
            if now != setting.value:
                return f"{setting} is {_shown(now)}, but was {_shown(setting.value)} when the module was planned"
        return None


def _holders(module: torch.nn.Module) -> dict[int, tuple[Any, str, str | None]]:
    """By identity: submodules, and configurations with the attribute that holds them."""
    found: dict[int, tuple[Any, str, str | None]] = {}
    for path, submodule in module.named_modules():
        found[id(submodule)] = (submodule, path, None)
        for name, value in attributes_of(submodule).items():
            if type(value).__name__.endswith("Config") and hasattr(value, "__dict__"):
                found.setdefault(id(value), (value, path, name))
    return found


def _values(holder: Any) -> dict[str, Any]:
    """Copies, so that a list that grows in the forward is seen to."""
    attributes = attributes_of(holder) if isinstance(holder, torch.nn.Module) else vars(holder)
    return {name: _comparable(value) for name, value in attributes.items()}


def _value(values: dict[str, Any], name: str, held_by: str | None) -> Any:
    """Of a configuration, what is not in it is a method or a property of others that are."""
    return values.get(name, _Nothing.OTHER if held_by else _Nothing.ABSENT)


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

    def noting(holder: Any, name: str) -> Any:
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
    if depth == _DEEPEST:
        return _Nothing.OTHER
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
        return f"[{', '.join(map(_shown, held))}]" if isinstance(held, (tuple, frozenset)) else str(held)
    return getattr(value, "__qualname__", None) or repr(value)
