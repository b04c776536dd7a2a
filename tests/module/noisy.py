"""Modules that draw from random generators of their own, and training that watches the generators' states."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from rockmate import Rockmate
from tests.module.models import ROWS, WIDTH, built, rows
from tests.module.steps import (
    assert_same_training,
    following,
    keep_every_other,
    keep_nothing,
    measured_for,
    train,
)
from tests.where import here

SHAPE = (ROWS, WIDTH)


class Noisy(nn.Module):
    """Draws between layers, by a function that is given the module and a value; `held` is kept as an attribute."""

    def __init__(self, draw: Callable[[Any, Tensor], Tensor], held: Any = None, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)
        self.draw, self.held = draw, held

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.sin(self.draw(self, self.dropout(F.gelu(layer(hidden)))))
        return hidden


class Bound:
    """An object that draws from what it holds."""

    __slots__ = ("generator",)

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def noise(self) -> Tensor:
        return torch.rand(SHAPE, generator=self.generator)


class Masking(torch.autograd.Function):
    """Draws inside, from a generator among its arguments; it runs whole, and is never repeated."""

    @staticmethod
    def forward(ctx, value, generator):
        mask = torch.rand(value.shape, generator=generator)
        ctx.save_for_backward(mask)
        return value * mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def masking_from(source: Callable[[], Generator]) -> type[torch.autograd.Function]:
    """The same, from a generator of which its arguments do not tell."""

    class Hidden(Masking):
        @staticmethod
        def forward(ctx, value):
            return Masking.forward(ctx, value, source())

        @staticmethod
        def backward(ctx, gradient):
            return Masking.backward(ctx, gradient)[0]

    return Hidden


def seeded(seed: int = 3) -> Generator:
    return Generator(here()).manual_seed(seed)


def noisy(draw: Callable[[Any, Tensor], Tensor], held: Any = None, depth: int = 2) -> Noisy:
    return built(Noisy, draw, held, depth)


def initialised(generator: Generator) -> Tensor:
    return nn.init.kaiming_uniform_(torch.empty(SHAPE), generator=generator)


# ---- what is drawn, from where: a function of the module and of a value; the generator is the attribute `held` ------

OPERATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rand": lambda m, x: x * torch.rand(x.shape, generator=m.held),
    "randn": lambda m, x: x + torch.randn(x.shape, generator=m.held, dtype=torch.double).float(),
    "bernoulli-in-place": lambda m, x: x * torch.empty_like(x).bernoulli_(0.7, generator=m.held),
    "bernoulli-of-data": lambda m, x: x * torch.bernoulli(x.detach().sigmoid(), generator=m.held),
    "normal-of-data": lambda m, x: x + torch.normal(x.detach(), 0.1, generator=m.held),
    "several-in-place": lambda m, x: x + torch.empty_like(x).normal_(generator=m.held).uniform_(generator=m.held),
    "in-place-on-activations": lambda m, x: (x * 2).log_normal_(generator=m.held) * x,
    "permutation": lambda m, x: x[torch.randperm(len(x), generator=m.held)],
    "positions": lambda m, x: x[torch.randint(len(x), (len(x),), generator=m.held)],
    "classes": lambda m, x: x * torch.multinomial(x.detach().softmax(-1), 1, generator=m.held),
    "initialisation": lambda m, x: x * initialised(m.held),
    "twice-with-others-between": lambda m, x: (
        x * torch.rand(x.shape, generator=m.held) + F.dropout(x) * torch.rand(x.shape, generator=m.held)
    ),
    "composite": lambda m, x: torch.rrelu(x, 0.1, 0.3, True, m.held),
    "function-with-an-argument": lambda m, x: Masking.apply(x.exp(), m.held).tanh(),
    "function-with-a-closure": lambda m, x: masking_from(lambda: m.held).apply(x.exp()).tanh(),
}

# Ways to hold a generator: what the attribute is made of it, and how the forward comes to its noise.
HELD: dict[str, tuple[Callable[[Generator], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda g: [None, g], lambda m: torch.rand(SHAPE, generator=m.held[1])),
    "nested": (lambda g: {"a": ({1: g},)}, lambda m: torch.rand(SHAPE, generator=m.held["a"][0][1])),
    "object": (Bound, lambda m: m.held.noise()),
    "namespace": (lambda g: SimpleNamespace(g=[g]), lambda m: torch.rand(SHAPE, generator=m.held.g[0])),
    "partial": (lambda g: functools.partial(torch.rand, SHAPE, generator=g), lambda m: m.held()),
    "method": (lambda g: Bound(g).noise, lambda m: m.held()),
    "in-a-circle": (lambda g: in_a_circle(g), lambda m: torch.rand(SHAPE, generator=m.held[1])),
}


def in_a_circle(generator: Generator) -> list[Any]:
    held: list[Any] = [None, generator]
    held[0] = held
    return held


# ---- training, with the states of generators ------------------------------------------------------------------------


def states(generators: Iterable[Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]


def assert_states(generators: Iterable[Generator], expected: list[Tensor]) -> None:
    for found, state in zip(states(generators), expected, strict=True):
        assert torch.equal(found, state), "a generator is in another state"


def trained(module: nn.Module, batches: list[Any], generators: list[Generator], begin: list[Tensor]) -> Any:
    """What `train` gives, from these states of `generators` on, and their states around each step."""
    for generator, state in zip(generators, begin, strict=True):
        generator.set_state(state)
    seen: list[list[Tensor]] = []

    def forward(*args: Any) -> Any:
        seen.append(states(generators))
        return module(*args)

    record = train(module, batches, forward=forward)
    return record, [*seen, states(generators)]


def assert_trains_exactly(
    model: Rockmate, eager: nn.Module, drawn: Callable[[nn.Module], list[Generator]], begin: list[Tensor]
) -> None:
    """A few steps of both, bit by bit; `drawn` tells of either module from which generators it draws."""
    batches = [rows(), rows(1), rows()]
    found, found_states = trained(model, batches, drawn(model), begin)
    expected, expected_states = trained(eager, batches, drawn(eager), begin)
    assert_same_training(found, expected)
    for one, other in zip(found_states, expected_states, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
    assert not torch.equal(found_states[0][0], found_states[-1][0]), "nothing was drawn: this compares nothing"


def assert_exact(network: nn.Module, drawn: Callable[[nn.Module], list[Generator]]) -> None:
    """The plans that keep least and every other activation; planning leaves all states as they were."""
    begin = states(drawn(network))
    eager = copy.deepcopy(network)
    measured = measured_for(network, rows())
    assert_states(drawn(network), begin)
    for plan in (keep_nothing, keep_every_other):
        model = following(measured, network, plan(measured))
        assert model.plan.recomputations > 0
        assert_trains_exactly(model, copy.deepcopy(eager), drawn, begin)
        network.load_state_dict(eager.state_dict())
