"""Random generators of the user's own: which of them a forward draws from, and where its module holds them."""

from __future__ import annotations

import contextlib
import functools
import keyword
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rkgb.errors import TraceError
from rkgb.process.uncompiled import DispatchMode
from rkgb.state.attributes import attributes_of as attributes_of_module
from rkgb.torch_private.identity import generator_key
from rkgb.tree import attributes_of, leaves


class _Step(NamedTuple):
    """From one object to what it holds."""

    key: str | int
    is_item: bool  # of a list, a tuple or a dictionary; else an attribute


@dataclass(frozen=True, eq=False, slots=True)
class OwnGenerator:
    """A random generator of the user's own, as it stands in the arguments of calls.

    There is one for each generator of a trace. A copy of the module has a copy of what its attributes hold, and
    shares all else, such as what a closure or a global holds: `in_module` follows that.
    """

    name: str  # with a space in it, so that no value of a graph has it
    generator: torch.Generator  # of the module that was traced
    module_path: str = ""  # of the submodule that holds it
    steps: tuple[_Step, ...] = ()  # from there; none where no module is known to hold it

    @property
    def text(self) -> str:
        """How Python reads it from the submodule that holds it: ``.generators[0]``."""
        return "".join(f"[{step.key!r}]" if step.is_item else f".{step.key}" for step in self.steps)

    def in_module(self, module: torch.nn.Module) -> torch.Generator:
        """The generator that stands for this one in `module`, the one that was traced or a copy of it.

        Raises `TraceError` where there is none.
        """
        if not self.steps:
            return self.generator
        held: Any = module.get_submodule(self.module_path)
        with contextlib.suppress(AttributeError, LookupError, TypeError):
            for step in self.steps:
                held = held[step.key] if step.is_item else getattr(held, str(step.key))
        if not isinstance(held, torch.Generator):
            raise TraceError(
                f"forward drew from the random {self.name} when it was traced, and there is none now. Put the "
                "generator back, or plan the module again."
            )
        return held

    def __repr__(self) -> str:
        return f"<{self.name}>"


def is_generator(leaf: object) -> bool:
    """Whether `leaf` is a random generator."""
    return isinstance(leaf, torch.Generator)


def is_own_generator(leaf: object) -> bool:
    """Whether `leaf` is an `OwnGenerator`."""
    return isinstance(leaf, OwnGenerator)


class GeneratorsMet:
    """The generators that a forward has been seen to draw from, with their states from before it first did."""

    def __init__(self, module: torch.nn.Module) -> None:
        # From before the forward: what it sets itself is taken back, and is in no place when a graph runs.
        self._attributes = [(path, attributes_of_module(submodule)) for path, submodule in module.named_modules()]
        self._known: dict[int, OwnGenerator] = {}  # by address
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []

    @property
    def found(self) -> tuple[OwnGenerator, ...]:
        """All so far, in the order in which they were met."""
        return tuple(self._known.values())

    def meet(self, arguments: Any) -> None:
        """Note the generators in the arguments of a call that is about to run."""
        for generator in leaves(arguments, is_generator):
            if _address(generator) not in self._known:
                self._states.append((generator, generator.get_state()))
                self._known[_address(generator)] = self._placed(generator)

    def own(self, generator: torch.Generator) -> OwnGenerator:
        """What stands for `generator`. Raises `TraceError` if it has not been met: another run had another one."""
        if _address(generator) not in self._known:
            raise TraceError(
                "forward draws from a random generator that it makes anew in every call: the graph would go on with "
                "the one of its trace. Make the generator once, and keep it as an attribute of the module."
            )
        return self._known[_address(generator)]

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """Give those that are met inside their states back afterwards."""
        try:
            yield
        finally:
            for generator, state in self._states:
                generator.set_state(state)

    @contextlib.contextmanager
    def as_now(self) -> Iterator[None]:
        """Give those that are known, or are met inside, the states back that they had before what runs inside."""
        now = [(own.generator, own.generator.get_state()) for own in self._known.values()]
        known = len(self._states)
        try:
            yield
        finally:
            for generator, state in (*now, *self._states[known:]):
                generator.set_state(state)

    def _placed(self, generator: torch.Generator) -> OwnGenerator:
        for path, attributes in self._attributes:
            for steps, held in _held_in(attributes):
                if _address(held) == _address(generator):
                    found = OwnGenerator("", held, path, steps)
                    return replace(found, name=f"generator {f'{path}{found.text}'.lstrip('.')}")
        return OwnGenerator(f"generator {len(self._known)}", generator)


class MeetingGenerators(DispatchMode):
    """Meets the generators of what runs inside, and lets it run."""

    def __init__(self, met: GeneratorsMet) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._met = met

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._met.meet((args, kwargs))
        return func(*args, **(kwargs or {}))


def _address(generator: torch.Generator) -> int:
    """Of the C++ object: PyTorch makes a new Python object whenever it hands a generator out."""
    return generator_key(generator)


def generators_for(module: torch.nn.Module, own: Iterable[OwnGenerator]) -> list[torch.Generator]:
    """Those that a run of `module` may draw from, the one that was traced or a copy, and those of the trace."""
    found = [generator for one in own for generator in (one.in_module(module), one.generator)]
    return list({_address(generator): generator for generator in found}.values())


def _held_in(attributes: dict[str, Any]) -> Iterator[tuple[tuple[_Step, ...], torch.Generator]]:
    """Generators in the attributes of one module, the shortest way to each first."""
    waiting: deque[tuple[tuple[_Step, ...], Any]] = deque(((step,), held) for step, held in _by_name(attributes))
    seen: set[int] = set()
    while waiting:
        steps, held = waiting.popleft()
        if isinstance(held, torch.Generator):
            yield steps, held
        elif id(held) not in seen:
            seen.add(id(held))
            waiting.extend(((*steps, step), part) for step, part in _parts_of(held))


def _parts_of(held: Any) -> Iterator[tuple[_Step, Any]]:
    """What copies of `held` have copies of: items, attributes, and what a partial function or a method is bound to."""
    if isinstance(held, list | tuple):
        yield from ((_Step(index, True), item) for index, item in enumerate(held))
    elif isinstance(held, dict):
        yield from ((_Step(key, True), item) for key, item in held.items() if isinstance(key, str | int))
    elif isinstance(held, functools.partial):
        yield from _by_name({name: getattr(held, name) for name in ("func", "args", "keywords")})
    elif isinstance(held, types.MethodType):
        yield from _by_name({"__self__": held.__self__})
    else:
        yield from _by_name(attributes_of(held))


def _by_name(attributes: dict[str, Any]) -> Iterator[tuple[_Step, Any]]:
    """Those that generated code can name."""
    for name, held in attributes.items():
        if name.isidentifier() and not keyword.iskeyword(name):
            yield _Step(name, False), held
