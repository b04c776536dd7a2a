"""Operations whose shapes PyTorch does not tell without data, or otherwise than the machine has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rkgb.shapes import losses
from rkgb.shapes.convolutions import CHANNELS_LAST, format_of_images
from rkgb.shapes.cpu.bags import embedding_bag_made
from rkgb.shapes.cpu.recurrent import lstm_layer_made
from rkgb.shapes.machine import Machine
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.operations import (
    all_true,
    any_true,
    convolution,
    ctc_loss,
    ctc_loss_backward,
    embedding_bag,
    grouped_product,
    lstm_layer,
)

_aten = torch.ops.aten
_META = torch.device("meta")
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
Call = Callable[..., Any]


def _batch_norm(given: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The CPU's gives dense images where it was given others, but for channels_last."""
    made = _aten.native_batch_norm.default(given, *args, **kwargs)
    is_kept = given.dim() in CHANNELS_LAST and given.is_contiguous(memory_format=CHANNELS_LAST[given.dim()])
    if given.is_contiguous() or is_kept:
        return made
    return (torch.empty(given.shape, dtype=made[0].dtype, device=given.device), *made[1:])


def _convolution(function: Any, is_accelerator: bool, given: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    made = function(given, weight, *args, **kwargs)
    stride, groups = args[1], args[6]
    return torch.empty_like(made, memory_format=format_of_images(given, weight, stride, groups, is_accelerator))


def _convolution_backward(is_accelerator: bool, gradient: Tensor, given: Tensor, weight: Tensor, *args: Any) -> Any:
    """Gradients of images, and of what they are multiplied with, lie as these do while it computes."""
    made = _aten.convolution_backward.default(gradient, given, weight, *args)
    stride, groups = args[1], args[6]
    images = format_of_images(given, weight, stride, groups, is_accelerator)
    like = [one if one is None else torch.empty_like(one, memory_format=images) for one in made[:2]]
    return (*like, made[2])


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any) -> Any:
    """The loss of each row, and the logarithms of its paths: at most as long as all of its targets."""
    rows = log_probs.shape[1]
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // max(1, rows))
    if not isinstance(target_lengths, Tensor):
        longest = max(target_lengths, default=0)
    return log_probs.new_empty(rows), log_probs.new_empty(rows, log_probs.shape[0], 2 * longest + 1)


def _ctc_loss_backward(gradient: Tensor, log_probs: Tensor, *_: Any, **__: Any) -> Any:
    """Row after row, however the probabilities lie."""
    return log_probs.new_empty(log_probs.shape)


