"""A model to train, and a way to train it: what every module of this package speaks of."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.families import Family
from rockmate import PeakMemory
from rockmate.planning.plan import Plan

Forward = Callable[..., Any]
SEED = 0  # of each step
Block = tuple[str, ...]  # paths of the submodules that are run one after the other, mostly one
Chains = tuple[tuple[Block, ...], ...]


class NotForThisModel(Exception):
    """A way to train that this model, device or installation has no place for; the message says why."""


@dataclass(frozen=True)
class Case:
    """A model in training mode with one batch. The model itself is never run: every way to train has a copy."""

    name: str
    model: nn.Module
    sample: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], Tensor]
    chains: Chains  # of blocks; each one in a chain takes the output of the one before, and else the same arguments
    shares: tuple[float, ...] = (0.7, 0.5, 0.4, 0.3, 0.2)  # of the eager peak, for which we plan

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order."""
        return tuple(block for chain in self.chains for block in chain)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """That of the model's parameters."""
        return next(self.model.parameters()).dtype

    def fresh_model(self) -> nn.Module:
        """A copy in the first state. Its parameters are objects of its own, over one memory, which no step writes."""
        memo: dict[int, Any] = {
            id(value): nn.Parameter(value.detach(), value.requires_grad) for value in self.model.parameters()
        }
        return copy.deepcopy(self.model, memo)

    def forward(self, function: Forward) -> Any:
        """The output of `function`, which is called as the model is."""
        return function(**self.sample) if isinstance(self.sample, Mapping) else function(*self.sample)

    def step(self, function: Forward) -> None:
        """Forward, loss and backward, always with the same random numbers; leaves the gradients."""
        torch.manual_seed(SEED)
        output = self.forward(function)
        loss = self.loss(output)
        loss.backward()


@dataclass
class Built:
    """A way to train one model, ready for its first step."""

    weights: nn.Module  # where gradients and buffers are
    call: Forward
    plan: Plan | None = None
    first_step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # around the first step alone
    note: str = ""
    own_numbers: bool = False  # whether it draws other random numbers than eager does, or adds in another order


def peak_of(case: Case, built: Built) -> int:
    """Exact peak of a step above what was resident before it, gradients included, of which none is left."""
    gc.collect()
    with PeakMemory(case.device) as memory:
        case.step(built.call)
    built.weights.zero_grad(set_to_none=True)
    return memory.peak_bytes


def peak_of_eager(case: Case) -> int:
    """The exact peak of an eager step, which is made once before: libraries keep what they take in the first."""
    model = case.fresh_model()
    case.step(model)
    return peak_of(case, Built(model, model))


@dataclass(frozen=True)
class Peer:
    """A way to train, not yet of a model. `build` takes the case and the bytes of the eager step's peak."""

    label: str
    family: Family
    build: Callable[[Case, int], Built]
    share: float | None = None  # of the eager peak, where a budget is given


def at_each(
    shares: tuple[float, ...], label: str, family: Family, build: Callable[..., Built], **settings: object
) -> tuple[Peer, ...]:
    """What `build` makes with these settings at each of these shares of the eager peak. A label may say ``{share}``."""
    return tuple(
        Peer(label.format(share=f"{share:.2f}"), family, functools.partial(build, share=share, **settings), share)
        for share in shares
    )
