"""Places in a file, against a map of all of its units."""

import random

import pytest

from rockmate.offload.extents import Extents

UNIT = 512


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_given_twice_and_the_lowest_gap_is_taken(seed):
    chance, extents = random.Random(seed), Extents(UNIT)
    owner: dict[int, int] = {}  # of each unit
    taken: dict[int, int] = {}
    for number in range(300):
        if taken and chance.random() < 0.5:
            offset = chance.choice(list(taken))
            size_bytes = taken.pop(offset)
            extents.give_back(offset, size_bytes)
            for unit in range(offset // UNIT, (offset + extents.rounded(size_bytes)) // UNIT):
                del owner[unit]
            continue
        size_bytes = chance.choice([0, 1, UNIT, UNIT + 1, chance.randrange(20 * UNIT)])
        units = max(1, -(-size_bytes // UNIT))
        lowest = next(place for place in range(10_000) if all(place + k not in owner for k in range(units)))
        offset = extents.take(size_bytes)
        assert offset == lowest * UNIT
        taken[offset] = size_bytes
        owner.update(dict.fromkeys(range(lowest, lowest + units), number))
        assert extents.end_bytes == UNIT * (max(owner) + 1)
    for offset, size_bytes in taken.items():
        extents.give_back(offset, size_bytes)
    assert extents.end_bytes == 0


def test_what_fits_no_gap_goes_to_the_end():
    extents = Extents(UNIT)
    places = [extents.take(UNIT) for _ in range(4)]
    extents.give_back(places[1], UNIT)
    assert extents.take(2 * UNIT) == 4 * UNIT
    assert extents.take(UNIT) == places[1]
