"""Random numbers of Python and of NumPy: streams that belong to no device, and that no run of a graph draws from.

Each has one for the process; others are objects, which modules hold or their methods name.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

_PYTHON, _NUMPY = "Python's random numbers", "NumPy's random numbers"


def other_random_states() -> dict[str, Any]:
    """The states of the streams of the process, by name."""
    return {_PYTHON: random.getstate(), _NUMPY: comparable(np.random.get_state())}


class OtherRandomStates:
    """The states of the streams of the process, and of these `streams` that are objects, to be given back."""

    def __init__(self, streams: Iterable[Any] = ()) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._streams = [(stream, state_of(stream)) for stream in streams]

    def give_back(self) -> None:
        """Put all of them into the states that they had."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for stream, state in self._streams:
            set_state(stream, state)


@contextlib.contextmanager
def other_random_states_kept() -> Iterator[None]:
    """Give the streams of the process back as they were."""
    states = OtherRandomStates()
    try:
        yield
    finally:
        states.give_back()


# ---- streams that are objects ------------------------------------------------------------------------------


def is_stream(value: Any) -> bool:
    """Whether `value` draws random numbers of Python or NumPy, and has a state."""
    if isinstance(value, random.SystemRandom):
        return False
    return isinstance(value, (random.Random, np.random.RandomState, np.random.Generator))


def state_of(stream: Any) -> Any:
    """Its state, to be given back by `set_state`."""
    if isinstance(stream, random.Random):
        return stream.getstate()
    return stream.bit_generator.state if isinstance(stream, np.random.Generator) else stream.get_state()


def set_state(stream: Any, state: Any) -> None:
    """Put `stream` into this state."""
    if isinstance(stream, random.Random):
        stream.setstate(state)
    elif isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    else:
        stream.set_state(state)


def comparable(state: Any) -> Any:
    """The state in a form that ``==`` compares."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: comparable(part) for name, part in state.items()}
    return tuple(map(comparable, state)) if isinstance(state, tuple) else state


def methods_of(modules: Iterable[torch.nn.Module]) -> list[types.FunctionType]:
    """Those of the classes of these modules that are not PyTorch's."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    own = [kind for kind in kinds if kind is not object and kind.__module__.partition(".")[0] != "torch"]
    return [method for kind in own for method in vars(kind).values() if isinstance(method, types.FunctionType)]


def enclosed_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has in its closure, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty one
            yield name, cell.cell_contents


def streams_named_by(functions: Iterable[types.FunctionType]) -> dict[int, tuple[str, Any]]:
    """Streams that these have in their closures or name as globals: names and streams by identity."""
    named = [pair for function in dict.fromkeys(functions) for pair in _named_by(function)]
    return {id(value): (name, value) for name, value in named if is_stream(value)}


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from enclosed_by(function)
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