def _grouped_product(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As many rows, columns or products as there are groups; PyTorch tells it of bfloat16 alone."""
    shape = [one.shape[-2], other.shape[-1]]
    if one.dim() == 3 and other.dim() == 3:
        shape.insert(0, one.shape[0])
    elif one.dim() == 2 and other.dim() == 2:
        assert offs is not None  # it says how many groups there are
        shape.insert(0, offs.shape[0])
    return one.new_empty(shape, dtype=out_dtype or one.dtype)


def grouped_product_flops(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Operations of a product for each group: a row of 2 dimensions is in one group alone."""
    groups = one.shape[0] if one.dim() == 3 and other.dim() == 2 else 1
    return 2 * one.numel() // groups * other.shape[-1]


def _holds(_: Tensor) -> Tensor:
    """What a forward makes sure of is taken to be so."""
    return torch.ones((), dtype=torch.bool, device="cpu")


def _holds_nowhere(_: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device="cpu")


def _added_columns(columns: Tensor, *args: Any) -> Tensor:
    """Images, in the memory that was made for as many numbers as the columns have."""
    made = _aten.col2im.default(columns, *args)
    room = torch.empty_like(columns, memory_format=torch.contiguous_format)
    return room.resize_(made.shape) if made.numel() < columns.numel() else made


_KERNELS: Mapping[Any, Call] = {
    ctc_loss.default: _ctc_loss,
    ctc_loss.Tensor: _ctc_loss,
    ctc_loss_backward.default: _ctc_loss_backward,
    ctc_loss_backward.Tensor: _ctc_loss_backward,
    **losses.KEEPING,
    grouped_product: _grouped_product,
    _aten.col2im.default: _added_columns,
    all_true: _holds,
    any_true: _holds_nowhere,
}
"""By operation: what is called in its place."""


def _kernels_of(machine: Machine) -> dict[Any, Call]:
    """Those of a machine."""
    kernels = dict(_KERNELS)
    for function in (_aten.convolution.default, convolution):
        kernels[function] = partial(_convolution, function, machine.is_accelerator)
    kernels[_aten.convolution_backward.default] = partial(_convolution_backward, machine.is_accelerator)
    if not machine.is_accelerator:
        kernels[_aten.native_batch_norm.default] = _batch_norm
        kernels[lstm_layer] = lstm_layer_made
        kernels[embedding_bag] = embedding_bag_made
    return kernels


_Made = tuple[bool, tuple[tuple[Any, ...] | None, ...]]  # whether it is a sequence; sizes, strides and type of each


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, and in lists of them: quicker than `rkgb.tree.leaves`."""
    found: list[Tensor] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += [one for one in item if isinstance(one, Tensor)]
    return found


class _Kind(Enum):
    """What an operation does, by its schema."""

    MAKES = auto()  # new tensors, and nothing else
    WRITES = auto()  # into arguments, of which it returns one or none
    WRITES_LISTS = auto()  # into each of a list, element by element, as optimizers do
    OTHER = auto()


def _kind_of(function: Any) -> _Kind:
    schema = function._schema
    if not DATA_DEPENDENT.isdisjoint(function.tags):
        return _Kind.OTHER
    if not any(part.alias_info is not None for part in (*schema.arguments, *schema.returns)):
        return _Kind.MAKES
    if not all(part.alias_info is None or part.alias_info.is_write for part in (*schema.arguments, *schema.returns)):
        return _Kind.OTHER
    if not schema.returns and schema.name.startswith("aten::_foreach_"):
        return _Kind.WRITES_LISTS
    returns_it = len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    return _Kind.WRITES if returns_it and torch.Tag.inplace_view not in function.tags else _Kind.OTHER


class Kernels:
    """Calls operations without data, as a machine has them.

    Layers of a model are alike, and PyTorch tells many shapes in Python: what an operation that makes new tensors, or
    writes into its first argument, has told once is told again for arguments like those.
    """

    def __init__(self, machine: Machine) -> None:
        self._own = _kernels_of(machine)
        self._told: dict[Any, _Made] = {}
        self._written: set[Any] = set()
        self._kinds: dict[Any, _Kind] = {}

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation makes. Raises `NotImplementedError` where shapes do not tell it."""
        kernel = self._own.get(function)
        if kernel is not None and any(tensor.is_meta for tensor in tensors_of(args, kwargs)):
            return kernel(*args, **kwargs)
        kind = self._kinds.get(function)
        if kind is None:
            kind = self._kinds[function] = _kind_of(function)
        if kind is _Kind.OTHER or (kind is _Kind.WRITES_LISTS and not _are_alike(args)):
            return function(*args, **kwargs)
        if kind is _Kind.WRITES_LISTS:
            return None
        try:
            key = function, _outline(args), _outline(tuple(kwargs.items()))
        except TypeError:
            return function(*args, **kwargs)
        return (self._make if kind is _Kind.MAKES else self._write)(key, function, args, kwargs)

    def _make(self, key: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """New tensors."""
        told = self._told.get(key)
        if told is not None:
            is_sequence, tensors = told
            made = [
                None if one is None else torch.empty_strided(*one[:2], dtype=one[2], device=_META) for one in tensors
            ]
            return tuple(made) if is_sequence else made[0]
        result = function(*args, **kwargs)
        new = _as_told(result, tensors_of(args, kwargs))
        if new is not None:
            self._told[key] = new
        return result

    def _write(self, key: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first argument, which is as it was but for its contents."""
        if key in self._written:
            return args[0]
        result = function(*args, **kwargs)
        if args and result is args[0] and _outline(args) == key[1]:
            self._written.add(key)
        return result


def _are_alike(args: tuple[Any, ...]) -> bool:
    """Whether the tensors of all lists have the sizes of those of the first, so that none is stretched or refused."""
    lists = [given for given in args if isinstance(given, list | tuple) and isinstance(next(iter(given), None), Tensor)]
    return all(
        len(given) == len(lists[0])
        and all(
            tensor.is_meta
            and type(tensor) in _PLAIN_TENSORS
            and tensor.is_floating_point()
            and tensor.shape == one.shape
            for one, tensor in zip(lists[0], given, strict=True)
        )
        for given in lists
    )


def _outline(item: Any) -> Any:
    """Equal for arguments that differ in the contents of tensors at most. Raises `TypeError` for others."""
    if isinstance(item, torch.Tensor):
        if not item.is_meta or type(item) not in _PLAIN_TENSORS:
            raise TypeError
        return item.dtype, item.shape, item.stride(), item.storage_offset()
    if isinstance(item, tuple | list):
        return tuple(map(_outline, item))
    if item is None or isinstance(item, _PLAIN):
        return type(item), item
    raise TypeError


def _as_told(result: Any, arguments: list[Tensor]) -> _Made | None:
    """Of what an operation has made, what it takes to make the like; None where that is no new tensors."""
    given = {storage_key(tensor) for tensor in arguments}
    is_sequence = isinstance(result, tuple | list)
    found: list[tuple[Any, ...] | None] = []
    for one in result if is_sequence else (result,):
        if one is None:
            found.append(None)
            continue
        if type(one) is not torch.Tensor or not one.is_meta or storage_key(one) in given or one.storage_offset():
            return None
        like = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=_META)
        if like.untyped_storage().nbytes() != one.untyped_storage().nbytes():
            return None
        found.append((tuple(one.shape), one.stride(), one.dtype))
    return is_sequence, tuple(found)
