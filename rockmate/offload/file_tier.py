"""Tensors of the CPU in a file, by one thread for each direction."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rkgb.devices.registry import device_of
from rockmate.errors import OffloadError
from rockmate.offload.extents import Extents
from rockmate.offload.large_pages import make_ready
from rockmate.offload.scratch_file import ScratchFile, free_bytes
from rockmate.offload.tier import Parcel, Tier, Traffic
from rockmate.units import format_bytes

_PIECE_BYTES = 8 << 20  # at once: longer ones are no faster
# At once, of what is copied, since it lies where the file takes no memory from: that is rare, and larger pieces are no
# faster. It counts in the budget: where that is hardly above the largest operation's bytes, there is room for no more.
_STAGED_BYTES = 256 << 10


_TIERS: weakref.WeakSet[FileTier] = weakref.WeakSet()


class FileTier(Tier):
    """A scratch file in `folder`, where temporary files are by default.

    It is made at the first `send`. A process that forks has another one then; what was sent before can be had in both.
    Raises `OffloadError` where no file can be made there.
    """

    staging_bytes = 2 * _STAGED_BYTES

    def __init__(self, folder: str | None = None, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        self.folder = tempfile.gettempdir() if folder is None else os.fspath(folder)
        self.name = f"a file in {self.folder}"
        self._lock = threading.Lock()
        self._returned: deque[tuple[_Opened, _Layout]] = deque()  # places that nobody needs any more
        self._opened: _Opened | None = None
        free_bytes(self.folder)  # tells now that there is no such folder
        _TIERS.add(self)

    def send(self, storage: torch.UntypedStorage) -> Parcel:
        if not device_of(storage.device).is_host:
            raise OffloadError(f"tensors on {storage.device} are not written to {self.name}: only the CPU's are.")
        self._take_back()
        with self._lock:
            self._hold(storage.nbytes())
            try:
                self._opened = self._open()
                layout = _Layout.of(storage, self._opened.file, self._opened.extents)
            except BaseException:
                self._let_go(storage.nbytes())
                raise
        self._take_back()  # what was told meanwhile
        return _FileParcel(self, self._opened, storage, layout)

    def open(self) -> None:
        """Make the file now. Raises `OffloadError` where none can be made, or where it would be in memory."""
        with self._lock:
            self._opened = self._open()

    def _open(self) -> _Opened:
        if self._opened is None or self._opened.process != os.getpid():
            opened = _Opened(self.folder)
            weakref.finalize(self, opened.close_here)  # a module that is gone leaves neither file nor threads
            return opened
        return self._opened

    def room_bytes(self) -> int:
        with self._lock:
            taken_bytes = 0 if self._opened is None else self._opened.extents.end_bytes - self.held_bytes
        return free_bytes(self.folder) + max(0, taken_bytes)

    def traffic(self) -> tuple[Traffic, Traffic]:
        opened = self._opened
        return (Traffic(), Traffic()) if opened is None else (opened.out.traffic, opened.back.traffic)

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close_here()
        self._take_back()

    def after_fork(self) -> None:
        """In the process that came of it: a thread that it does not have may have held the lock."""
        self._lock = threading.Lock()

    def given_back(self, opened: _Opened, layout: _Layout) -> None:
        """A parcel's space, once nothing of it is on its way.

        A collection of garbage may tell that to a thread that has the lock: whoever has it takes it back then.
        """
        self._returned.append((opened, layout))
        self._take_back()

    def _take_back(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    opened, layout = self._returned.popleft()
                    opened.extents.give_back(layout.place, layout.size_bytes)
                    self._let_go(layout.size_bytes)
            finally:
                self._lock.release()


def _after_fork() -> None:
    for tier in _TIERS:
        tier.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Opened:
    """The file of one process, with its threads."""

    def __init__(self, folder: str) -> None:
        self.process = os.getpid()
        self.file = ScratchFile(folder)
        self.extents = Extents(self.file.block_bytes)
        self.out = _Direction("out", self.file)
        self.back = _Direction("in", self.file)

    def close_here(self) -> None:
        """`close`, but in a process that has come of a fork: the threads are not there, and the file is another's."""
        if self.process == os.getpid():
            self.close()

    def close(self) -> None:
        for direction in (self.out, self.back):
            direction.pool.shutdown(wait=True, cancel_futures=True)
        self.file.close()


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a storage lies in the file: first its middle, whose address and size the file takes, then its two ends.

    So nothing but the ends is copied, wherever the storage is.
    """

    place: int
    head_bytes: int
    middle_bytes: int
    tail_bytes: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage, file: ScratchFile, extents: Extents) -> _Layout:
        """That of `storage`, at a place that is taken for it."""
        size_bytes = storage.nbytes()
        head_bytes = min(-storage.data_ptr() % file.memory_bytes, size_bytes)
        middle_bytes = (size_bytes - head_bytes) // file.block_bytes * file.block_bytes
        tail_bytes = size_bytes - head_bytes - middle_bytes
        return cls(extents.take(middle_bytes + head_bytes + tail_bytes), head_bytes, middle_bytes, tail_bytes)

    @property
    def size_bytes(self) -> int:
        """Of the storage."""
        return self.head_bytes + self.middle_bytes + self.tail_bytes


class _Direction:
    """One thread, and a piece of memory at an address that the file takes."""

    def __init__(self, name: str, file: ScratchFile) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=f"rockmate-{name}")
        self.file = file
        self.staging = mmap.mmap(-1, _STAGED_BYTES)
        self.staging_address = ctypes.addressof(ctypes.c_char.from_buffer(self.staging))
        self.traffic = Traffic()

    def write(self, storages: list[torch.UntypedStorage], layout: _Layout) -> None:
        """The one in the list, which is empty then: who waits for this is to be the last who has it."""
        begun = time.perf_counter()
        storage = storages.pop()
        middle = storage.data_ptr() + layout.head_bytes
        for offset, size_bytes in _pieces(layout.middle_bytes):
            self.file.write(_memory(middle + offset, size_bytes), layout.place + offset)
        if layout.head_bytes + layout.tail_bytes:
            self._copy_ends(storage.data_ptr(), layout, into_memory=False)
            self.file.write(self._ends(layout), layout.place + layout.middle_bytes)
        self._count(layout, begun)

    def read(self, storages: list[torch.UntypedStorage], layout: _Layout) -> None:
        """Into the one in the list, which is empty then."""
        begun = time.perf_counter()
        storage = storages.pop()
        make_ready(storage.data_ptr(), layout.size_bytes)
        middle = storage.data_ptr() + layout.head_bytes
        is_taken = middle % self.file.memory_bytes == 0
        for offset, size_bytes in _pieces(layout.middle_bytes, _PIECE_BYTES if is_taken else _STAGED_BYTES):
            if is_taken:
                self.file.read(_memory(middle + offset, size_bytes), layout.place + offset)
            else:
                self.file.read(memoryview(self.staging)[:size_bytes], layout.place + offset)
                ctypes.memmove(middle + offset, self.staging_address, size_bytes)
        if layout.head_bytes + layout.tail_bytes:
            self.file.read(self._ends(layout), layout.place + layout.middle_bytes)
            self._copy_ends(storage.data_ptr(), layout, into_memory=True)
        self._count(layout, begun)

    def _count(self, layout: _Layout, begun: float) -> None:
        self.traffic = self.traffic.and_one(layout.size_bytes, 1e3 * (time.perf_counter() - begun))

    def _ends(self, layout: _Layout) -> memoryview:
        blocks = -(-(layout.head_bytes + layout.tail_bytes) // self.file.block_bytes)
        return memoryview(self.staging)[: blocks * self.file.block_bytes]

    def _copy_ends(self, address: int, layout: _Layout, into_memory: bool) -> None:
        for at, staged, size_bytes in (
            (address, self.staging_address, layout.head_bytes),
            (
                address + layout.head_bytes + layout.middle_bytes,
                self.staging_address + layout.head_bytes,
                layout.tail_bytes,
            ),
        ):
            ctypes.memmove(*((at, staged) if into_memory else (staged, at)), size_bytes)


def _pieces(size_bytes: int, most_bytes: int = _PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """Offset and size of what is moved at once."""
    for offset in range(0, size_bytes, most_bytes):
        yield offset, min(most_bytes, size_bytes - offset)


_Move = Callable[[list[torch.UntypedStorage], _Layout], None]


def _without_traces(move: _Move, storages: list[torch.UntypedStorage], layout: _Layout) -> None:
    """An error's traceback would hold the storage."""
    try:
        move(storages, layout)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is raised where it is waited for
        raise error.with_traceback(None) from None


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address))


