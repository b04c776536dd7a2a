"""Tensors that live in a second memory, a few of them here at a time: within a *window* of so many bytes.

A tensor comes when it is used, or ahead of that where it is known what is used next, and leaves once its place is
needed and nothing else has its storage. What nobody has written is never sent again. What was written is, before its
place here is given up: no write is lost, whoever wrote, through the tensor or through a view of it.

All of it is safe without knowing the order of uses, which tells only what to fetch and whose place to give up.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakSet, ref

import torch

from rkgb.process.surroundings import surroundings_aside
from rkgb.torch_private.asked import nobody_asked, not_asked
from rkgb.torch_private.identity import is_only_holder
from rockmate.errors import OffloadError
from rockmate.offload.tier import Shape, Tier
from rockmate.resting import tensor as resting_tensor
from rockmate.resting.tensor import Owner, Rested, rested_of
from rockmate.resting.window import Place, UseOrder, Window

SMALLEST_BYTES = 64 << 10  # smaller ones stay: to ask for one takes as long as to read it


_OWNERS: WeakSet[RestingTensors] = WeakSet()


class RestingTensors(Window[Rested], Owner):
    """Tensors of one device that rest in `tier`, with at most `window_bytes` of them here.

    There are more only while one operation uses more, or where others hold on to them.
    """

    def __init__(self, tier: Tier, window_bytes: int) -> None:
        super().__init__(window_bytes)
        self.tier = tier
        self.read_bytes = self.sent_bytes = 0  # so far
        self._later: list[ref[torch.Tensor]] = []  # to rest again, once nobody else has their storages
        self._gone: list[Rested] = []  # whose tensors are gone, while somebody else had the lock
        self._lock = threading.RLock()
        _OWNERS.add(self)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        rested = rested_of(tensor)
        return rested is not None and rested.owner is self

    @property
    def all_bytes(self) -> int:
        """Of all that rest, wherever they are."""
        return sum(rested.size_bytes for rested in list(self._all))

    def after_fork(self) -> None:
        """In the process that came of it: a thread that it does not have may have held the lock."""
        self._lock = threading.RLock()

    # ---- who rests -----------------------------------------------------------------------------------------

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have these rest, but for those that cannot: small ones, and those whose storage others have, too.

        Raises `OffloadError` where they cannot be sent; those that could not are as they were.
        """
        with self._lock:
            for tensor in tensors:
                if not can_rest(tensor):
                    continue
                rested = Rested(tensor, self)
                self._make_room(rested.size_bytes)
                self._send(rested)
                self._all[rested] = None
                self._hold(rested.size_bytes)
                resting_tensor.begin(tensor, rested)
            self._make_room(0)

    def wake(self, rested: Rested) -> None:
        """Have it here, and no longer rest."""
        with self._lock:
            self._arrive(rested)
            self._drop(rested)
            resting_tensor.end(rested.alive)

    def wake_all(self) -> None:
        """Have all of them here, and none rest."""
        for rested in list(self._all):
            self.wake(rested)

    def empty(self) -> None:
        """Send all away, whatever the window has room for, but for what others hold."""
        with self._lock:
            for rested in list(self._all):
                if rested.place is not Place.AWAY and not rested.users:
                    self._arrive(rested)
                    self._leave(rested)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """All are here inside, as ordinary tensors; then they rest again."""
        tensors = [rested.alive for rested in list(self._all)]
        self.wake_all()
        try:
            yield
        finally:
            self.take(tensors)
            self._later = [ref(tensor) for tensor in tensors if tensor not in self]  # whose storage others have yet

    def forget(self, rested: Rested) -> None:
        """Its tensor is gone. A collection of garbage tells that, in any thread: one that is waited for cannot wait."""
        self._gone.append(rested)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_gone()
            finally:
                self._lock.release()

    def _forget_gone(self) -> None:
        while self._gone:
            self._drop(self._gone.pop())

    def _drop(self, rested: Rested) -> None:
        if rested not in self._all:
            return
        del self._all[rested]
        if rested.place is not Place.AWAY:
            self.held_bytes -= rested.size_bytes
        rested.place = Place.HERE  # an order of uses may still have it
        parcel, rested.parcel = rested.parcel, None
        if parcel is not None:
            parcel.drop()

    # ---- uses ----------------------------------------------------------------------------------------------

    def room_for(self, size_bytes: int) -> None:
        """Leave so many bytes of the window for what is to rest next."""
        with self._lock:
            self._make_room(size_bytes)

    def follow(self, order: UseOrder[Rested]) -> None:
        """Uses come in this order from now on, and are at its beginning."""
        with self._lock:
            self._forget_gone()
            if self._later:
                later, self._later = self._later, []
                tensors = [tensor for known in later if (tensor := known()) is not None]
                self.take(tensors)
                self._later = [ref(tensor) for tensor in tensors if tensor not in self]
            self._order, self._cursor = order, 0
            self._make_room(0)  # what others had hold of may be free now
            self._fetch()

    def use(self, used: Iterable[Rested], cursor: int | None) -> None:
        """Have these here, as ordinary tensors: the uses from the place `cursor` of the order on, if it has them.

        Who uses them so keeps nothing of them, or asks nobody to free it.
        """
        with self._lock:
            self._cursor = self._cursor if cursor is None else cursor
            begun: list[Rested] = []
            try:
                for rested in used:
                    rested.users += 1
                    rested.readers += 1
                    begun.append(rested)
                    self._arrive(rested)
                    rested.alive.__class__ = rested.kind
                if cursor is not None:
                    self._cursor += len(begun)
                    self._fetch()
            except BaseException:
                self.used(begun)
                raise

    def used(self, used: Iterable[Rested]) -> None:
        """They are not used any more."""
        with self._lock:
            for rested in used:
                rested.users -= 1
                rested.readers -= 1
                tensor = rested.tensor()
                if not rested.readers and tensor is not None and rested in self._all:
                    resting_tensor.go_on(tensor)

    @contextlib.contextmanager
    def used_at(self, used: Sequence[Rested], cursor: int | None) -> Iterator[None]:
        """Context in which these are here, as `use` and `used` say."""
        self.use(used, cursor)
        try:
            yield
        finally:
            self.used(used)

    def hold(self, rested: Rested) -> None:
        """Have it here, for a use that may be in no order."""
        with self._lock:
            if rested not in self._all:
                return
            rested.users += 1
            try:
                order = self._order
                if order.uses and rested.place is Place.AWAY:
                    self._cursor = (self._cursor + order.until_next(rested, self._cursor)) % len(order.uses)
                follows = bool(order.uses) and order.uses[self._cursor % len(order.uses)] is rested
                self._arrive(rested)
                if follows:
                    self._cursor += 1
                    self._fetch()
            except BaseException:
                rested.users -= 1
                raise

    def let_go(self, rested: Rested, is_unseen: bool, is_replaced: bool) -> None:
        """That use is over; it may have written, or others may yet, unseen, or it has put another storage in."""
        with self._lock:
            if rested not in self._all:
                return
            rested.users -= 1
            tensor = rested.alive
            if is_replaced:
                rested.replaced += 1
            if is_unseen or not is_only_holder(tensor):
                rested.is_lent = True
            if is_replaced or Shape.of(tensor) != rested.shape:
                self._look_again(rested)
            elif self.held_bytes > self.window_bytes and not rested.users:
                self._leave(rested)

    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to send what was just written, so that it can leave at once later."""
        with self._lock:
            for tensor in tensors:
                rested = rested_of(tensor)
                if rested is None or rested.owner is not self or rested.place is not Place.HERE:
                    continue
                rested.is_lent = True  # fused steps write without a new version
                self._settle(rested)
                if is_only_holder(tensor):
                    self._send(rested)

    def _look_again(self, rested: Rested) -> None:
        """It was given another storage: it rests as that does, or not at all any more."""
        tensor = rested.alive
        with not_asked():
            size_bytes = tensor.untyped_storage().nbytes()
        rested.is_lent = True
        is_alike = Shape.of(tensor) == rested.shape and tensor.device == rested.device
        if not is_alike or size_bytes != rested.size_bytes:
            self.wake(rested)

    # ---- to and fro ----------------------------------------------------------------------------------------

    def _arrive(self, rested: Rested) -> None:
        if rested.place is Place.HERE:
            self._settle(rested)  # who uses it may write
            return
        was_ahead = rested.place is Place.COMING
        if not was_ahead:
            self._make_room(rested.size_bytes)
            self._recall(rested)
        assert rested.parcel is not None
        try:
            storage = rested.parcel.take()
        except OffloadError:
            if not was_ahead:
                raise
            storage = rested.parcel.take()  # what went wrong ahead of time may go well now
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(surroundings_aside())
            stack.enter_context(nobody_asked())
            rested.alive.data = rested.shape.within(storage)
        rested.place = Place.HERE

    def _begin(self, item: Rested) -> None:
        assert item.parcel is not None
        item.parcel.recall()
        self.read_bytes += item.size_bytes

    def _send(self, rested: Rested) -> None:
        self._settle(rested)
        if rested.parcel is not None:
            parcel, rested.parcel = rested.parcel, None
            parcel.drop()
        tensor = rested.alive
        with not_asked():
            rested.parcel = self.tier.send(tensor.untyped_storage())
        rested.version, rested.is_lent = tensor._version, False
        self.sent_bytes += rested.size_bytes

    def _settle(self, rested: Rested) -> None:
        """Wait until it is sent. What could not be is as if nobody had tried: it is here."""
        if rested.parcel is None:
            return
        try:
            rested.parcel.wait_sent()
        except OffloadError:
            parcel, rested.parcel = rested.parcel, None
            parcel.drop()

    def _cancel(self, item: Rested) -> None:
        """What comes is not needed so soon after all."""
        if item.parcel is None:
            return  # it is gone
        with contextlib.suppress(OffloadError):  # nobody needs it
            item.parcel.take()
        item.place = Place.AWAY
        self.held_bytes -= item.size_bytes

    def _leave(self, item: Rested) -> bool:
        """Give up its place here; False where others have its storage."""
        tensor = item.tensor()
        if tensor is None:
            return False
        self._settle(item)  # what is on its way has its storage until then
        handles, item.handles = item.handles, []
        for holder in handles:
            handle = holder()
            if handle is not None:
                handle.value = None
        if not is_only_holder(tensor):
            return False
        if item.is_written:
            self._send(item)
        assert item.parcel is not None
        item.parcel.wait_sent()
        item.place = Place.AWAY  # first: were it emptied, and this not said, its values would seem to be there
        with not_asked():
            tensor.untyped_storage().resize_(0)
        self.held_bytes -= item.size_bytes
        return True


@contextlib.contextmanager
def all_awake(model: torch.nn.Module) -> Iterator[None]:
    """Parameters of `model` are all here inside, as ordinary ones; then those that rested do so again."""
    found = [rested_of(parameter) for parameter in model.parameters()]
    owners = {rested.owner: None for rested in found if rested is not None and isinstance(rested.owner, RestingTensors)}
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(owner.awake())
        yield


def can_rest(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large enough, its storage's only one, and on a device that has a second memory."""
    if not resting_tensor.can_rest(tensor) or not is_only_holder(tensor):
        return False
    return tensor.untyped_storage().nbytes() >= SMALLEST_BYTES


def _after_fork() -> None:
    for owner in _OWNERS:
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
