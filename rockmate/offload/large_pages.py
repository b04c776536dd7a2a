"""Memory that is about to be filled by a device, made ready in few large pages.

A read into fresh memory otherwise faults page by page in the kernel: three times as slow as the disk.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

_PAGE_BYTES = mmap.PAGESIZE
_WORTH_BYTES = 4 << 20  # of smaller memory, few large pages are whole
_HUGE_PAGE = 14  # MADV_HUGEPAGE of Linux
_POPULATE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on


def make_ready(address: int, size_bytes: int) -> None:
    """Have the pages of this memory there, in large ones where the system gives any. What it cannot do is left."""
    advise = _advise()
    if advise is None or size_bytes < _WORTH_BYTES:
        return
    first = address + -address % _PAGE_BYTES
    last = (address + size_bytes) // _PAGE_BYTES * _PAGE_BYTES
    for advice in (_HUGE_PAGE, _POPULATE):
        advise(first, last - first, advice)


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's madvise; None where numbers mean something else, or nothing."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
