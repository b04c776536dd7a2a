"""A user's module, sample and loss on the device without data, for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import dropout, multi_head_attention_forward, scaled_dot_product_attention
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from rkgb.ir.sample import Sample
from rkgb.shapes.casts import Casts
from rkgb.shapes.cpu.recurrent import Lstm
from rkgb.shapes.cpu.stepwise import recurrent_of_the_cpu
from rkgb.shapes.fused import Attention, attention_chosen, fused_dropout
from rkgb.shapes.machine import Machine
from rkgb.shapes.values import KnownValues
from rkgb.state.attributes import attributes_of
from rkgb.torch_private.asked import nobody_asked
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.modes import without_dispatch_modes
from rkgb.torch_private.operations import pack_padded_rows, pad_packed_rows
from rkgb.torch_private.tracers import unseen_by_jit
from rkgb.tree import leaves, map_leaves

_META = torch.device("meta")


class Dataless:
    """Tensors without data in the place of others: the same one for the same, and of one storage for one storage."""

    def __init__(self, machine: Machine, dtype: torch.dtype | None = None, autocast: torch.dtype | None = None) -> None:
        """Numbers of floating point are of `dtype`, where one is given; functions run under `autocast` to another."""
        self._dtype = dtype
        self._casts = Casts(autocast, is_accelerator=machine.is_accelerator)
        self._mode = _OnlyShapes(self, machine, self._casts)
        self.values = KnownValues(machine)
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, with the tensor, which so lives on
        self._storages: dict[int, torch.UntypedStorage] = {}

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without data in the place of `tensor`, which may have none itself, and then is its own."""
        if tensor.is_meta and not self._changes(tensor):
            return tensor
        if id(tensor) not in self._twins:
            with unseen_by_jit():
                made = self._made(tensor)
                if not isinstance(tensor, torch.nn.Parameter):
                    self.values.learn(made, tensor)
            self._twins[id(tensor)] = tensor, made
        return self._twins[id(tensor)][1]

    def _changes(self, tensor: torch.Tensor) -> bool:
        return self._dtype is not None and tensor.is_floating_point() and tensor.dtype is not self._dtype

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), without_dispatch_modes():
            if self._changes(tensor):
                made = torch.empty_like(tensor, dtype=self._dtype, device=_META, requires_grad=False).detach()
            elif type(tensor.detach()) is not torch.Tensor or tensor.layout is not torch.strided:
                made = tensor.detach().to(_META)
            else:
                storage = self._storage(tensor)
                with nobody_asked():  # who watches what is asked of sizes is handed numbers that are none
                    made = torch.empty(0, dtype=tensor.dtype, device=_META)
                    made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)
            return made
        return made.requires_grad_(tensor.requires_grad)

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        key = storage_key(tensor)
        if key not in self._storages:
            size_bytes = tensor.untyped_storage().nbytes()
            self._storages[key] = torch.empty(size_bytes, dtype=torch.uint8, device=_META).untyped_storage()
        return self._storages[key]

    def sample(self, sample: Sample) -> Sample:
        """The arguments without data."""
        return sample.with_tensors([self.twin(tensor) for tensor in sample.tensors])

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of the user's, where it computes with tensors without data."""

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            # The device within: it would see what the other mode reads.
            with self._casts.on(), self._mode, _META, self.values.on():
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def module(self, module: torch.nn.Module) -> Iterator[None]:
        """Within this context, `module` holds tensors without data, and its forward computes with such."""
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for submodule in module.modules():
                places: list[dict[str, Any]] = [submodule._parameters, submodule._buffers]
                for place in places:
                    for name, tensor in list(place.items()):
                        if tensor is not None and not is_lazy(tensor):
                            replaced.append((place, name, tensor))
                            place[name] = self.twin(tensor)
                for name, held in attributes_of(submodule).items():
                    if any(not tensor.is_meta or self._changes(tensor) for tensor in leaves(held)):
                        replaced.append((vars(submodule), name, held))
                        vars(submodule)[name] = map_leaves(self.twin, held)
            with self._forward_of(module):
                yield
        finally:
            for place, name, held in replaced:
                place[name] = held

    @contextlib.contextmanager
    def _forward_of(self, module: torch.nn.Module) -> Iterator[None]:
        own = vars(module).get("forward")
        vars(module)["forward"] = self.function(module.forward)
        try:
            yield
        finally:
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


