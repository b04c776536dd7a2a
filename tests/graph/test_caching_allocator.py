"""The emulated allocator by hand, and against one that looks at every block; tests/accelerator has a real one."""

import random
from dataclasses import dataclass

import pytest

from rkgb.devices.caching_allocator import AllocationEvent, CachingAllocator, HeldSegment, SegmentRules, held_segments

KIB, MIB = 1 << 10, 1 << 20
RULES = SegmentRules()
EXPANDABLE = SegmentRules(is_expandable=True)


def reserved(*sizes, rules=RULES):
    allocator = CachingAllocator(rules)
    for size_bytes in sizes:
        allocator.allocate(size_bytes)
    return allocator.reserved_bytes


def test_small_requests_share_2_mib_and_larger_ones_20():
    assert reserved(1) == reserved(1, 513, MIB) == 2 * MIB
    assert reserved(MIB + 1) == reserved(3 * MIB, 10 * MIB - 1) == 20 * MIB
    assert reserved(10 * MIB) == 10 * MIB
    assert reserved(11 * MIB) == 12 * MIB
    assert reserved(MIB, MIB, 1) == 4 * MIB


def test_what_is_left_of_a_block_is_kept_with_it_where_it_is_hardly_worth_splitting():
    allocator = CachingAllocator(RULES)
    large = allocator.allocate(11 * MIB)
    assert large.size_bytes == allocator.allocated_bytes == 12 * MIB  # 1 MiB would be left
    allocator.release(large)
    assert allocator.allocate(10 * MIB).size_bytes == 10 * MIB
    small = allocator.allocate(100)
    assert (small.size_bytes, allocator.allocated_bytes) == (512, 10 * MIB + 512)


def test_the_smallest_block_with_room_is_taken_and_neighbours_are_joined():
    allocator = CachingAllocator(RULES)
    wide, _, narrow, _ = (allocator.allocate(size_bytes) for size_bytes in (64 * KIB, KIB, 32 * KIB, KIB))
    for block in (wide, narrow):
        allocator.release(block)
    assert allocator.allocate(20 * KIB).address == narrow.address
    assert allocator.allocate(40 * KIB).address == wide.address
    allocator = CachingAllocator(RULES)
    blocks = [allocator.allocate(512 * KIB) for _ in range(4)]
    for place in (1, 3, 2, 0):
        allocator.release(blocks[place])
    assert allocator.allocate(MIB).address == 0
    assert allocator.reserved_bytes == 2 * MIB


def test_streams_do_not_share_blocks():
    allocator = CachingAllocator(RULES)
    allocator.release(allocator.allocate(KIB, stream=1))
    allocator.allocate(KIB, stream=2)
    assert allocator.reserved_bytes == 4 * MIB


def test_an_expandable_segment_grows_by_pages_and_splits_all():
    assert reserved(KIB, 3 * MIB, rules=EXPANDABLE) == (2 + 20) * MIB
    assert reserved(*[15 * MIB] * 4, rules=EXPANDABLE) == 60 * MIB
    assert reserved(*[15 * MIB] * 4) == 64 * MIB
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(30 * MIB)
    allocator.allocate(30 * MIB)
    allocator.release(first)
    assert allocator.allocate(30 * MIB - 512).size_bytes == 30 * MIB - 512
    allocator.allocate(25 * MIB)  # at the end, which grows by a page and more
    assert allocator.reserved_bytes == 100 * MIB


def test_the_end_of_an_expandable_segment_is_kept_for_what_fits_nowhere_else():
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(12 * MIB)
    allocator.allocate(2 * MIB)  # 6 MiB are left at the end
    allocator.release(first)
    assert allocator.allocate(5 * MIB).address == first.address


