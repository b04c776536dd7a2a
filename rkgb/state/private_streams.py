"""Random streams of PyTorch's own that no other thread draws from, for runs that are compared bit by bit.

PyTorch has one default generator for each device, and all threads of the process draw from it. Where another thread
does so meanwhile, two equal runs draw other numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from rkgb.process.turns import STREAMS
from rkgb.process.uncompiled import DispatchMode

_SEED = 1


class PrivateStreams(DispatchMode):
    """Context: operations of this thread that draw from the default generator of one of `devices` have streams of
    their own, which are in place while such an operation runs, and no longer.

    What another thread draws in just this moment still mixes with it: the stream then ends in another state than in an
    equal run.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators
        self._states: list[torch.Tensor] = []
        self.seed(_SEED)

    @property
    def states(self) -> list[torch.Tensor]:
        """The states of the streams, one for each generator."""
        return list(self._states)

    def seed(self, seed: int) -> None:
        """Start all streams from `seed`."""
        self._states = [
            torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self._generators
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with STREAMS:
            others = [generator.get_state() for generator in self._generators]
            self._put(self._states)
            try:
                return func(*args, **kwargs)
            finally:
                self._states = [generator.get_state() for generator in self._generators]
                self._put(others)

    def _put(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
