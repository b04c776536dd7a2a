"""State that the first call of a module makes: buffers that it registers, codebooks that it starts from data.

No plan of a module before that call holds after it. It is found by two calls, which are taken back: what the first
changes, and the second does not. Where the first writes nothing at all, or nothing but averages of batch
normalisations, it is the only one.
"""

from __future__ import annotations

import contextlib
import enum
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from rkgb.capture.outliving import outliving
from rkgb.devices.out_of_memory import is_out_of_memory, out_of_memory_told
from rkgb.errors import ModelError, TraceError
from rkgb.ir.opaque import as_written
from rkgb.ir.sample import Sample
from rkgb.process.ranks import has_other_ranks
from rkgb.process.turns import TURNS
from rkgb.process.uncompiled import DispatchMode
from rkgb.recording.digest import digest
from rkgb.recording.record import call_saving_nothing
from rkgb.replay.fresh import offers
from rkgb.state.attributes import Snapshot, attributes_of
from rkgb.state.generators import GeneratorsMet, MeetingGenerators
from rkgb.state.module_state import for_planning, module_devices, state_kept
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.modules import BatchNorm
from rkgb.tree import attributes_of as parts_of
from rkgb.tree import is_tensor, leaves

_SHOWN = 3  # pieces of state named in a message
_ADVICE = (
    "Free some memory first, or give a smaller sample: the module is called once or twice, without gradients, to see "
    "what its first call makes."
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST_LOOKED_INTO = 20_000  # objects: a module may hold whole data sets
_WITHOUT_STATE = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, types.ModuleType)


@dataclass(eq=False, slots=True)
class FirstCall:
    """What the first call of a module makes."""

    module: torch.nn.Module
    sample: Sample
    # There are other buffers, or of other sizes, or others that require gradients, so that no plan could hold.
    is_structure: bool = False
    is_still: bool = False  # calls leave the module as it was, as far as can be seen of it
    made: list[str] = field(default_factory=list)  # in words; empty where calls are alike
    always_written: frozenset[torch.nn.Parameter] = frozenset()  # parameters that later calls write as well
    written: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)  # parameters, and what they were

    @property
    def words(self) -> str:
        """What it makes, for a message."""
        return ", ".join(self.made[:_SHOWN]) + (", …" if len(self.made) > _SHOWN else "")

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        """Within, the module is as after a first call on the sample. Everything is taken back."""
        with state_kept(self.module), self._parameters_given_back():
            with for_planning(self.module):
                call_saving_nothing(self.module, self.sample.copy())
            yield

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Errors of tracing within say what the first call makes, if it makes anything."""
        try:
            yield
        except TraceError as error:
            always = [name for name, parameter in self.module.named_parameters() if parameter in self.always_written]
            if always:
                error.add_note(
                    f"(Every forward of {type(self.module).__name__} writes into its parameter {always[0]!r}, so that "
                    "no two calls are alike: keep such values in buffers, or write them after the optimizer's step.)"
                )
            if self.made:
                error.add_note(
                    f"({type(self.module).__name__} is another module after its first call: its first call makes "
                    f"{self.words}. Call it once before, under torch.no_grad().)"
                )
            raise

    @contextlib.contextmanager
    def _parameters_given_back(self) -> Iterator[None]:
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in self.written.items():
                    if not torch.equal(parameter, value):
                        parameter.data.copy_(value)


@contextlib.contextmanager
def left_as_it_was(module: torch.nn.Module, sample: Sample) -> Iterator[FirstCall]:
    """Plan `module` within: parameters that its forward writes are given back afterwards. Tells of its first call.

    Raises `ModelError` where parameters have no shape yet.
    """
    refuse_lazy(module)
    first = FirstCall(module, sample)
    with TURNS.planning(module), first._parameters_given_back():
        if not has_other_ranks():  # what a forward says to them must be said by all
            _look(first)
        yield first


def is_lazy_module(module: torch.nn.Module) -> bool:
    """Whether some parameter or buffer of `module` has no shape before the first call."""
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def refuse_lazy(module: torch.nn.Module) -> None:
    """Raise `ModelError` where some parameter or buffer has no shape before the first call."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name!r} of {type(module).__name__} has no shape yet: the first call makes it. Call the module once, "
                "on the sample and under torch.no_grad(), before it is planned and before the optimizer is made."
            )


# ---- two calls -------------------------------------------------------------------------------------------


def _look(first: FirstCall) -> None:
    """Call the module twice, note what the first call alone changes, and take everything back."""
    watch = _Watch(first.module)
    doing = f"while {type(first.module).__name__} was called to see what a first call of it makes"
    try:
        with out_of_memory_told(doing, _ADVICE):
            _compare_calls(first, watch)
    except Exception as error:
        if is_out_of_memory(error):
            raise  # else tracing meets the same error, and says what is wrong
    finally:
        first.written = watch.before
    held = [*Snapshot(first.module.named_modules()).tensors(), *first.module.parameters(), *first.module.buffers()]
    outliving(watch.alive(), held)  # nothing stays in lists elsewhere; tracing says that it was put there


def _compare_calls(first: FirstCall, watch: _Watch) -> None:
    module = first.module
    met = GeneratorsMet(module)  # in closures, too
    kept = state_kept(module, module_devices(module, first.sample.tensors))
    with kept, for_planning(module), as_written(), met.given_back(), MeetingGenerators(met):
        states = [_State(module)]
        with watch:
            call_saving_nothing(module, first.sample.copy())
        states.append(_State(module))
        if states[0].is_untouched_in(states[1]) and not watch.before:
            first.is_still = True
            return  # a second call would find what the first did
        if not watch.before and states[0].is_as(states[1], but_for=_averages(module)):
            return  # which a second call would change again
        early = set(watch.before)
        watch.seen.clear()
        with watch:
            _call_on_other_data(module, first.sample)
        states.append(_State(module))
    first.always_written = frozenset(watch.seen)
    before, then, later = states
    first.is_still = before.is_as(then) and then.is_as(later) and not watch.before
    first.is_structure = before.structure != then.structure and then.structure == later.structure
    first.made = [
        *then.news(before.structure, then.structure, later.structure),
        *then.news(before.values, then.values, later.values),
        *(f"parameter {name!r}" for name, p in module.named_parameters() if p in early and p not in watch.seen),
    ]


