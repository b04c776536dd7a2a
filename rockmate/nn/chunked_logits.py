"""Causal language models of the transformers library whose training calls never make their logits whole.

Such a model gives what its last layer made to a linear layer, perhaps scales or caps the logits, and hands them to its
loss. In a training call with labels, the linear layer is not run: what stands for its logits notes what is done with
them, and the loss makes them of a few rows at a time, as `rockmate.nn.ChunkedCrossEntropy`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rockmate.errors import ArgumentError, ChunkError
from rockmate.nn.chunked_cross_entropy import Settings, Step, chunked_loss

Chunks = int | Literal["auto"] | None
"""How many rows' logits are made at once; "auto" for a number that fits the sizes; None for all of them."""

_ROWS = "_rockmate_loss_chunks"  # on the model: the rows, where its logits are chunked
_WHOLE = "_rockmate_whole"  # beside it: a forward of its own that the model had; None where it is its class's
_LOSS = "ForCausalLMLoss"  # of transformers: shifted labels, a mean of cross-entropies or a sum over a given number


def check_chunks(chunks: object) -> None:
    """Raise `ArgumentError` for what is no number of rows."""
    if chunks is None or chunks == "auto" or (type(chunks) is int and chunks > 0):
        return
    raise ArgumentError(
        f'loss_chunks is {chunks!r}: give "auto", a positive number of rows, or None for logits that are made whole'
    )


def chunk_logits(model: nn.Module, rows: Chunks = "auto") -> None:
    """Have a causal language model of transformers make its logits of a few rows at a time, in training calls.

    These are calls in training mode, with gradients and with labels. Their output has no logits (None). The loss and
    all gradients are those of the whole logits but for the order of sums. Every other call is as before. The model is
    changed in place: its `forward` is another one; `rows=None` gives it back.

    Args:
        model: a causal language model of transformers, or one of PEFT around it.
        rows: how many rows' logits are made at once, or "auto".

    Raises:
        ArgumentError: `rows` is no positive number.
        ChunkError: the model is none whose logits can be chunked; the message says why.
    """
    check_chunks(rows)
    base = _without_adapters(model)
    if _is_chunked(base):
        if rows is None:
            _give_back(base)
        else:
            setattr(base, _ROWS, rows)
        return
    if rows is None:
        return
    _head_of(base)
    _refuse_other_losses(base)
    if _ROWS in vars(base):
        _give_back(base)
    inner = base.__dict__.get("forward")
    base.__dict__[_ROWS], base.__dict__[_WHOLE] = rows, inner
    base.__dict__["forward"] = types.MethodType(_chunked(type(base).forward), base)


def chunks_of(model: nn.Module) -> Chunks:
    """How many rows' logits the model makes at once; None where it makes them whole."""
    base = _without_adapters(model)
    rows: Chunks = vars(base)[_ROWS] if _is_chunked(base) else None
    return rows


def _is_chunked(base: nn.Module) -> bool:
    """Not so is one that was loaded: a method does not come back as the function that it was."""
    function = getattr(vars(base).get("forward"), "__func__", None)
    return _ROWS in vars(base) and hasattr(function, _ROWS)


@contextmanager
def logits_made(model: nn.Module, rows: Chunks) -> Iterator[None]:
    """Context: as `chunk_logits`, and given back afterwards."""
    before = chunks_of(model)
    chunk_logits(model, rows)
    try:
        yield
    finally:
        chunk_logits(model, before)


def _give_back(base: nn.Module) -> None:
    inner = base.__dict__.pop(_WHOLE, None)
    del base.__dict__[_ROWS], base.__dict__["forward"]
    if inner is not None:
        base.__dict__["forward"] = inner


def _chunked(own: Callable[..., Any]) -> Callable[..., Any]:
    """A forward like `own`, which it calls."""

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.__dict__.get(_WHOLE)
        whole = functools.partial(own, self) if inner is None else inner
        if not self.training or not torch.is_grad_enabled() or not _has_labels(own, args, kwargs):
            return whole(*args, **kwargs)
        with _deferring(self):
            return _without_logits(whole(*args, **kwargs))

    setattr(forward, _ROWS, True)
    return forward


@functools.cache
def _place_of_labels(own: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(own).parameters)
    return names.index("labels") - 1 if "labels" in names else None  # after `self`


