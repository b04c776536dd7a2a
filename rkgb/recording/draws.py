"""Whether what a forward does goes by random numbers of Python or NumPy that it draws.

A graph holds them for constants: they are those of the trace in every run. Where anything goes by them, the submodule
that draws has to run by itself. Others decide nothing, such as ``random.uniform(0, 1) < self.layerdrop`` where that is
0: these are told.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rkgb.ir.sample import Sample
from rkgb.process.turns import replaced_here
from rkgb.recording.digest import digest
from rkgb.recording.record import call_saving_nothing
from rkgb.state.attributes import Snapshot
from rkgb.state.module_state import module_state_kept
from rkgb.state.other_random import other_random_states, other_random_states_kept
from rkgb.state.side_effects import Unrepeatable
from rkgb.tree import leaves

_EXTREMES = (0.0, 0.5, 1.0 - 2.0**-24)  # of numbers between 0 and 1: whichever side of a threshold they may be on
_SEEDS = (1, 2)
_IDLE_S = 0.05  # at least, to see whether other threads draw
_BETWEEN_TWO = ((random, ("random", "uniform")), (np.random, ("random", "random_sample", "rand", "uniform")))
_NO_DRAWS = ("getstate", "setstate", "get_state", "set_state", "default_rng")
_Inside = contextlib.AbstractContextManager[Any]


class OtherRandom(Unrepeatable):
    """What a forward computes goes by random numbers of Python or NumPy."""

    def __init__(self, path: str, name: str) -> None:
        instead = "let its call be one operation (opaque=[it])" if path else "move what draws into a submodule"
        super().__init__(
            f"forward of submodule {path or '(root)'!r} draws from {name}, and what it computes may go by them: a run "
            "of the graph would have those of the trace at every call. Draw with torch.rand, and decide in tensors "
            f"(torch.where); or {instead}. Where they drop layers or mask data, a setting may switch that off, such as "
            "layerdrop=0.",
            path,
        )


def refuse_draws_from_objects(drawn: Mapping[str, str]) -> None:
    """Raise `OtherRandom` for draws from streams that are objects: by the path of the submodule, what it draws from.

    Whether they decide anything is not asked: numbers that do so once in a hundred calls look as if they did not, and
    of objects, what they draw cannot be replaced to see.
    """
    if drawn:
        raise OtherRandom(*next(iter(drawn.items())))


def told_of_draws(drawn: Mapping[str, str], module: torch.nn.Module, sample: Sample) -> list[str]:
    """What to tell of draws that decide nothing. `drawn` has the name of the stream by the path of the submodule.

    Calls the module some more times, and takes everything back. Raises `OtherRandom` where what it does goes by them.
    What another thread has drawn meanwhile is no draw of the module's.
    """
    forward = _Forward(module, sample)
    if threading.active_count() > 1 and not forward.draws():
        return []
    if forward.goes_by_draws():
        raise OtherRandom(*next(iter(drawn.items())))
    return [
        f"submodule {path or '(root)'!r} draws from {name}, which decides nothing as it is set: a planned call does "
        "not draw, so that they go on otherwise than without a plan."
        for path, name in drawn.items()
    ]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one call leaves, in a form that compares."""

    results: tuple[Any, ...]
    moved: bool  # whether the streams have
    end: dict[str, Any]  # their states


@dataclass(frozen=True, slots=True)
class _Forward:
    module: torch.nn.Module
    sample: Sample

    def draws(self) -> bool:
        """Whether it does so itself, while other threads may draw as well."""
        began = time.perf_counter()
        if not all(self._seen(_seeded(_SEEDS[0])).moved for _ in range(3)):
            return False
        if not _move_by_themselves(time.perf_counter() - began):
            return True
        one, other = (self._seen(_seeded(seed)) for seed in _SEEDS)
        return one.results != other.results or self._is_seen_to_draw()

    def _is_seen_to_draw(self) -> bool:
        drawn: list[str] = []
        with contextlib.ExitStack() as stack:
            for holder in (random, np.random):
                for name in holder.__all__:
                    function = getattr(holder, name)
                    if callable(function) and not isinstance(function, type) and name not in _NO_DRAWS:
                        stack.enter_context(replaced_here(holder, name, _noting(function, drawn)))
            self._seen(contextlib.nullcontext())
        return bool(drawn)

    def goes_by_draws(self) -> bool:
        """Whether anything that can be seen of a call may be another with other numbers."""
        extreme = [self._seen(_drawn_between_two(share)) for share in _EXTREMES]
        if not any(seen.moved for seen in extreme):  # there were no others
            return any(seen.results != extreme[0].results for seen in extreme)
        # It may set the seed itself, and so draw the same at every call.
        one, other = (self._seen(_seeded(seed)) for seed in _SEEDS)
        return one.results != other.results or one.end != other.end

    def _seen(self, inside: _Inside) -> _Seen:
        with module_state_kept(self.module), inside:
            before = other_random_states()
            output = call_saving_nothing(self.module, self.sample.copy())
            end = other_random_states()
            held = [*self.module.buffers(), *Snapshot(self.module.named_modules()).tensors()]
            results = tuple((tuple(t.shape), t.dtype, digest(t.detach())) for t in (*leaves(output), *held))
        return _Seen(results, end != before, end)


def _move_by_themselves(seconds: float) -> bool:
    """Whether the streams move while this thread draws nothing."""
    before = other_random_states()
    time.sleep(max(_IDLE_S, seconds))
    return other_random_states() != before


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    random.seed(seed)
    np.random.seed(seed)
    yield


def _noting(function: Any, drawn: list[str]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        drawn.append(function.__name__)
        return function(*args, **kwargs)

    return noting


@contextlib.contextmanager
def _drawn_between_two(share: float) -> Iterator[None]:
    """Functions that draw between two bounds give what is at that share of the way, and draw nothing."""
    with contextlib.ExitStack() as stack:
        for holder, names in _BETWEEN_TWO:
            for name in names:
                stack.enter_context(replaced_here(holder, name, _giving(getattr(holder, name), share)))
        yield


def _giving(function: Any, share: float) -> Any:
    def giving(*args: Any, **kwargs: Any) -> Any:
        with other_random_states_kept():
            drawn = function(*args, **kwargs)  # of the right type and shape
        bounds: Any = (0.0, 1.0)
        if function.__name__ == "uniform":
            given = [*args[:2], *(kwargs[name] for name in ("a", "low", "b", "high") if name in kwargs)]
            bounds = (given[0] if given else 0.0, given[1] if len(given) > 1 else 1.0)
        value = bounds[0] + (np.asarray(bounds[1]) - bounds[0]) * share
        return np.broadcast_to(value, drawn.shape).copy() if isinstance(drawn, np.ndarray) else float(value)

    return giving
