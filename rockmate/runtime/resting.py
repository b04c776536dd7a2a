"""Parameters that rest in a second memory while a step does not read them: which operations read which, and when.

The forward reads them where its operations do, recomputation does so again, and the backward where an operation has
saved one. Autograd is given handles in place of what it would save of them, so that nothing of a step holds on to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from weakref import ref

import torch

from rkgb.torch_private.asked import nobody_asked
from rkgb.torch_private.identity import storage_key
from rockmate.offload.tier import Shape
from rockmate.resting.tensor import Rested, rested_of
from rockmate.resting.tensors import RestingTensors
from rockmate.resting.window import UseOrder
from rockmate.runtime.tables import Handle

Placed = tuple[dict[str, Any], str]  # the dictionary of a submodule in which a parameter is, and its name there


def backward_of(op: str) -> str:
    """The event that the backward of `op` reads what it has saved."""
    return f"backward of {op}"


@dataclass(slots=True)
class Rests:
    """What generated code says of parameters that rest, by their names in the graph."""

    places: dict[str, Placed]
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by event, in the order of a step
    saved: dict[str, dict[int, str]] = field(default_factory=dict)  # by operation: by the place of what it saves

    def uses(self) -> list[str]:
        """All of them as they are used in a step."""
        return [name for names in self.reads.values() for name in names]


class LeavesOfStep:
    """What rests, in one call of the module."""

    __slots__ = ("_events", "_owner", "_rested", "_rests", "_saved")

    def __init__(self, rests: Rests, orders: OrderOfUses) -> None:
        self._rests = rests
        self._rested = orders.rested
        self._events = orders.events
        self._owner = orders.owner
        self._saved: list[tuple[str, str, Shape, int, ref[Handle]]] = []
        orders.owner.follow(orders.order)

    def reads(self, event: str) -> _Reading:
        """Context of an operation that reads some."""
        return _Reading(self._owner, *self._events[event])

    def accept(self, op: str, handles: list[Handle]) -> None:
        """Take what `op` has saved of them: who wants it is given it when it is wanted."""
        for place, name in self._rests.saved.get(op, {}).items():
            handle = handles[place]
            holder, key = self._rests.places[name]
            rested = self._rested[name]
            if handle.value is None or holder[key] is not rested.tensor():
                continue  # as in a functional call
            with nobody_asked():
                if storage_key(handle.value) != storage_key(rested.alive):
                    continue
            handle.step, handle.segment = self, len(self._saved)
            self._saved.append((backward_of(op), name, Shape.of(handle.value), handle.version, ref(handle)))
            handle.value = None

    def run(self, number: int) -> None:
        """Give the handle of that number what it stands for, until its place is needed."""
        event, name, shape, version, holder = self._saved[number]
        rested = self._rested[name]
        tensor = rested.alive
        if tensor._version != version:
            raise modified(torch.Size(shape.size), tensor._version, version)
        used, cursor = self._events[event]
        self._owner.use(used, cursor)
        try:
            handle = holder()
            assert handle is not None, "it is what asks"
            with nobody_asked():
                handle.value = shape.within(tensor.untyped_storage())
            handle.version = handle.value._version
            rested.handles.append(holder)
        finally:
            self._owner.used(used)


class OrderOfUses:
    """The uses of a step in order, with the parameters themselves."""

    def __init__(self, rests: Rests) -> None:
        self.rested: dict[str, Rested] = {}
        for name, (holder, key) in rests.places.items():
            rested = rested_of(holder[key])
            assert rested is not None, "code is written anew where other parameters rest"
            self.rested[name] = rested
        owner = next(iter(self.rested.values())).owner
        assert isinstance(owner, RestingTensors), "nothing else has parameters rest"
        self.owner = owner
        self.events: dict[str, tuple[tuple[Rested, ...], int]] = {}
        uses: list[Rested] = []
        for event, names in rests.reads.items():
            used = tuple(self.rested[name] for name in names)
            self.events[event] = used, len(uses)
            uses += used
        self.order = UseOrder(uses)


class _Reading:
    """Parameters are here, and ordinary ones, while an operation runs that reads them."""

    __slots__ = ("_cursor", "_owner", "_used")

    def __init__(self, owner: RestingTensors, used: tuple[Rested, ...], cursor: int) -> None:
        self._owner, self._used, self._cursor = owner, used, cursor

    def __enter__(self) -> None:
        self._owner.use(self._used, self._cursor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.used(self._used)


def modified(shape: torch.Size, now: int, then: int) -> RuntimeError:
    """What is raised, as autograd does, where a tensor was written between the forward and the backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an in-place operation: "
        f"a tensor of shape {list(shape)} is at version {now}; expected version {then} instead. Do not change what the "
        "forward used before the backward has run."
    )