def test_it_begins_with_what_another_holds():
    told = [
        {
            "address": 1 << 30,
            "segment_type": "large",
            "stream": 0,
            "blocks": [
                {"size": 8 * MIB, "state": "active_allocated"},
                {"size": 7 * MIB, "state": "inactive"},
                {"size": 5 * MIB, "state": "active_awaiting_free"},
            ],
        }
    ]
    segments = held_segments(told)
    assert segments == [HeldSegment(1 << 30, False, 0, ((8 * MIB, True), (7 * MIB, False), (5 * MIB, True)))]
    allocator = CachingAllocator(RULES, segments)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (20 * MIB, 13 * MIB)
    assert allocator.allocate(6 * MIB).address == (1 << 30) + 8 * MIB
    assert allocator.allocate(2 * MIB).address >= (1 << 30) + 20 * MIB
    assert allocator.most_reserved_bytes == 40 * MIB


def test_what_nobody_has_cannot_be_released():
    allocator = CachingAllocator(RULES)
    block = allocator.allocate(KIB)
    allocator.release(block)
    with pytest.raises(ValueError, match="what is at 0 is free already"):
        allocator.release(block)
    with pytest.raises(ValueError, match="1024 bytes at 7 are released that nobody has"):
        allocator.run([AllocationEvent(7, -KIB)])


@dataclass
class Piece:
    """Bytes of a segment, for an allocator that looks at all of them each time."""

    address: int
    size_bytes: int
    segment: int
    is_small: bool
    is_free: bool


def by_looking_at_all(events, rules):
    """The most that is allocated and reserved, without lists of free blocks or links between neighbours."""
    pieces, alive, end, most = [], {}, 0, (0, 0)
    for event in events:
        if event.size_bytes < 0:
            alive.pop(event.address).is_free = True
            joined = []
            for piece in sorted(pieces, key=lambda piece: piece.address):
                before = joined[-1] if joined else None
                if before and piece.is_free and before.is_free and piece.segment == before.segment:
                    before.size_bytes += piece.size_bytes
                else:
                    joined.append(piece)
            pieces = joined
            continue
        size_bytes = rules.rounded(event.size_bytes)
        is_small = size_bytes <= MIB
        fitting = [p for p in pieces if p.is_free and p.is_small == is_small and p.size_bytes >= size_bytes]
        piece = min(fitting, key=lambda piece: (piece.size_bytes, piece.address), default=None)
        if piece is None:
            piece = Piece(end, rules.segment_bytes(size_bytes), end, is_small, True)
            end += piece.size_bytes
            pieces.append(piece)
        piece.is_free, rest_bytes = False, piece.size_bytes - size_bytes
        if rest_bytes >= 512 if is_small else rest_bytes > MIB:
            piece.size_bytes = size_bytes
            pieces.append(Piece(piece.address + size_bytes, rest_bytes, piece.segment, is_small, True))
        alive[event.address] = piece
        allocated = sum(piece.size_bytes for piece in pieces if not piece.is_free)
        most = max(most[0], allocated), end
    return most


def random_events(seed, number):
    """Of sizes some of which come again and again, as those of layers do."""
    chance = random.Random(seed)
    usual = [int(2 ** chance.uniform(3, 25)) for _ in range(chance.randrange(1, 6))]
    events, alive = [], {}
    for place in range(number):
        if alive and chance.random() < 0.5:
            address = chance.choice(list(alive))
            events.append(AllocationEvent(address, -alive.pop(address)))
        else:
            alive[place] = chance.choice(usual) if chance.random() < 0.8 else int(2 ** chance.uniform(3, 25))
            events.append(AllocationEvent(place, alive[place]))
    return events


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_allocator_that_looks_at_all_blocks(seed):
    events = random_events(seed, 150)
    levels = CachingAllocator(RULES).run(events)
    assert (levels.most_allocated_bytes, levels.most_reserved_bytes) == by_looking_at_all(events, RULES)


@pytest.mark.parametrize("seed", range(60))
def test_expandable_segments_hold_what_is_allocated_at_least_and_split_to_the_byte(seed):
    events = random_events(seed, 150)
    levels = CachingAllocator(EXPANDABLE).run(events)
    alive = most = 0
    for event in events:
        size_bytes = RULES.rounded(abs(event.size_bytes))
        alive += size_bytes if event.size_bytes > 0 else -size_bytes
        most = max(most, alive)
    assert levels.most_allocated_bytes == most
    assert most <= levels.most_reserved_bytes
    assert levels.most_reserved_bytes % (2 * MIB) == 0