class _FileParcel(Parcel):
    def __init__(self, tier: FileTier, opened: _Opened, storage: torch.UntypedStorage, layout: _Layout) -> None:
        self._tier, self._opened, self._layout = tier, opened, layout
        self._is_there = True
        self._source: torch.UntypedStorage | None = storage
        self._target: torch.UntypedStorage | None = None
        self._read: Future[None] | None = None
        self._written = self._begin(opened.out, opened.out.write, storage)

    def wait_sent(self) -> None:
        if self._source is None:
            return
        if self._is_left_behind(self._written):
            self._written = self._here_and_now("out", self._source)
        self._result(self._written, "written to", "Free some space, or give another path.")
        self._source = None

    def recall(self) -> None:
        if self._target is not None:
            return
        self.wait_sent()
        self._target = torch.UntypedStorage(self._layout.size_bytes)
        self._read = self._begin(self._opened.back, self._opened.back.read, self._target)

    def take(self) -> torch.UntypedStorage:
        self.recall()
        assert self._read is not None
        assert self._target is not None
        if self._is_left_behind(self._read):
            self._read = self._here_and_now("in", self._target)
        lost = "Is the disk still there? The step has no result: run it again, or give another path."
        try:
            self._result(self._read, "read from", lost)
        except OffloadError:
            self._target = self._read = None  # it may be read another time
            raise
        target, self._target, self._read = self._target, None, None
        return target

    def drop(self) -> None:
        if not self._is_there:
            return
        self._is_there = False
        # What is on its way holds its memory itself; its place in the file is free once the later of both is over.
        last = self._read if self._read is not None else self._written
        self._source = self._target = self._read = None
        last.add_done_callback(lambda _: self._tier.given_back(self._opened, self._layout))

    def __del__(self) -> None:
        self.drop()

    def _begin(self, direction: _Direction, move: _Move, storage: torch.UntypedStorage) -> Future[None]:
        if self._opened.process != os.getpid():  # its threads are another process's
            return self._here_and_now("in", storage)
        try:
            return direction.pool.submit(_without_traces, move, [storage], self._layout)
        except RuntimeError as error:  # the pool has ended
            raise self._closed() from error

    def _is_left_behind(self, moving: Future[None]) -> bool:
        """Whether it was on its way when this process came of another one, whose threads are not here."""
        return self._opened.process != os.getpid() and not moving.done()

    def _here_and_now(self, way: str, storage: torch.UntypedStorage) -> Future[None]:
        """What a thread would do. What two processes write is the same, and in the same place."""
        done: Future[None] = Future()
        direction = _Direction(way, self._opened.file)
        move = direction.write if way == "out" else direction.read
        try:
            move([storage], self._layout)
        except OSError as error:
            done.set_exception(error.with_traceback(None))
        else:
            done.set_result(None)
        return done

    def _result(self, moving: Future[None], how: str, advice: str) -> None:
        try:
            moving.result()
        except CancelledError as error:
            raise self._closed() from error
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                why = f"the disk is full ({format_bytes(free_bytes(self._tier.folder))} are free)"
            size = format_bytes(self._layout.size_bytes)
            raise OffloadError(
                f"{size} could not be {how} {self._tier.name}: {why}. {advice}"
            ) from error.with_traceback(
                None  # which would hold this, and so the place in the file
            )

    def _closed(self) -> OffloadError:
        return OffloadError(f"what was sent to {self._tier.name} is gone: that was closed before the step ended.")
