"""What is known of the values of tensors without data: those that come of the sample, buffers and constants alone.

A forward may look at a mask, or at positions, and go on by what it finds. These are small, and are computed beside
their shapes. What comes of parameters is never known; `assumed` tells what is taken for granted of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from rkgb.errors import TraceError
from rkgb.process.uncompiled import DispatchMode
from rkgb.shapes.assumed import ASKING, spread_choice, where_all_is_finite
from rkgb.shapes.kernels import DATA_DEPENDENT, Kernels, tensors_of
from rkgb.shapes.machine import Machine
from rkgb.torch_private.identity import storage_key
from rkgb.torch_private.modes import without_dispatch_modes
from rkgb.torch_private.operations import copy_to, read_number
from rkgb.tree import leaves, map_leaves

MOST_BYTES = 4 << 20  # of one tensor
_MOST_DRAWN_BYTES = 256 << 10  # of a tensor that is drawn: masks of dropout are long, and nobody reads them
_MOST_ASSUMED_BYTES = 64 << 20  # of a tensor that says of each number whether it is finite, or where it is
_CPU = torch.device("cpu")
_META = torch.device("meta")
_EQUAL = torch.ops.aten.equal.default
_INDEX = torch.ops.aten.index.Tensor
_OF_STORAGES = {  # which are given a storage that has no data
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
}
_UNKNOWN = (
    "data that it has computed with parameters, or a long draw: there are no data here, so what it goes on with cannot "
    "be told. Measure the model itself, as Rockmate does, or `PeakMemory`"
)


class KnownValues(DispatchMode):
    """Mode that computes small values beside shapes, and answers where a number is read out of them."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = Kernels(machine)
        self._is_on = False
        self._storages: dict[int, torch.UntypedStorage] = {}  # with data, by that without, while it is there
        self._spread: set[int] = set()  # of these, what comes of choices that are taken to be spread
        self.goes_by_choices = False  # whether such were read, or decided on a shape

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Within this context, once."""
        if self._is_on:
            yield
            return
        self._is_on = True
        try:
            with self:
                yield
        finally:
            self._is_on = False

    def learn(self, dataless: torch.Tensor, tensor: torch.Tensor) -> None:
        """Note that `dataless` stands for `tensor`, of which it may know the values as they are now."""
        storage = tensor.untyped_storage()
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device == _CPU
        if is_plain and storage.nbytes() <= MOST_BYTES and storage_key(dataless) not in self._storages:
            with without_dispatch_modes():
                copied = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_CPU)
                copied.copy_(torch.empty(0, dtype=torch.uint8, device=_CPU).set_(storage))
            self._know(dataless, copied.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _EQUAL:
            return self._are_equal(*args)
        given = tensors_of(args, kwargs)
        values = self._values(func, given)
        if func is read_number and args[0].is_meta:
            if values is None:
                raise TraceError(f"forward reads a number out of {_UNKNOWN}")
            self._note_read(given)
            return values[id(args[0])].item()
        if values is None:
            self._forget_written(func, args, kwargs)
            made = self._by_shapes(func, args, kwargs)
            if func in ASKING and _is_small(made, _MOST_ASSUMED_BYTES):
                self._assume(func, args, kwargs, made)
            return made
        if any(tensor.is_meta for tensor in given) and not DATA_DEPENDENT.isdisjoint(func.tags):
            self._note_read(given)
            return map_leaves(self._without_data, self._computed(func, args, kwargs, values))
        made = self._by_shapes(func, args, kwargs)
        if _is_small(made, _MOST_DRAWN_BYTES if torch.Tag.nondeterministic_seeded in func.tags else MOST_BYTES):
            try:
                computed = self._computed(func, args, kwargs, values)
            except (NotImplementedError, RuntimeError):  # the CPU may not have what an accelerator has: it is not known
                self._forget_written(func, args, kwargs)
                return made
            for dataless, tensor in zip(leaves(made), leaves(computed), strict=True):
                self._match(dataless, tensor, is_spread=self._is_spread(given))
        else:
            self._forget_written(func, args, kwargs)
        return made

    def _are_equal(self, one: Any, other: Any) -> bool:
        """As `torch.jit` asks of constants; what is not known is equal to nothing else."""
        given = leaves((one, other))
        values = self._values(_EQUAL, given)
        if len(given) < 2 or values is None:
            return one is other or (len(given) < 2 and bool(one == other))
        with without_dispatch_modes():
            return torch.equal(values[id(one)], values[id(other)])

    def _by_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation makes, without data."""
        try:
            if func is _INDEX:
                args = args[0], [place for index in args[1] for place in self._places(index)]
            if func is copy_to and args[0].is_meta and kwargs.get("device") == _CPU:
                kwargs = {**kwargs, "device": _META}  # there is one device
            return self._kernels.call(func, args, kwargs)
        except NotImplementedError as error:
            raise TraceError(f"{func} gives what depends on {_UNKNOWN} ({str(error).splitlines()[0]})") from error

    def _places(self, index: Any) -> list[Any]:
        """Where a known mask holds, in its place: how many places there are decides on the shape."""
        if not isinstance(index, torch.Tensor) or not index.is_meta or index.dtype is not torch.bool:
            return [index]
        values = self._values(_INDEX, [index])
        if values is None:
            return [index]
        self._note_read([index])
        with without_dispatch_modes():
            places = values[id(index)].nonzero(as_tuple=True)
        return [self._without_data(place) for place in places]

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is known of a tensor without data. Raises `TraceError` where that is nothing."""
        known = self.known(tensor)
        if known is None:
            raise TraceError(f"forward reads {_UNKNOWN}")
        return known

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same, or None."""
        values = self._values(read_number, [tensor])
        if values is None:
            return None
        self._note_read([tensor])
        return values[id(tensor)]

    def _assume(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Know what is taken for granted of what was made, if anything."""
        told = leaves(made)[-1]
        with without_dispatch_modes():
            answer, places = where_all_is_finite(func, args), spread_choice(func, args, kwargs, made)
            if answer is not None:
                self._match(told, torch.full(told.shape, answer))
            elif places is not None:
                self._match(told, places, is_spread=True)

    def _is_spread(self, given: list[torch.Tensor]) -> bool:
        return bool(self._spread) and any(t.is_meta and storage_key(t) in self._spread for t in given)

    def _note_read(self, given: list[torch.Tensor]) -> None:
        self.goes_by_choices |= self._is_spread(given)

    def _computed(self, func: Any, args: Any, kwargs: Any, values: dict[int, torch.Tensor]) -> Any:
        """With data."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        random_kept = torch.random.fork_rng(devices=[]) if draws else contextlib.nullcontext()
        with without_dispatch_modes(), torch.no_grad(), random_kept:
            return func(*map_leaves(lambda t: values[id(t)], args), **_on_cpu(kwargs, values))

    def _values(self, func: Any, given: list[torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """The tensors with data in the place of these, by identity; None where one is not known."""
        if func in _OF_STORAGES:
            return None
        storages = self._storages
        for tensor in given:
            if tensor.is_meta and (tensor.requires_grad or storage_key(tensor) not in storages):
                return None
        found: dict[int, torch.Tensor] = {}
        for tensor in given:
            found[id(tensor)] = self._with_data(tensor) if tensor.is_meta else tensor
        return found

    def _with_data(self, tensor: torch.Tensor) -> torch.Tensor:
        with without_dispatch_modes():
            value = torch.empty(0, dtype=tensor.dtype, device=_CPU)
            storage = self._storages[storage_key(tensor)]
            return value.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _match(self, dataless: torch.Tensor, tensor: torch.Tensor, is_spread: bool = False) -> None:
        """What was made is known from now on: a new storage, which may lie otherwise."""
        key = storage_key(dataless)
        if is_spread:
            self._spread.add(key)
        if key in self._storages:
            return
        if dataless.stride() != tensor.stride() or dataless.storage_offset() != tensor.storage_offset():
            size_bytes = dataless.untyped_storage().nbytes()
            with without_dispatch_modes():
                room = torch.empty(size_bytes, dtype=torch.uint8, device=_CPU).untyped_storage()
                placed = torch.empty(0, dtype=tensor.dtype, device=_CPU)
                placed.set_(room, dataless.storage_offset(), dataless.shape, dataless.stride())
                placed.copy_(tensor)
            self._know(dataless, room)
        else:
            self._know(dataless, tensor.untyped_storage())

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        with without_dispatch_modes():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
        self._know(made, tensor.untyped_storage())
        return made

    def _know(self, dataless: torch.Tensor, storage: torch.UntypedStorage) -> None:
        key = storage_key(dataless)
        self._storages[key] = storage
        weakref.finalize(dataless.untyped_storage(), self._lose, key).atexit = False

    def _lose(self, key: int) -> None:
        self._storages.pop(key, None)
        self._spread.discard(key)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                self._lose(storage_key(tensor))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Of the arguments, those that the operation writes into: what it only reads, as places, stays as it is."""
    written = [
        args[place] if place < len(args) else kwargs.get(part.name)
        for place, part in enumerate(func._schema.arguments)
        if part.alias_info is not None and part.alias_info.is_write
    ]
    return leaves(written)


def _is_small(made: Any, most_bytes: int) -> bool:
    tensors = leaves(made)
    return bool(tensors) and all(t.is_meta and t.untyped_storage().nbytes() <= most_bytes for t in tensors)


def _on_cpu(kwargs: dict[str, Any], values: dict[int, torch.Tensor]) -> dict[str, Any]:
    found = {name: map_leaves(lambda t: values[id(t)], value) for name, value in kwargs.items()}
    if found.get("device") is not None:
        found["device"] = _CPU
    return found
