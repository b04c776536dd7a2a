"""Operations of a graph that stand for several, compiled to one: called, saved and repeated as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""
Compiled = Callable[[list[Any]], Sequence[Any]]
"""Compiled code: it is given a list, which it may empty, and returns what it makes."""


class AnySize(Protocol):
    """For which sizes code was compiled that is given them as numbers."""

    def holds(self, layouts: Sequence[Layout], numbers: tuple[int, ...]) -> bool:
        """Whether the code is right for inputs that lie so, where these are its numbers."""


class Handed(NamedTuple):
    """A tensor that the first operation of a region hands to the second."""

    dtype: torch.dtype
    layout: Callable[[Sequence[int]], Layout]  # given the numbers that stand for sizes


@dataclass(frozen=True, eq=False, slots=True)
class Kernels:
    """What an operation was compiled to, and how the two halves hand on values.

    Code for `any_size` is given the numbers that stand for sizes first.
    """

    forward: Compiled  # of all inputs: its outputs, then what is saved
    backward: Compiled | None  # of inputs that it reads, what was saved, and gradients; None where nothing has one
    read: tuple[int, ...]  # places of the inputs that the backward reads
    gradients: tuple[int | None, ...]  # for each input, the place of its gradient among what the backward returns
    tangents: tuple[int, ...]  # places of the outputs that have gradients, which lie as these outputs do
    saved: tuple[str, ...] = ()  # what the forward hands to the backward beside inputs, in words
    any_size: AnySize | None = None  # None where it was compiled for one set of sizes
    takes: tuple[int, ...] = ()  # of statistics: places of the region's inputs that they are computed from
    hands_on: tuple[Handed, ...] = ()  # of statistics: its first outputs, which the rest of the region is given


@dataclass(frozen=True, eq=False, slots=True)
class CompiledCall:
    """Calls several operations of a graph as one, on the tensors that they read from outside.

    It gives the tensors that are read outside: one by itself, or a list. There is one for all regions that are alike.
    Until it is built, the operations run one by one.

    Of two `kernels`, the first computes statistics of whole tensors, and the second the rest, which is given these. In
    a graph they are two operations, its `parts`: the rest is repeated without the statistics, which are small.
    """

    name: str
    digest: str  # equal for those that compute the same
    eager: Callable[..., list[torch.Tensor]]  # the operations themselves
    outputs: int
    kernels: list[Kernels] = field(default_factory=list)  # none until it is compiled
    numbers: list[int] = field(default_factory=list)  # that stand for its sizes, where its code is for any
    statistics: int = 0  # how many of its outputs, the last of them, are read by what writes running statistics alone
    parts: list[CompiledCall] = field(default_factory=list)  # of two kernels: each by itself

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def fingerprint(self) -> str:
        """Equal for those that compute, save and take the same, compiled by whichever release."""
        divided = [(kernels.takes, kernels.read, kernels.saved) for kernels in self.kernels]
        return f"{self.digest} {divided}"

    def __repr__(self) -> str:
        return f"<{self.name} {self.digest[:12]}>"

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if self.kernels:
            return self.at(self.numbers, inputs)
        return _one_or_all(self.eager(*inputs), self.outputs)

    def build(self, kernels: Sequence[Kernels], numbers: Sequence[int] = ()) -> None:
        """Run this code from now on; `numbers` stand for its sizes, where it is for any. Without any, it is unbuilt."""
        self.kernels[:], self.numbers[:] = kernels, numbers
        self.parts.clear()
        if len(kernels) == 2:
            first, rest = kernels
            counts = len(first.hands_on) + self.statistics, self.outputs - self.statistics
            for one, what, count in zip((first, rest), ("statistics", "rest"), counts, strict=True):
                names = f"{self.name}_{what}", f"{self.digest} {what}"
                self.parts.append(CompiledCall(*names, self.eager, count, [one], self.numbers))

    def at(self, numbers: Sequence[int], inputs: Sequence[torch.Tensor]) -> Any:
        """What its code gives, where these `numbers` stand for the sizes of its `inputs`."""
        if self.parts:
            return self._by_parts(numbers, inputs)
        kernels = self.kernels[0]
        if kernels.backward is not None and torch.is_grad_enabled():
            made = _Halves.apply(kernels, self.outputs, numbers, *inputs)  # type: ignore[no-untyped-call]
        else:  # the same code without gradients: other code might round otherwise
            made = kernels.forward([*numbers, *(one.detach() for one in inputs)])
        return _one_or_all(made, self.outputs)

    def _by_parts(self, numbers: Sequence[int], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        statistics, rest = self.parts
        kernels = self.kernels[0]
        found = statistics.at(numbers, [inputs[place] for place in kernels.takes])
        given, written = found[: len(kernels.hands_on)], found[len(kernels.hands_on) :]
        made = rest.at(numbers, [*inputs, *given])
        return [*([made] if rest.outputs == 1 else made), *written]


def _one_or_all(made: Sequence[torch.Tensor], count: int) -> Any:
    return made[0] if count == 1 else list(made[:count])


class _Halves(torch.autograd.Function):
    """The two halves of a compiled region, as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, count: int, numbers: Sequence[int], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made = kernels.forward([*numbers, *inputs])
        outputs, saved = tuple(made[:count]), made[count:]
        ctx.kernels, ctx.numbers = kernels, numbers
        ctx.tangents = [
            (tuple(one.shape), one.stride(), one.dtype) for one in map(outputs.__getitem__, kernels.tangents)
        ]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(inputs[place] for place in kernels.read), *saved)
        ctx.mark_non_differentiable(*(one for place, one in enumerate(outputs) if place not in kernels.tangents))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        kernels: Kernels = ctx.kernels
        saved = [*ctx.numbers, *ctx.saved_tensors]
        device = next(one for one in gradients if one is not None).device
        for place, (sizes, strides, dtype) in zip(kernels.tangents, ctx.tangents, strict=True):
            given = gradients[place]
            if given is None:
                given = torch.zeros((), dtype=dtype, device=device).expand(sizes)
            saved.append(_lying(given, sizes, strides))
        del gradients
        assert kernels.backward is not None
        made = kernels.backward(saved)
        return (None, None, None, *(None if place is None else made[place] for place in kernels.gradients))


def _lying(gradient: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The gradient with these strides, for which the backward was compiled."""
    if gradient.stride() == strides or all(
        size == 1 or mine == wanted for size, mine, wanted in zip(sizes, gradient.stride(), strides, strict=True)
    ):
        return gradient
    return torch.empty_strided(sizes, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
