"""Every storage that operations make on the device without data, and when it goes; and how long they would take."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from rkgb.devices.caching_allocator import AllocationEvent
from rkgb.process.uncompiled import DispatchMode
from rkgb.shapes.cpu.scratch import scratch_bytes
from rkgb.shapes.kernels import grouped_product_flops, tensors_of
from rkgb.shapes.machine import Machine
from rkgb.torch_private.autograd import running_node
from rkgb.torch_private.identity import holders, storage_key
from rkgb.torch_private.operations import grouped_product
from rkgb.tree import leaves

_SUM = torch.ops.aten.add.Tensor
_SUM_IN_PLACE = torch.ops.aten.add_.Tensor
_PUT = torch.ops.aten.index_put.default
# Into zeros of their own, as derivatives of gathers and of indices are made.
_FILLING = {
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    _PUT: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}


class Clock:
    """The machine's own line of time: the sum of what operations take."""

    def __init__(self) -> None:
        self.now_ms = 0.0


class StorageWatch(DispatchMode):
    """Mode that notes the storages of tensors without data, each by a number of its own, as `AllocationEvent`s.

    Of what kernels allocate for themselves, it tells what `scratch_bytes` knows of the CPU's.
    """

    def __init__(self, machine: Machine, clock: Clock, first: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[AllocationEvent] = []
        self.made = first  # how many storages were noted, here and before
        self._machine = machine
        self._clock = clock
        self._number_of: dict[int, int] = {}  # by storage, while it is there
        self._is_over = False
        self._alone = _gathered_holders()
        # Gradients are told apart by the node of the graph that made them, of which only the last is held.
        self._node: Any = None
        self._turn = 0
        self._turn_of: dict[int, int] = {}  # by storage

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage; None where it was there before."""
        return self._number_of.get(storage_key(tensor))

    @property
    def alive(self) -> frozenset[int]:
        """The numbers of the storages that are there now."""
        return frozenset(self._number_of.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._take_turn()
        if self._node is not None and not torch.is_grad_enabled():
            func = self._as_without_modes(func, args, kwargs)
        made = func(*args, **kwargs)
        given = tensors_of(args, kwargs)
        known = {storage_key(tensor) for tensor in given}
        new = [t for t in _made(made) if t.is_meta and storage_key(t) not in known]
        for tensor in new:
            self._note(tensor)
        if not self._machine.is_accelerator and (size_bytes := scratch_bytes(func, args, new)):
            self.note_scratch(size_bytes)
        if new or func._schema.is_mutable:
            self._clock.now_ms += self._time_ms(func, args, kwargs, made, given, new)
        return made

    def note_scratch(self, size_bytes: int) -> None:
        """What is allocated and released at once."""
        self.made += 1
        self._tell(self.made, size_bytes)
        self._tell(self.made, -size_bytes)

    def stop(self) -> list[AllocationEvent]:
        """What happened; nothing is noted from now on."""
        self._is_over = True
        self._node = None
        return self.events

    def _as_without_modes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What autograd would call: where a mode is around it, it writes nothing in place that nobody else has."""
        if func is _SUM:
            is_in_place = len(args) == 2 and not kwargs and self._is_gathering(*args)
            return _SUM_IN_PLACE if is_in_place else func
        other = _FILLING.get(func)
        if other is None or self._turn_of.get(storage_key(args[0])) != self._turn:
            return func
        alone = self._alone
        if func is _PUT and len(args) > 3 and args[3]:  # where rows were taken: two functions of PyTorch's hold it
            alone = alone[0], alone[1] + 1
        return other if all(map(int.__le__, holders(args[0]), alone)) else func

    def _is_gathering(self, gathered: Any, new: Any) -> bool:
        """Whether a gradient is added to what has been gathered, which another node has made."""
        if not isinstance(gathered, torch.Tensor) or not isinstance(new, torch.Tensor):
            return False
        return (
            self._turn_of.get(storage_key(gathered), self._turn) != self._turn
            and (gathered.shape, gathered.dtype) == (new.shape, new.dtype)
            and gathered.nbytes == gathered.untyped_storage().nbytes()
            and all(map(int.__le__, holders(gathered), self._alone))
        )

    def _take_turn(self) -> None:
        node = running_node()
        if node is not self._node:
            self._node = node
            self._turn += 1

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._number_of or not storage.nbytes():
            return
        self.made += 1
        number, size_bytes = self.made, storage.nbytes()
        self._number_of[key] = number
        self._turn_of[key] = self._turn
        self._tell(number, size_bytes)
        weakref.finalize(storage, self._gone, key, number, size_bytes).atexit = False

    def _gone(self, key: int, number: int, size_bytes: int) -> None:
        if not self._is_over:
            del self._number_of[key], self._turn_of[key]
            self._tell(number, -size_bytes)

    def _tell(self, number: int, size_bytes: int) -> None:
        self.events.append(AllocationEvent(number, size_bytes, int(self._clock.now_ms * 1e6)))

    def _time_ms(
        self, func: Any, args: Any, kwargs: Any, made: Any, given: list[torch.Tensor], new: list[torch.Tensor]
    ) -> float:
        """By a roofline (Williams, Waterman and Patterson, 2009): the longer of computing and of moving the bytes."""
        machine = self._machine
        count = grouped_product_flops if func is grouped_product else flop_registry.get(func._overloadpacket)
        compute_ms = 0.0
        if count is not None:
            operations = count(*args, **kwargs, out_val=made)
            compute_ms = machine.compute_ms(operations, new[0].dtype if new else given[0].dtype)
        written = new or given[:1]
        return machine.start_ms + max(compute_ms, machine.move_ms(_read_bytes([*given, *written])))


@functools.cache
def _gathered_holders() -> tuple[int, int]:
    """What `holders` tells of a gathered gradient that nobody else has: seen in a backward of two numbers."""
    found: list[tuple[int, int]] = []

    class Seen(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _SUM:
                found.append(holders(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        given = torch.zeros(2, device="meta", requires_grad=True) * 2
        both = given.sin() + given.cos()
    with Seen():  # type: ignore[no-untyped-call]
        both.backward(torch.zeros(2, device="meta"))
    return found[0]


def _made(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else leaves(result)


def _read_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of each storage no more than all of it."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