_OF_LENGTHS = {
    pack_padded_rows,
    pad_packed_rows,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
}
_MAKING = {torch.tensor, torch.as_tensor}
_READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


def _has_lengths(args: tuple[Any, ...]) -> bool:
    """Whether rows of their own lengths are packed, or are to be."""
    lengths = args[1] if len(args) > 1 else None
    return isinstance(lengths, torch.Tensor) and lengths.dtype is torch.int64


class _OnlyShapes(TorchFunctionMode):
    """What meets a tensor without data has none either; and operations are those that the machine would choose."""

    def __init__(self, dataless: Dataless, machine: Machine, casts: Casts) -> None:
        super().__init__()
        self._dataless = dataless
        self._casts = casts
        self._is_accelerator = machine.is_accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKING and args and not leaves(args):
            with unseen_by_jit():
                made = func(*args, **{**kwargs, "device": "cpu"})
                return made if made.dim() == 0 else self._dataless.twin(made)  # numbers go with any device
        if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
            args = (args[0], self._index(args[1]), *args[2:])
        if func is torch.Tensor.__format__ and args[0].is_meta and args[0].dim() == 0:
            known = self._dataless.values.known(args[0])  # as a part of a name; else a log, which goes on without
            return func(*args) if known is None else format(known.item(), *args[1:])  # type: ignore[no-untyped-call]
        if func in _READING and args[0].is_meta:
            with unseen_by_jit():
                return func(self._dataless.values.value(args[0]), *args[1:], **kwargs)
        if func in _OF_LENGTHS and _has_lengths(args):
            args = tuple(map(self._with_lengths, args))
            return self._recurrent(func, args, kwargs)
        given = leaves((args, kwargs))
        if any(t.is_meta for t in given) and any(not t.is_meta and t.dim() for t in given):
            args, kwargs = map_leaves(lambda t: self._dataless.twin(t) if t.dim() else t, (args, kwargs))
        args, kwargs = self._casts.arguments(func, args, kwargs)
        if func is multi_head_attention_forward:
            with attention_chosen(self._is_accelerator):  # within it, no function is seen here
                return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            made = Attention(*args, **kwargs).fused(self._is_accelerator)
            if made is not None:
                return made
        if func in _OF_LENGTHS:
            return self._recurrent(func, args, kwargs)
        if func is dropout and self._is_accelerator:
            return fused_dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A recurrent layer as the machine runs it."""
        if self._is_accelerator or kwargs or not args[0].is_meta:
            return func(*args, **kwargs)
        is_whole = func is torch.lstm and len(args) == len(Lstm._fields) and not _has_lengths(args)
        made: tuple[torch.Tensor, ...] | None = Lstm(*args).of_the_cpu() if is_whole else None
        made = made or recurrent_of_the_cpu(func, args)
        return func(*args) if made is None else made

    def _with_lengths(self, item: Any) -> Any:
        """Lengths of rows, and how many are as long, with their data: they are read where rows are packed."""
        if isinstance(item, torch.Tensor) and item.is_meta and item.dtype is torch.int64 and item.dim() == 1:
            with unseen_by_jit():
                return self._dataless.values.value(item)
        return item

    def _index(self, index: Any) -> Any:
        """The same with lists of places as tensors, whose values are known."""
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, list) for part in parts):
            return index
        with unseen_by_jit():
            found = tuple(torch.tensor(part, device="cpu") if isinstance(part, list) else part for part in parts)
        found = tuple(self._dataless.twin(part) if isinstance(part, torch.Tensor) else part for part in found)
        return found if isinstance(index, tuple) else found[0]
