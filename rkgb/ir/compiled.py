"""Operations of a graph that stand for several, compiled to one: called, saved and repeated as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

Strides = tuple[int, ...]
Compiled = Callable[[list[Any]], Sequence[Any]]
"""Compiled code: it is given a list, which it may empty, and returns what it makes."""


class Tangent(NamedTuple):
    """The gradient of an output, as compiled code takes it."""

    place: int  # of the output
    sizes: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Kernels:
    """What a region was compiled to, and how the two halves hand on values."""

    forward: Compiled  # of all inputs: its outputs, then what is saved
    backward: Compiled | None  # of inputs that it reads, what was saved, and gradients; None where nothing has one
    read: tuple[int, ...]  # places of the inputs that the backward reads
    gradients: tuple[int | None, ...]  # for each input, the place of its gradient among what the backward returns
    tangents: tuple[Tangent, ...]  # of the outputs that have gradients
    saved: tuple[str, ...] = ()  # what the forward hands to the backward beside inputs, in words


@dataclass(frozen=True, eq=False, slots=True)
class CompiledCall:
    """Calls several operations of a graph as one, on the tensors that they read from outside.

    It gives the tensors that are read outside: one by itself, or a list. There is one for all regions that are alike.
    Until it is `built`, the operations run one by one.
    """

    name: str
    digest: str  # equal for those that compute the same
    eager: Callable[..., list[torch.Tensor]]  # the operations themselves
    outputs: int
    kernels: list[Kernels] = field(default_factory=list)  # none until it is compiled

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def fingerprint(self) -> str:
        """Equal for those that compute, save and take the same, compiled by whichever release."""
        divided = [(kernels.read, kernels.saved) for kernels in self.kernels]
        return f"{self.digest} {divided}"

    def __repr__(self) -> str:
        return f"<{self.name} {self.digest[:12]}>"

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if self.kernels:
            made = self._compiled(self.kernels[0], inputs)
        else:
            made = self.eager(*inputs)
        return made[0] if self.outputs == 1 else list(made)

    def _compiled(self, kernels: Kernels, inputs: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        if kernels.backward is not None and torch.is_grad_enabled():
            made: tuple[torch.Tensor, ...] = _Halves.apply(self, *inputs)  # type: ignore[no-untyped-call]
            return made
        # The same code without gradients: other code might round otherwise.
        return kernels.forward([one.detach() for one in inputs])[: self.outputs]


class _Halves(torch.autograd.Function):
    """The two halves of a compiled region, as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, call: CompiledCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kernels = call.kernels[0]
        made = kernels.forward(list(inputs))
        outputs, saved = tuple(made[: call.outputs]), made[call.outputs :]
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(inputs[place] for place in kernels.read), *saved)
        differentiable = {tangent.place for tangent in kernels.tangents}
        ctx.mark_non_differentiable(*(one for place, one in enumerate(outputs) if place not in differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        kernels: Kernels = ctx.kernels
        saved = list(ctx.saved_tensors)
        device = next(one for one in gradients if one is not None).device
        for place, sizes, strides, dtype in kernels.tangents:
            given = gradients[place]
            if given is None:
                given = torch.zeros((), dtype=dtype, device=device).expand(sizes)
            saved.append(_lying(given, sizes, strides))
        del gradients
        assert kernels.backward is not None
        made = kernels.backward(saved)
        return (None, *(None if place is None else made[place] for place in kernels.gradients))


def _lying(gradient: torch.Tensor, sizes: tuple[int, ...], strides: Strides) -> torch.Tensor:
    """The gradient with these strides, for which the backward was compiled."""
    if gradient.stride() == strides or all(
        size == 1 or mine == wanted for size, mine, wanted in zip(sizes, gradient.stride(), strides, strict=True)
    ):
        return gradient
    return torch.empty_strided(sizes, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
