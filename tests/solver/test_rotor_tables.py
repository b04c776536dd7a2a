"""Rotor's table: the recursion as it is told, in numpy and by numba."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers.chain import rotor_tables as tables
from rk_solvers.chain.blocks import Block, BlockOption, Pin, Rerun

FILLERS = {"numpy": lambda: tables.fill_by_numpy, "numba": tables.numba_filler}


def random_blocks(seed: int) -> tuple[Block, ...]:
    """A chain of the dynamic program, sizes in slots; some values are read by blocks beyond the next one."""
    rng = random.Random(seed)
    count = rng.randint(1, 8)

    def rerun() -> Rerun:
        peak = rng.randint(1, 15)
        return Rerun(rng.random(), peak, peak + rng.randint(0, 3), rng.random() < 0.7)

    def option(given: bool) -> BlockOption:
        again = rerun()
        return BlockOption(
            rng.random(), rng.randint(5, 12), rng.randint(1, 12), rng.randint(1, 15), again.time_ms, again.peak_bytes,
            (), again, rerun() if given else None,
        )  # fmt: skip

    def pins(home: int) -> tuple[Pin, ...]:
        if home + 2 >= count or rng.random() < 0.5:
            return ()
        first, last = rng.randint(home, count - 1), rng.randint(home + 2, count - 1)
        return (Pin(rng.randint(1, 4), min(first, last), last, rng.random() < 0.5),)

    def block(index: int) -> Block:
        given = rng.random() < 0.6 and index < count - 1
        options = tuple(option(given) for _ in range(rng.randint(1, 4)))
        times = rng.random(), rng.random()
        sizes = rng.randint(0, 3), pins(index), rng.randint(0, 3), rng.randint(1, 6)
        return Block(range(index, index + 1), (), *times, *sizes, options, rng.randint(0, 3))

    return tuple(block(index) for index in range(count))


class Recursion:
    """The recursion as it is told, one cell after the other, in numbers of slots."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        self.loss = len(blocks) - 1
        self.best = functools.cache(self.least_ms)

    def pinned(self, first: int, last: int) -> int:
        made = [pin for block in self.blocks[:first] for pin in block.pins]
        return sum(
            pin.size_bytes for pin in made if pin.first_reader <= last and (pin.late or pin.last_reader >= first)
        )

    def resident(self, last: int) -> int:
        return self.blocks[last].resident_bytes if last < self.loss else 0

    def rerun(self, option: BlockOption, given: bool) -> Rerun:
        found = option.given if given and option.given else option.again
        assert found
        return found

    def least_ms(self, given: bool, first: int, last: int, memory: int) -> float:
        found = [math.inf]
        if given:  # it may be forgotten; who has no use for it forgets it
            found = [self.best(False, first, last, memory)]
            if not any(option.given for option in self.blocks[last].options):
                return found[0]
        extra = self.blocks[last].given_bytes if given else 0
        if first == last:
            return min([*found, *self.alone(given, last, memory)])
        found += self.storing_nothing(given, first, last, memory)
        runs = last == self.loss or any(self.rerun(option, given).reads_input for option in self.blocks[last].options)
        if runs:
            found += self.running_once(given, first, last, memory)
            for after in range(first + 1, last + 1):
                left = memory - self.blocks[after].input_bytes
                if left >= 0 and self.passing_bytes(first, after, last) + extra <= memory:
                    right = self.best(given, after, last, left)
                    found.append(self.passing_ms(first, after) + right + self.best(True, first, after - 1, memory))
        return min(found)

    def alone(self, given: bool, block: int, memory: int) -> Iterator[float]:
        """Run a block in a cell of its own."""
        numbers, jump = self.blocks[block], self.pinned(block, block)
        for option in numbers.options:
            rerun = self.rerun(option, given)
            ms, peak = rerun.time_ms, rerun.peak_bytes + numbers.resident_bytes
            if block == self.loss:  # for the first time
                ms = numbers.forward_ms + option.extra_ms
                peak = max(option.forward_bytes, peak)
            if peak + jump <= memory:
                yield ms + numbers.backward_ms

    def storing_nothing(self, given: bool, first: int, last: int, memory: int) -> Iterator[float]:
        """Run all blocks, or none where the last does not read its input, for the last one's backward."""
        numbers, jump = self.blocks[last], self.pinned(last, last)
        extra = numbers.given_bytes if given else 0
        for option in numbers.options:
            rerun = self.rerun(option, given)
            ms, peak, reads = rerun.time_ms, rerun.total_bytes + numbers.resident_bytes, rerun.reads_input
            if last == self.loss:
                ms, peak, reads = numbers.forward_ms + option.extra_ms, max(option.forward_bytes, peak), True
            if reads:
                ms += self.passing_ms(first, last)
                peak = max(peak, self.passing_bytes(first, last, last) + extra - jump)
            if peak + jump <= memory:
                yield ms + numbers.backward_ms + self.best(False, first, last - 1, memory)

    def running_once(self, given: bool, first: int, last: int, memory: int) -> Iterator[float]:
        """Run the first block with each option, then solve the others beside what it saves."""
        numbers, jump = self.blocks[first], self.pinned(first, last)
        extra = self.blocks[last].given_bytes if given else 0
        for option in numbers.options:
            saved = option.saved_bytes - sum(pin.size_bytes for pin in numbers.pins)
            forward = option.forward_bytes + jump + self.resident(last) + extra
            backward = option.backward_bytes + numbers.resident_bytes + jump
            if max(forward, backward, saved) <= memory:
                own = numbers.forward_ms + numbers.backward_ms + option.extra_ms
                yield own + self.best(given, first + 1, last, memory - saved)

    def passing_ms(self, first: int, stop: int) -> float:
        return math.fsum(block.forward_ms for block in self.blocks[first:stop])

    def passing_bytes(self, first: int, stop: int, last: int) -> int:
        """To run blocks `first` to `stop - 1` keeping nothing."""
        return max(
            self.blocks[k].forget_bytes
            + self.pinned(k, last)
            + self.resident(last)
            + (self.blocks[k].input_bytes if k > first else 0)
            for k in range(first, stop)
        )


def least_time(blocks: tuple[Block, ...], shape: tuple[int, ...]) -> np.ndarray:
    """All cells, those that are none at zero."""
    recursion = Recursion(blocks)
    cells = np.zeros(shape)
    for state, first, last, memory in np.ndindex(*shape):
        if first <= last:
            cells[state, first, last, memory] = recursion.best(bool(state), first, last, memory)
    return cells


@pytest.mark.parametrize("filler", FILLERS)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_the_table_is_that_of_the_recursion(filler, seed, slots):
    fill = FILLERS[filler]()
    if fill is None:
        pytest.skip("numba is not installed")
    blocks = random_blocks(seed)
    numbers = tables.ChainNumbers.of(blocks, 1, slots)
    times = np.zeros(tables.table_shape(numbers))
    fill(numbers, times, 0, numbers.length)
    np.testing.assert_allclose(times, least_time(blocks, times.shape), rtol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_numba_and_numpy_agree_to_the_last_bit(seed, slots):
    compiled = tables.numba_filler()
    if compiled is None:
        pytest.skip("numba is not installed")
    numbers = tables.ChainNumbers.of(random_blocks(seed), 1, slots)
    one, other = np.zeros((2, *tables.table_shape(numbers)))
    compiled(numbers, one, 0, numbers.length)
    tables.fill_by_numpy(numbers, other, 0, numbers.length)
    assert np.array_equal(one, other)
