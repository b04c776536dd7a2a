"""Tensors of an accelerator in pinned memory of its host, by one stream for each direction.

Nothing here waits on the host: what is to be over before something else is an event that the stream of the latter waits
for. The stream that computes is the current one at `send`.
"""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from rkgb.devices.registry import device_of
from rockmate.errors import OffloadError
from rockmate.offload.tier import Parcel, Tier, Traffic
from rockmate.units import format_bytes

# PyTorch's allocator of pinned memory rounds up to powers of two, so that whole buffers could take twice their size.
_PIECE_BYTES = 32 << 20
_SMALLEST_PIECE_BYTES = 4 << 10


class HostTier(Tier):
    """Pinned memory for the tensors of one `device`. What is given back is used again."""

    unit_bytes = _SMALLEST_PIECE_BYTES

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        self.device = device
        self.name = "pinned memory of the host"
        self.out = torch.Stream(device)
        self.back = torch.Stream(device)
        self.sent = _Counted()
        self.returned = _Counted()
        self._idle: defaultdict[int, list[_Piece]] = defaultdict(list)  # by size

    def send(self, storage: torch.UntypedStorage) -> Parcel:
        if device_of(storage.device).kind != device_of(self.device).kind:
            raise OffloadError(
                f"tensors on {storage.device} are not moved to {self.name}: only those on {self.device} are, for which "
                "it was made."
            )
        sizes = _piece_sizes(storage.nbytes())
        self._hold(sum(sizes))
        pieces: list[_Piece] = []
        try:
            for size_bytes in sizes:
                pieces.append(self._piece(size_bytes))
        except BaseException:
            self.give_back(pieces)
            self._let_go(sum(sizes) - sum(piece.size_bytes for piece in pieces))
            raise
        return _HostParcel(self, storage, pieces)

    def room_bytes(self) -> int:
        # The rest of the machine needs some, and pinned memory cannot be swapped out.
        idle_bytes = sum(size_bytes * len(pieces) for size_bytes, pieces in self._idle.items())
        return device_of(torch.device("cpu")).available_bytes() // 2 + idle_bytes

    def traffic(self) -> tuple[Traffic, Traffic]:
        return self.sent.so_far(), self.returned.so_far()

    def close(self) -> None:
        self._idle.clear()

    def give_back(self, pieces: list[_Piece]) -> None:
        """What nobody needs any more. Whoever gets them next waits for what is still done with them."""
        for piece in pieces:
            self._idle[piece.size_bytes].append(piece)
            self._let_go(piece.size_bytes)

    def _piece(self, size_bytes: int) -> _Piece:
        idle = self._idle[size_bytes]
        if idle:
            return idle.pop()
        idle_bytes = sum(piece.size_bytes for pieces in self._idle.values() for piece in pieces)
        if self.limit_bytes is not None and self.held_bytes + idle_bytes > self.limit_bytes:
            self._idle.clear()
        try:
            return _Piece(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))
        except (RuntimeError, MemoryError) as error:
            raise OffloadError(
                f"the host has no {format_bytes(size_bytes)} of pinned memory left, beside "
                f"{format_bytes(self.held_bytes)} that hold tensors of {self.device}: {error}. Give a lower limit."
            ) from error


class _Counted:
    """Transfers of one stream, with the times that it spent on them."""

    def __init__(self) -> None:
        self._over = Traffic()
        self._begun: deque[tuple[torch.Event, torch.Event, int]] = deque()  # those that may not be over

    def add(self, start: torch.Event, end: torch.Event, size_bytes: int) -> None:
        """One more, between the two."""
        self._begun.append((start, end, size_bytes))
        while self._begun[0][1].query() and len(self._begun) > 1:
            self._take_first()

    def so_far(self) -> Traffic:
        """All that were begun, once they are over."""
        while self._begun:
            self._begun[0][1].synchronize()
            self._take_first()
        return self._over

    def _take_first(self) -> None:
        start, end, size_bytes = self._begun.popleft()
        self._over = self._over.and_one(size_bytes, float(start.elapsed_time(end)))