def _averages(module: torch.nn.Module) -> frozenset[str]:
    """Names in a `_State` of what PyTorch's own batch normalisations average over all calls."""
    found = []
    for path, part in module.named_modules():
        if type(part).forward is BatchNorm.forward and part.training:
            dot = f"{path}." if path else ""
            found += [f"the value of buffer {dot + name!r}" for name in part._buffers]
    return frozenset(found)


def _call_on_other_data(module: torch.nn.Module, sample: Sample) -> None:
    """So that what is a function of the data alone is changed by this call, too."""
    for offer in offers(sample):
        try:
            call_saving_nothing(module, offer.of(sample, 1))
        except Exception as error:
            if is_out_of_memory(error):
                raise
        else:
            return


class _State:
    """What a module holds, in a form that can be compared."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.structure: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self._held: list[Any] = []  # so that no identity is given twice
        self._contents: dict[int, Any] = {}  # of what is no plain value, by identity
        self.is_known = True  # whether all of that can be looked into
        self._versions: dict[str, tuple[int, int]] = {}  # of buffers: they are written with what they held, too
        for path, part in module.named_modules():
            dot = f"{path}." if path else ""
            self.structure[f"the parts of {path or '(root)'!r}"] = tuple(part._modules)
            for kind, registered in (("parameter", part._parameters), ("buffer", part._buffers)):
                for name, tensor in registered.items():
                    words = f"{kind} {dot + name!r}"
                    facts = None if tensor is None else (tensor.requires_grad, tensor.dtype, tuple(tensor.shape))
                    self.structure[words] = facts
                    if kind == "buffer" and tensor is not None:
                        self.values[f"the value of {words}"] = digest(tensor.detach())
            for name, value in attributes_of(part).items():
                self.values[f"attribute {dot + name!r}"] = self._comparable(value)
                self._look_into(value)

    def _comparable(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return (type(value).__name__, value)
        if is_tensor(value):
            return digest(value.detach())
        self._held.append(value)
        return (type(value).__name__, id(value), len(leaves(value)))

    def is_as(self, other: _State, but_for: frozenset[str] = frozenset()) -> bool:
        """Whether the module was the same then, as far as can be seen: all that its attributes hold, too.

        Values of the names `but_for` may be others.
        """
        if self.structure != other.structure or self.values.keys() != other.values.keys():
            return False
        changed = {name for name, value in self.values.items() if other.values[name] != value}
        return changed <= but_for and self.is_known and other.is_known and self._contents == other._contents

    def is_untouched_in(self, later: _State) -> bool:
        """Whether nothing was even written since, as far as can be seen."""
        return self.is_as(later) and self._versions == later._versions

    def _look_into(self, value: Any) -> Any:
        """What stands for `value` in a comparison; what it holds is compared as well."""
        if isinstance(value, _PLAIN):
            return (type(value).__name__, value)
        key = id(value)
        self.is_known &= len(self._contents) < _MOST_LOOKED_INTO
        if key not in self._contents and self.is_known:
            self._contents[key] = None  # it may hold itself
            self._held.append(value)
            if is_tensor(value):
                found: Any = _version_of(value)
            elif isinstance(value, (list, tuple, set, frozenset)):
                found = (len(value), [self._look_into(item) for item in value])
            elif isinstance(value, dict):
                found = [(self._look_into(name), self._look_into(item)) for name, item in value.items()]
            elif isinstance(value, (torch.nn.Module, type, *_WITHOUT_STATE)):
                found = None
            else:
                held = parts_of(value)
                # Others may change where nobody sees it: iterators, and functions by what they enclose.
                self.is_known &= bool(held) or (callable(value) and not getattr(value, "__closure__", None))
                found = [(name, self._look_into(item)) for name, item in held.items()]
            self._contents[key] = found
        return key

    @staticmethod
    def news(before: dict[str, Any], then: dict[str, Any], later: dict[str, Any]) -> list[str]:
        """Names of what the first of two calls changes, and the second does not."""
        changed = [name for name in then if name not in before or before[name] != then[name]]
        return [name for name in changed if name in later and later[name] == then[name]]


def _version_of(tensor: torch.Tensor) -> int:
    """How often it was written; those of inference mode do not tell."""
    return -1 if tensor.is_inference() else tensor._version


class _Watch(DispatchMode):
    """Keeps a copy of each parameter that is about to be written in place, also through `.data`; sees what is made."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.seen: set[torch.nn.Parameter] = set()
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._parameters = {storage_key(parameter): parameter for parameter in module.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in leaves(given):
                    self._keep(tensor)
        result = func(*args, **kwargs)
        self._made += [weakref.ref(tensor) for tensor in leaves(result)]
        return result

    def alive(self) -> dict[str, torch.Tensor]:
        """What was made and is still there, by its place in the order."""
        found = {str(place): reference() for place, reference in enumerate(self._made)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _keep(self, tensor: torch.Tensor) -> None:
        parameter = self._parameters.get(storage_key(tensor)) if type(tensor) in _USUAL else None
        if parameter is not None:
            self.seen.add(parameter)
            if parameter not in self.before:
                self.before[parameter] = parameter.detach().clone()


_USUAL = (torch.Tensor, torch.nn.Parameter)
