"""A linear layer and the cross-entropy of what it gives, a few rows at a time: the logits never exist whole.

Where a vocabulary has tens of thousands of words, logits, their logarithms and their gradients are most of a step's
peak. Rows of a loss depend on each other by a sum alone. So a few rows' logits are made, their part of the loss, and at
once their part of the gradients, as in Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024): no
product is made twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from rockmate.errors import ArgumentError

Reduction = Literal["mean", "sum"]
Step = tuple[Literal["mul", "div", "tanh"], float]
"""What is done with every logit, and the number that it is done with."""

# Fewer make thin products, which take longer than their share.
_LEAST_ROWS = 128


def rows_at_a_time(rows: int, width: int, classes: int) -> int:
    """How many rows' logits are made at once: about as many numbers as all that the layer is given, but not few."""
    return min(max(1, rows), max(_LEAST_ROWS, -(-rows * width // classes)))


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a loss in chunks."""

    rows: int | None
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    steps: tuple[Step, ...] = ()  # what becomes of logits before the loss is made of them


class ChunkedCrossEntropy(nn.Module):
    """``cross_entropy(linear(hidden, weight, bias), target)``, of a few rows at a time.

        loss = criterion(hidden, head.weight, labels, head.bias)  # head: nn.Linear, which is not called

    Gradients are those of the two calls but for the order of sums. Sums of parts are kept in float32, and so is the
    softmax. They are computed in the forward: a step takes no product more than without it. It may be called without
    gradients, under autocast, with a weight that another layer has as well, and with parts that are frozen. It has no
    second derivative.

    Args:
        rows: how many rows' logits are made at once; None for as many as make them no larger than `hidden`, but 128.
        ignore_index: rows with this target count for nothing.
        reduction: "mean" over the rows that count, or "sum".
        label_smoothing: as of `torch.nn.CrossEntropyLoss`.

    Raises:
        ArgumentError: no positive number of rows, another reduction, or a smoothing that is no share.
    """

    def __init__(
        self,
        rows: int | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if rows is not None and rows < 1:
            raise ArgumentError(f"rows is {rows!r}: give a positive number, or None for a number that fits the sizes")
        if reduction not in ("mean", "sum"):
            raise ArgumentError(f'reduction is {reduction!r}; give "mean" or "sum": a loss for each row is no number')
        if not 0 <= label_smoothing <= 1:
            raise ArgumentError(f"label_smoothing is {label_smoothing!r}: give a share from 0 to 1")
        self._settings = Settings(rows, ignore_index, reduction, label_smoothing)

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        """The loss, a number of float32 or of float64.

        Args:
            hidden: [..., width], what the layer is given.
            weight: [classes, width], as `torch.nn.Linear` has it.
            target: [...], a class for each row.
            bias: [classes], if any.

        Raises:
            ArgumentError: shapes that do not fit each other.
        """
        if hidden.shape[:-1] != target.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            raise ArgumentError(
                f"hidden is {list(hidden.shape)}, weight {list(weight.shape)}, target {list(target.shape)}: the weight "
                "has a column for each of the last dimension of hidden, and there is a target for each of its rows"
            )
        return chunked_loss(hidden, weight, bias, target, self._settings)

    def extra_repr(self) -> str:
        """Its settings."""
        settings = self._settings
        return ", ".join(f"{name}={getattr(settings, name)!r}" for name in settings.__slots__)


def chunked_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: Settings) -> Tensor:
    """As `ChunkedCrossEntropy` with these settings."""
    loss: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1), settings
    )
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: Settings
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        rows = settings.rows or rows_at_a_time(hidden.shape[0], hidden.shape[1], weight.shape[0])
        gradients = _Gradients(hidden, weight, bias, wanted)
        exact = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        total = torch.zeros((), dtype=exact, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            some, goals = hidden[start : start + rows], target[start : start + rows]
            logits, back = _after(linear(some, weight, bias), settings.steps)
            part, slope = _loss_and_slope(logits.to(exact), goals, settings, any(wanted))
            total += part
            if slope is not None:
                gradients.add(start, some, weight, back(slope))
        scale: float | Tensor = 1.0
        if settings.reduction == "mean":
            counted = (target != settings.ignore_index).sum()
            total, scale = total / counted, 1 / counted  # as eager's, no number where none counts
        ctx.save_for_backward(*gradients.scaled(scale))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = [None if saved is None else saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors]
        return (*found, None, None)


def _after(logits: Tensor, steps: tuple[Step, ...]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Logits after the steps, and what makes of a derivative by them one by those before."""
    if not steps:
        return logits, lambda slope: slope
    results = [logits]
    for name, number in steps:
        before = results[-1]
        results.append(before.tanh() if name == "tanh" else before * number if name == "mul" else before / number)

    def back(slope: Tensor) -> Tensor:
        slope = slope.to(logits.dtype)
        for (name, number), after in zip(reversed(steps), reversed(results), strict=False):
            if name == "tanh":
                slope = slope * (1 - after * after)
            else:
                slope = slope * number if name == "mul" else slope / number
        return slope

    return results[-1], back


def _loss_and_slope(
    logits: Tensor, target: Tensor, settings: Settings, is_sloped: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of the rows' losses, and its derivative by the logits where that is wanted."""
    smoothing, classes = settings.label_smoothing, logits.shape[1]
    counted = target != settings.ignore_index
    places = target.where(counted, 0)[:, None]
    logs = log_softmax(logits, -1)
    losses = -(1 - smoothing) * logs.gather(1, places)[:, 0]
    if smoothing:
        losses -= smoothing * logs.mean(1)
    loss = losses.where(counted, 0.0).sum()
    if not is_sloped:
        return loss, None
    slope = logs.exp_()
    if smoothing:
        slope -= smoothing / classes
    slope.scatter_add_(1, places, torch.full_like(places, smoothing - 1, dtype=slope.dtype))
    return loss, slope.mul_(counted[:, None])


class _Gradients:
    """Of a sum of the rows' losses, as they come."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> None:
        self._hidden = torch.empty_like(hidden) if wanted[0] else None
        self._weight = _zeros(weight) if wanted[1] else None
        self._bias = _zeros(bias) if wanted[2] and bias is not None else None
        self._dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]

    def add(self, start: int, some: Tensor, weight: Tensor, slope: Tensor) -> None:
        """Those of the rows from `start` on, given that of their logits."""
        if self._bias is not None:
            self._bias += slope.sum(0)
        slope = slope.to(some.dtype)
        if self._hidden is not None:
            self._hidden[start : start + len(some)] = slope @ weight.to(some.dtype)
        if self._weight is None:
            return
        if self._weight.dtype is some.dtype:
            self._weight.addmm_(slope.t(), some)
        else:
            self._weight += slope.t() @ some

    def scaled(self, scale: float | Tensor) -> list[Tensor | None]:
        """In the types of what they are of, times a number."""
        found = [self._hidden, self._weight, self._bias]
        return [
            None if one is None else one.mul_(scale).to(dtype) for one, dtype in zip(found, self._dtypes, strict=True)
        ]


def _zeros(like: Tensor) -> Tensor:
    """Room for a sum of parts: of 16 bits, it would lose what each part adds."""
    return torch.zeros_like(like, dtype=torch.float32 if like.dtype.itemsize < 4 else like.dtype)