class _Piece:
    """Some pinned memory, and what is to be over before it is written again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.size_bytes = memory.nbytes
        self.free_from: torch.Event | None = None


class _HostParcel(Parcel):
    def __init__(self, tier: HostTier, storage: torch.UntypedStorage, pieces: list[_Piece]) -> None:
        self._tier, self._pieces = tier, pieces
        self._device, self._size_bytes = storage.device, storage.nbytes()
        self._compute = torch.accelerator.current_stream(storage.device)
        self._source: torch.UntypedStorage | None = storage
        self._target: torch.UntypedStorage | None = None
        self._returned: torch.Event | None = None
        _wait(tier.out, _event(self._compute))  # what is sent is written by it
        for piece in pieces:
            if piece.free_from is not None:
                _wait(tier.out, piece.free_from)  # another stream may still read what was there
        begun = _event(tier.out, timed=True)
        with tier.out:
            for part, piece in self._parts(storage):
                piece.memory[: part.numel()].copy_(part, non_blocking=True)
        self._sent = _event(tier.out, timed=True)
        tier.sent.add(begun, self._sent, self._size_bytes)

    def wait_sent(self) -> None:
        if self._source is not None:
            _wait(self._compute, self._sent)  # what it writes next may be where this was
            self._source = None

    def recall(self) -> None:
        if self._target is not None:
            return
        self.wait_sent()
        back = self._tier.back
        self._target = torch.empty(self._size_bytes, dtype=torch.uint8, device=self._device).untyped_storage()
        _wait(back, _event(self._compute))  # what was there before may still be read; it has waited for what was sent
        begun = _event(back, timed=True)
        with back:
            for part, piece in self._parts(self._target):
                part.copy_(piece.memory[: part.numel()], non_blocking=True)
        self._returned = _event(back, timed=True)
        self._tier.returned.add(begun, self._returned, self._size_bytes)

    def take(self) -> torch.UntypedStorage:
        self.recall()
        assert self._target is not None
        assert self._returned is not None
        _wait(self._compute, self._returned)
        target, self._target = self._target, None
        return target

    def drop(self) -> None:
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return
        self.wait_sent()
        if self._target is not None and self._returned is not None:
            _wait(self._compute, self._returned)  # what it writes next may be where this was to be
            self._target = None
        for piece in pieces:
            piece.free_from = self._returned or self._sent
        self._tier.give_back(pieces)

    def __del__(self) -> None:
        self.drop()

    def _parts(self, storage: torch.UntypedStorage) -> list[tuple[torch.Tensor, _Piece]]:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        sizes = [piece.size_bytes for piece in self._pieces]
        if sizes:
            sizes[-1] -= sum(sizes) - self._size_bytes
        return list(zip(whole.split(sizes), self._pieces, strict=True)) if sizes else []


def _wait(stream: torch.Stream, event: torch.Event) -> None:
    """Whatever `stream` is told next begins after `event`. A test leaves each of these out, and sees a wrong value."""
    stream.wait_event(event)


def _event(stream: torch.Stream, *, timed: bool = False) -> torch.Event:
    """All that `stream` has been told to do; `timed`, it tells when that was over, which takes the stream longer."""
    event = torch.Event(stream.device, enable_timing=timed)
    event.record(stream)
    return event


def _piece_sizes(size_bytes: int) -> list[int]:
    """Of what a storage is cut into: each as large as it is taken, and less than a smallest one more in all."""
    whole, rest_bytes = divmod(size_bytes, _PIECE_BYTES)
    units = -(-rest_bytes // _SMALLEST_PIECE_BYTES)
    rest = [_SMALLEST_PIECE_BYTES << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
    return [_PIECE_BYTES] * whole + rest
