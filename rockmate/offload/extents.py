"""Who has which bytes of a file: the first gap that is large enough is taken, and free neighbours are joined."""

from __future__ import annotations

import bisect


class Extents:
    """Places in a file, all of them multiples of `unit_bytes` in size and offset."""

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.end_bytes = 0  # of the file so far
        self._free: list[tuple[int, int]] = []  # offset and size, in order

    def take(self, size_bytes: int) -> int:
        """The offset of so many bytes that nobody has: the lowest."""
        size_bytes = self.rounded(size_bytes)
        for place, (offset, free_bytes) in enumerate(self._free):
            if free_bytes >= size_bytes:
                rest = [(offset + size_bytes, free_bytes - size_bytes)] if free_bytes > size_bytes else []
                self._free[place : place + 1] = rest
                return offset
        offset, self.end_bytes = self.end_bytes, self.end_bytes + size_bytes
        return offset

    def give_back(self, offset: int, size_bytes: int) -> None:
        """What `take` has given for `size_bytes`."""
        size_bytes = self.rounded(size_bytes)
        place = bisect.bisect(self._free, (offset, 0))
        if place < len(self._free) and offset + size_bytes == self._free[place][0]:
            size_bytes += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            place -= 1
            offset, before_bytes = self._free.pop(place)
            size_bytes += before_bytes
        if offset + size_bytes == self.end_bytes:
            self.end_bytes = offset  # a file is as long as it was at most; what comes next begins here
        else:
            self._free.insert(place, (offset, size_bytes))

    def rounded(self, size_bytes: int) -> int:
        """What is taken for so many bytes."""
        return max(1, -(-size_bytes // self.unit_bytes)) * self.unit_bytes