def _has_labels(own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    place = _place_of_labels(own)
    passed = args[place] if place is not None and len(args) > place else None
    return passed is not None or kwargs.get("labels") is not None


# ---- one call ----------------------------------------------------------------------------------------------


@contextmanager
def _deferring(model: Any) -> Iterator[None]:
    """Context: the head gives what stands for logits, and the loss takes it."""
    head, rows = _head_of(model), getattr(model, _ROWS)
    own_loss = model.__dict__.get("_loss_function")
    head.__dict__["forward"] = lambda hidden: _Deferred(hidden, head)
    model.__dict__["_loss_function"] = functools.partial(_loss, type(model).__name__, rows)
    try:
        yield
    finally:
        del head.__dict__["forward"], model.__dict__["_loss_function"]
        if own_loss is not None:
            model.__dict__["_loss_function"] = own_loss


def _loss(
    name: str,
    rows: Chunks,
    logits: Any,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """As `ForCausalLMLoss` of transformers."""
    if not isinstance(logits, _Deferred):
        raise ChunkError(f"{name} does not give its loss the logits of its last linear layer: they cannot be chunked")
    if shift_labels is None:  # each position predicts the next one
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    reduction: Literal["mean", "sum"] = "mean" if num_items_in_batch is None else "sum"
    at_once = rows if isinstance(rows, int) else None
    settings = Settings(at_once, ignore_index, reduction, 0.0, logits.steps)
    hidden, head = logits.hidden, logits.head
    targets = shift_labels.reshape(hidden.shape[:-1]).to(hidden.device)
    loss = chunked_loss(hidden, head.weight, head.bias, targets, settings)
    if num_items_in_batch is None:
        return loss
    count = num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    return loss / count


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Stands for the logits of `hidden`: what is done with them is noted, and anything that reads them is refused."""

    hidden: Tensor
    head: nn.Linear
    steps: tuple[Step, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.hidden.dtype

    def float(self) -> _Deferred:
        """The loss is computed in float32 in any case."""
        return self

    def to(self, *_: Any, **__: Any) -> _Deferred:
        """As `float`: a type, or the device on which it would be."""
        return self

    def contiguous(self) -> _Deferred:
        """As they would be."""
        return self

    def tanh(self) -> _Deferred:
        """Noted."""
        return self._with(("tanh", 0.0))

    def __mul__(self, number: Any) -> _Deferred:
        return self._with(("mul", _number(number, "multiplied by")))

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> _Deferred:
        return self._with(("div", _number(number, "divided by")))

    def _with(self, step: Step) -> _Deferred:
        return replace(self, steps=(*self.steps, step))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        raise ChunkError(f"the model reads its logits ({name}) before the loss: {_WHAT_CAN}")

    def __getitem__(self, place: Any) -> Any:
        raise ChunkError(f"the model takes a part of its logits before the loss: {_WHAT_CAN}")

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function in (torch.tanh, nn.functional.tanh) and isinstance(args[0], cls):
            return args[0].tanh()
        for functions, is_product in (((torch.mul, Tensor.mul), True), ((torch.div, Tensor.div), False)):
            if function in functions and not kwargs and isinstance(args[0], cls):
                return args[0] * args[1] if is_product else args[0] / args[1]
        name = getattr(function, "__name__", function)
        raise ChunkError(f"the model reads its logits ({name}) before the loss: {_WHAT_CAN}")


_WHAT_CAN = (
    "they can be chunked where they are given to the loss as the linear layer makes them, scaled by a number, or "
    "capped by tanh. Leave loss_chunks out."
)


def _number(value: Any, what: str) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    raise ChunkError(f"the model's logits are {what} a {type(value).__name__} before the loss: {_WHAT_CAN}")


def _without_logits(output: Any) -> Any:
    """The output with None in their place."""
    if isinstance(output, tuple):
        return tuple(None if isinstance(one, _Deferred) else one for one in output)
    if is_dataclass(output) and not isinstance(output, type):
        held = [name for name, one in vars(output).items() if isinstance(one, _Deferred)]
        return replace(output, **dict.fromkeys(held))
    return output


# ---- which models ------------------------------------------------------------------------------------------


def _without_adapters(model: nn.Module) -> Any:
    """The model itself, where PEFT is around it."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def _head_of(model: Any) -> nn.Linear:
    get = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    if type(head) is not nn.Linear:
        what = "none" if head is None else f"a {type(head).__name__}"
        raise ChunkError(
            f"{type(model).__name__} is no model whose logits can be chunked: those of transformers can be that give "
            f"what a torch.nn.Linear makes to their loss, and its output layer is {what}. Leave loss_chunks out, or "
            "use rockmate.nn.ChunkedCrossEntropy in the model."
        )
    if head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head):
        raise ChunkError(
            f"the output layer of {type(model).__name__} has hooks, or a forward of its own, which would not run. "
            "Leave loss_chunks out."
        )
    return head


def _refuse_other_losses(model: Any) -> None:
    loss = getattr(model, "loss_function", None)
    name = getattr(loss, "__name__", "none" if loss is None else type(loss).__name__)
    if name != _LOSS:
        raise ChunkError(
            f"the loss of {type(model).__name__} is {name}, and {_LOSS} is the one that can be made of a few rows at a "
            "time. Leave loss_chunks out, or use rockmate.nn.ChunkedCrossEntropy in the model."
        )
