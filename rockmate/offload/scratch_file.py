"""A file without a name for scratch data: read and written past the system's cache where the file system has that.

It has no name from the start, or loses it at once, so that nothing is left of it however the process ends, and is
readable and writable by its owner alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from typing import Any

from rockmate.errors import OffloadError

_PAGE_BYTES = mmap.PAGESIZE
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # file systems, by the number that the kernel gives them
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


class ScratchFile:
    """One file in `folder`, for whole blocks of `block_bytes` at multiples of it.

    Memory at multiples of `memory_bytes` needs no copy. Raises `OffloadError` where no file can be made there, or
    where what is stored there is in memory.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        _refuse_memory(folder)
        self.descriptor, self.is_direct = _opened(folder)
        self.memory_bytes, self.block_bytes = _alignment(self.descriptor) if self.is_direct else (1, _PAGE_BYTES)

    def write(self, buffer: Any, offset: int) -> None:
        """All of `buffer`, whole blocks. Raises `OSError`."""
        done, view = 0, memoryview(buffer).cast("B")
        while done < len(view):
            written = os.pwrite(self.descriptor, view[done:], offset + done)
            if not written:
                raise OSError(f"nothing was written at byte {offset + done} of a file in {self.folder}")
            done += written
        if not self.is_direct:
            self._leave_the_cache(offset, len(view))

    def read(self, buffer: Any, offset: int) -> None:
        """As much as `buffer` holds, whole blocks. Raises `OSError`, also where the file ends before."""
        done, view = 0, memoryview(buffer).cast("B")
        while done < len(view):
            read = os.preadv(self.descriptor, [view[done:]], offset + done)
            if not read:
                raise OSError(f"a file in {self.folder} ends at byte {offset + done}, and more was written to it")
            done += read
        if not self.is_direct:
            self._leave_the_cache(offset, len(view))

    def close(self) -> None:
        """Give its space back to the file system."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _leave_the_cache(self, offset: int, size_bytes: int) -> None:
        """The cache is memory, too: what is in this file is not to fill it."""
        os.fdatasync(self.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def free_bytes(folder: str) -> int:
    """What the file system of `folder` has left for this user. Raises `OffloadError`."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return found.f_bavail * found.f_frsize


def _opened(folder: str) -> tuple[int, bool]:
    """A descriptor, and whether what goes through it passes by the system's cache."""
    direct = getattr(os, "O_DIRECT", 0)
    for flag in (direct, 0) if direct else (0,):
        with contextlib.suppress(OSError):
            return _nameless(folder, flag), bool(flag)
    try:
        return _nameless(folder, 0), False
    except OSError as error:
        raise _unusable(folder, error) from error


def _nameless(folder: str, flag: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | flag
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_TMPFILE | flags, 0o600)
    made, name = tempfile.mkstemp(prefix="rockmate-", dir=folder)  # for its owner alone
    try:
        return os.open(name, flags)
    finally:
        os.unlink(name)
        os.close(made)


def _unusable(folder: str, error: OSError) -> OffloadError:
    return OffloadError(
        f"no scratch file can be made in {folder!r}: {error.strerror or error}. Give the path of a folder that exists, "
        "on a disk, in which you may write."
    )


def _refuse_memory(folder: str) -> None:
    kind = _IN_MEMORY.get(_file_system(folder))
    if kind is not None:
        raise OffloadError(
            f"{folder!r} is in memory ({kind}): what is moved there takes as much of it as where it was. Give the path "
            "of a folder on a disk."
        )


def _file_system(folder: str) -> int:
    """The number of its kind; 0 where the system does not tell."""
    ask = getattr(ctypes.CDLL(None), "statfs", None)
    told = ctypes.create_string_buffer(256)
    if ask is None or ask(os.fsencode(folder), told) != 0:
        return 0
    return ctypes.c_long.from_buffer(told).value


def _alignment(descriptor: int) -> tuple[int, int]:
    """What addresses and offsets must be multiples of, as `statx` tells; a page each where it does not."""
    ask = getattr(ctypes.CDLL(None), "statx", None)
    told = ctypes.create_string_buffer(256)
    if ask is None or ask(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, told) != 0:
        return _PAGE_BYTES, _PAGE_BYTES
    mask, memory_bytes, block_bytes = (ctypes.c_uint32.from_buffer(told, at).value for at in (0x00, 0x98, 0x9C))
    if not mask & _STATX_DIOALIGN or not memory_bytes or not block_bytes:
        return _PAGE_BYTES, _PAGE_BYTES
    return memory_bytes, block_bytes
