"""What offloading by hand does: every large tensor that autograd saves leaves as soon as it is saved.

It comes back a few before it is wanted, in the reverse order. A rival for plans that choose, and a load for the tiers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from types import TracebackType

import torch

from rockmate.offload.tier import Parcel, Shape, Tier


class MoveEverything:
    """Context for a forward: what is saved in it is sent to `tier` where it has `least_bytes`, parameters apart.

    `behind` of them may be on their way at once, and `ahead` are recalled before they are wanted.
    """

    def __init__(
        self,
        tier: Tier,
        parameters: Iterable[torch.Tensor] = (),
        least_bytes: int = 1 << 20,
        behind: int = 2,
        ahead: int = 3,
    ) -> None:
        self._tier, self._least_bytes, self._behind, self._ahead = tier, least_bytes, behind, ahead
        self._stay = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._known: dict[int, weakref.ref[_Away]] = {}  # by the address of a storage that is still there
        self._on_their_way: deque[_Away] = deque()
        self._order: list[weakref.ref[_Away]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> MoveEverything:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)
        self._wait_until(0)

    def _wait_until(self, number: int) -> None:
        while len(self._on_their_way) > number:
            away = self._on_their_way.popleft()
            away.parcel.wait_sent()
            self._known.pop(away.address, None)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[_Away, Shape]:
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._least_bytes or storage.data_ptr() in self._stay:
            return tensor
        known = self._known.get(storage.data_ptr())
        away = None if known is None else known()
        if away is None:
            away = _Away(self._tier.send(storage), storage.data_ptr(), len(self._order))
            self._known[away.address] = weakref.ref(away)
            self._order.append(weakref.ref(away))
            self._on_their_way.append(away)
            self._wait_until(self._behind)
        return away, Shape.of(tensor)

    def _unpack(self, packed: torch.Tensor | tuple[_Away, Shape]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        away, shape = packed
        for other in reversed(self._order[max(0, away.number - self._ahead) : away.number + 1]):
            found = other()
            if found is not None and found.storage is None:
                found.parcel.recall()
        if away.storage is None:
            away.storage = away.parcel.take()
        return shape.within(away.storage)


class _Away:
    """A storage that has left; it lives as long as autograd's graph wants it."""

    def __init__(self, parcel: Parcel, address: int, number: int) -> None:
        self.parcel, self.address, self.number = parcel, address, number
        self.storage: torch.UntypedStorage | None = None  # since it is back
