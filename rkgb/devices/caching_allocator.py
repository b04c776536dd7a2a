"""What allocators do and tell, and an emulation of PyTorch's caching one: what it takes for a run of allocations.

The allocator takes *segments* from the device and hands out blocks of them. It rounds sizes up, takes the smallest free
block that is large enough, splits it where the rest is worth keeping, and joins free neighbours. What it holds is more
than what is in use by the gaps between blocks. The rules are those that PyTorch documents for CUDA (notes on memory
management, and the comment at the top of c10/cuda/CUDACachingAllocator.cpp); its kinds for other devices share them.

Memory of the device has no end here: a real allocator that finds none gives back what it holds unused, and tries again.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """`size_bytes` taken at `address`, or given back when negative."""

    address: int
    size_bytes: int
    time_ns: int = 0  # on the recorder's own line of time
    stream: int = 0  # for which it was taken, where the device has several


@dataclass(frozen=True, slots=True)
class AllocatorLevels:
    """An allocator's own statistics. The highest levels are those since `Device.restart_levels`."""

    allocated_bytes: int  # in blocks that are in use
    most_allocated_bytes: int
    most_reserved_bytes: int  # taken from the device, gaps included

    def or_higher(self, other: AllocatorLevels) -> AllocatorLevels:
        """These, with the highest levels of both."""
        return replace(
            self,
            most_allocated_bytes=max(self.most_allocated_bytes, other.most_allocated_bytes),
            most_reserved_bytes=max(self.most_reserved_bytes, other.most_reserved_bytes),
        )


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """The sizes by which segments are taken and blocks are split. The defaults are PyTorch's."""

    block_bytes: int = 512  # all blocks are multiples of it
    small_bytes: int = 1 << 20  # requests up to that have segments apart from those of larger ones
    small_segment_bytes: int = 2 << 20
    large_segment_bytes: int = 20 << 20
    own_segment_bytes: int = 10 << 20  # requests from that on have a segment to themselves
    own_multiple_bytes: int = 2 << 20  # of which those segments are multiples
    is_expandable: bool = False  # one segment for all, which grows by pages at its end

    def rounded(self, size_bytes: int) -> int:
        """The block for a request."""
        return _rounded(max(size_bytes, 1), self.block_bytes)

    def segment_bytes(self, size_bytes: int) -> int:
        """The segment that is taken where no free block has room for one of `size_bytes`."""
        if size_bytes <= self.small_bytes:
            return self.small_segment_bytes
        if size_bytes < self.own_segment_bytes:
            return self.large_segment_bytes
        return _rounded(size_bytes, self.own_multiple_bytes)

    def is_split(self, rest_bytes: int, is_small: bool) -> bool:
        """Whether so much becomes a free block of its own, or stays with the block that is handed out."""
        return rest_bytes >= self.block_bytes if is_small or self.is_expandable else rest_bytes > self.small_bytes


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A segment that an allocator holds: its blocks in order, each by its size and whether it is in use."""

    address: int
    is_small: bool
    stream: int
    blocks: tuple[tuple[int, bool], ...]


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a segment, in use or free."""

    address: int
    size_bytes: int
    pool: tuple[bool, int]  # whether it is for small requests, and its stream
    is_free: bool = False
    before: Block | None = field(default=None, repr=False)  # neighbours in its segment
    after: Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """By which free blocks are in order: of equal ones the lowest address is taken."""
        return self.size_bytes, self.address


def held_segments(snapshot: Iterable[dict[str, Any]]) -> list[HeldSegment]:
    """The segments of a snapshot, in the form that PyTorch has for it."""
    return [
        HeldSegment(
            segment["address"],
            segment["segment_type"] == "small",
            segment["stream"],
            tuple((block["size"], block["state"] != "inactive") for block in segment["blocks"]),
        )
        for segment in snapshot
    ]


class CachingAllocator:
    """Hands out blocks as PyTorch's allocator does, and counts what it holds.

    It begins with the `segments` that one holds, or with none.
    """

    def __init__(self, rules: SegmentRules, segments: Iterable[HeldSegment] = ()) -> None:
        self.rules = rules
        self.allocated_bytes = self.most_allocated_bytes = 0
        self.reserved_bytes = self.most_reserved_bytes = 0
        self._free: defaultdict[tuple[bool, int], list[tuple[tuple[int, int], Block]]] = defaultdict(list)
        self._last: dict[tuple[bool, int], Block] = {}  # of an expandable segment: behind it, it grows
        self._end = 0  # of all addresses
        for segment in sorted(segments, key=lambda segment: segment.address):
            self._hold(segment)

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """A block of at least `size_bytes`."""
        size_bytes = self.rules.rounded(size_bytes)
        pool = size_bytes <= self.rules.small_bytes, stream
        block = self._best_fit(pool, size_bytes) or self._from_device(pool, size_bytes)
        rest_bytes = block.size_bytes - size_bytes
        if self.rules.is_split(rest_bytes, pool[0]):
            rest = Block(block.address + size_bytes, rest_bytes, pool, before=block, after=block.after)
            block.size_bytes = size_bytes
            self._chain(block, rest, rest.after)
            self._put(rest)
        self.allocated_bytes += block.size_bytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: Block) -> None:
        """Join it with free neighbours. Raises `ValueError` for what is free already."""
        if block.is_free:
            raise ValueError(f"what is at {block.address} is free already.")
        self.allocated_bytes -= block.size_bytes
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                block = self._joined(*sorted((block, other), key=lambda block: block.address))
        self._put(block)

    def run(self, events: Iterable[AllocationEvent]) -> AllocatorLevels:
        """What is held after `events`, and at most until then. Each release is of a block that was allocated in them.

        Raises `ValueError` for one that is not.
        """
        alive: dict[int, Block] = {}
        for event in events:
            if event.size_bytes >= 0:
                alive[event.address] = self.allocate(event.size_bytes, event.stream)
                continue
            block = alive.pop(event.address, None)
            if block is None:
                raise ValueError(f"{-event.size_bytes} bytes at {event.address} are released that nobody has.")
            self.release(block)
        return AllocatorLevels(self.allocated_bytes, self.most_allocated_bytes, self.most_reserved_bytes)

    # ---- free blocks ------------------------------------------------------------------------------------

    def _best_fit(self, pool: tuple[bool, int], size_bytes: int) -> Block | None:
        free = self._free[pool]
        place = bisect.bisect_left(free, (size_bytes, 0), key=lambda entry: entry[0])
        if place == len(free):
            return None
        # The end of an expandable segment has room for more than any other block: it is kept for that.
        if free[place][1] is self._last.get(pool) and place + 1 < len(free):
            place += 1
        block = free.pop(place)[1]
        block.is_free = False
        return block

    def _put(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.pool], (block.key, block), key=lambda entry: entry[0])

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, block.key, key=lambda entry: entry[0]))
        block.is_free = False

    def _chain(self, *blocks: Block | None) -> None:
        """Make neighbours of these; None is the end of a segment."""
        for one, other in itertools.pairwise(blocks):
            if one is not None:
                one.after = other
            if other is not None:
                other.before = one
        for one in blocks:
            if one is not None and self.rules.is_expandable and one.after is None:
                self._last[one.pool] = one

    def _joined(self, low: Block, high: Block) -> Block:
        low.size_bytes += high.size_bytes
        self._chain(low, high.after)
        return low

    # ---- segments -----------------------------------------------------------------------------------------

    def _from_device(self, pool: tuple[bool, int], size_bytes: int) -> Block:
        if self.rules.is_expandable:
            return self._grown(pool, size_bytes)
        return self._segment(pool, self.rules.segment_bytes(size_bytes))

    def _segment(self, pool: tuple[bool, int], size_bytes: int) -> Block:
        block = Block(self._end, size_bytes, pool)
        self._count(size_bytes)
        return block

    def _grown(self, pool: tuple[bool, int], size_bytes: int) -> Block:
        """The end of the expandable segment, by as many pages longer as are missing."""
        page_bytes = self.rules.small_segment_bytes if pool[0] else self.rules.large_segment_bytes
        last = self._last.get(pool)
        if last is None or not last.is_free:
            block = self._segment(pool, _rounded(size_bytes, page_bytes))
            self._chain(last, block, None)
            return block
        self._take(last)
        missing_bytes = _rounded(size_bytes - last.size_bytes, page_bytes)
        last.size_bytes += missing_bytes
        self._count(missing_bytes)
        return last

    def _count(self, size_bytes: int) -> None:
        self._end += size_bytes
        self.reserved_bytes += size_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)

    def _hold(self, segment: HeldSegment) -> None:
        pool, address = (segment.is_small, segment.stream), segment.address
        before: Block | None = None
        for size_bytes, is_in_use in segment.blocks:
            block = Block(address, size_bytes, pool)
            self._chain(before, block, None)
            if is_in_use:
                self.allocated_bytes += size_bytes
            else:
                self._put(block)
            before, address = block, address + size_bytes
        self._end = address
        size_bytes = address - segment.address
        self.reserved_bytes += size_bytes
        self.most_reserved_bytes = self.reserved_bytes
        self.most_allocated_bytes = self.allocated_bytes


def _rounded(size_bytes: int, multiple_bytes: int) -> int:
    return -(-size_bytes // multiple_bytes) * multiple_bytes
