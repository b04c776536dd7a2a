"""The table of rotor's dynamic program, filled by numba where that pays, else by numpy; equal to the last bit.

`T[i, j, m]` is the least time to run the forwards and backwards of blocks `i..j` with the input of `i` stored
outside and `m` slots of memory. A pin (a value that blocks farther on read too) is no input: it is counted
inside, wherever it is alive. The recursion is told in `rotor`.

Columns (one `j`) are filled in order, and each of them upwards (`i` from `j` down). Then all that a cell reads
lies in two runs of memory: row `i` up to `j - 1`, and column `j` below `i`, which is copied aside.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .blocks import Block, Option

Times = NDArray[np.float64]
Slots = NDArray[np.int64]
Filler = Callable[["ChainNumbers", Times], None]

# Sums of two cells from which numba pays. It adds about four times as many per second as numpy, but its import and the
# reading of its cache take most of a second: once in a process, and only for what takes numpy about half a second.
_WORTH_AN_IMPORT = 50_000_000
_WORTH_A_CALL = 100_000


@dataclass(frozen=True, slots=True)
class ChainNumbers:
    """The blocks of a chain in slots, sizes rounded up. Rows of missing options never fit."""

    slots: int
    forward_ms: Times  # [block]
    input: Slots  # [block]: what must be stored to start at it, pins left out
    own_ms: Times  # [block, option]: to run it once, and its backward
    alone_ms: Times  # [block, option]: the same where it is the whole cell, hence run again for its backward alone
    saved: Slots  # [block, option]
    keep: Slots  # [first, last, option]: least memory to run `first` once in cell (first, last)
    through: Slots  # [block, last]: least memory to run `block` keeping nothing; its input left out

    @staticmethod
    def of(blocks: tuple[Block, ...], slot_bytes: int, slots: int) -> ChainNumbers:
        """Round the numbers of `blocks` up to slots of `slot_bytes` bytes, at most `slots` of them."""
        count, most = len(blocks), max(len(block.options) for block in blocks)

        def up(size: Slots) -> Slots:
            return -(-size // slot_bytes)

        def each(value: Callable[[Block, Option], float], missing: float = 0) -> Times:
            rows = [[value(block, option) for option in block.options] for block in blocks]
            return np.array([row + [missing] * (most - len(row)) for row in rows])

        def bytes_of(value: Callable[[Block, Option], int]) -> Slots:
            return each(value).astype(np.int64)

        pinned = pinned_bytes(blocks)[:, :, None]
        saved = up(bytes_of(lambda block, option: option.saved_bytes - sum(pin.size_bytes for pin in block.pins)))
        # Resident while forwards run: the gradients that the backward of the last block finds; none before the loss.
        resident = up(np.array([block.resident_bytes for block in blocks[:-1]] + [0], np.int64))
        forward = (
            up(bytes_of(lambda block, option: option.forward_bytes)[:, None, :] + pinned) + resident[None, :, None]
        )
        backward = up(bytes_of(lambda block, option: option.backward_bytes + block.resident_bytes)[:, None] + pinned)
        keep = np.maximum(np.maximum(forward, backward), saved[:, None, :])
        again = bytes_of(lambda block, option: option.again_bytes + block.resident_bytes)
        own_ms = each(lambda block, option: block.forward_ms + block.backward_ms + option.extra_ms)
        alone_ms = each(lambda block, option: option.again_ms + block.backward_ms)
        alone_ms[-1] = own_ms[-1]  # the loss: nothing runs again before it
        for block in range(count):
            alone = np.maximum(forward, backward)[block, block]
            keep[block, block] = alone if block == count - 1 else up(again[block] + pinned[block, block])
        missing = each(lambda block, option: 0, missing=1).astype(bool)
        keep[np.broadcast_to(missing[:, None, :], keep.shape)] = slots + 1
        forget = np.array([block.forget_bytes for block in blocks], np.int64)
        return ChainNumbers(
            slots,
            np.array([block.forward_ms for block in blocks]),
            up(np.array([block.input_bytes for block in blocks], np.int64)),
            own_ms,
            alone_ms,
            saved,
            np.ascontiguousarray(np.minimum(keep, slots + 1)),
            up(forget[:, None] + pinned[:, :, 0]) + resident[None, :],
        )

    @property
    def count(self) -> int:
        """Number of blocks, the loss included."""
        return len(self.input)

    @property
    def sums(self) -> int:
        """How often filling the table adds two cells: what it takes, up to a factor."""
        return self.count**3 // 6 * (self.slots + 1)


@dataclass(frozen=True, slots=True)
class ChainTable:
    """A filled table."""

    numbers: ChainNumbers
    times: Times  # [first, last, memory], where first <= last; infinite where it does not fit


def pinned_bytes(blocks: tuple[Block, ...]) -> Slots:
    """For each cell (first, last), the bytes of the pins of blocks before `first` that are alive in it.

    A pin is alive from its first reader on until its last one, and until the end of the cell where a backward
    operation of a block before `first` needs it still.
    """
    count = len(blocks)
    alive = np.zeros((count, count), np.int64)
    for home, block in enumerate(blocks):
        for pin in block.pins:
            stop = count if pin.late else pin.last_reader + 1
            alive[home + 1 : stop, pin.first_reader :] += pin.size_bytes
    return alive


def fill(numbers: ChainNumbers) -> ChainTable:
    """All cells of the table."""
    times = np.empty((numbers.count, numbers.count, numbers.slots + 1))  # cells below the diagonal are never touched
    filler = numba_filler() if _use_numba(numbers) else None
    (filler or fill_by_numpy)(numbers, times)
    return ChainTable(numbers, times)


def fill_by_numpy(numbers: ChainNumbers, times: Times) -> None:
    """Fill `times`, one cell after the other."""
    count, width = numbers.count, numbers.slots + 1
    elapsed = np.concatenate([[0.0], np.cumsum(numbers.forward_ms)])
    stored = np.empty((count, width))  # [k]: T[k, last] with the input of k paid from the memory
    totals = np.empty((count, width))
    for last in range(count):
        for first in range(last, -1, -1):
            cell = times[first, last]
            cell[:] = np.inf
            _keep_in_numpy(numbers, times, first, last)
            if first < last:
                total = totals[: last - first]
                np.add(stored[first + 1 : last + 1], times[first, first:last], out=total)
                total += (elapsed[first + 1 : last + 1] - elapsed[first])[:, None]
                for row, least in enumerate(least_to_pass(numbers, first, last)):
                    total[row, :least] = np.inf
                np.minimum(cell, total.min(axis=0), out=cell)
            shift = min(int(numbers.input[first]), width)
            stored[first, :shift] = np.inf
            stored[first, shift:] = cell[: width - shift]


def _keep_in_numpy(numbers: ChainNumbers, times: Times, first: int, last: int) -> None:
    """Lower a cell by the plans in which block `first` runs once, with one of its options."""
    cell, width = times[first, last], numbers.slots + 1
    for option, least in enumerate(numbers.keep[first, last]):
        if least >= width:
            continue
        if first == last:
            np.minimum(cell[least:], numbers.alone_ms[first, option], out=cell[least:])
        else:
            own, saved = numbers.own_ms[first, option], numbers.saved[first, option]
            np.minimum(cell[least:], own + times[first + 1, last, least - saved : width - saved], out=cell[least:])


def least_to_pass(numbers: ChainNumbers, first: int, last: int) -> Slots:
    """For k = first+1..last, the slots needed to run first..k-1 keeping nothing but the input of k."""
    needed = numbers.through[first:last, last] + numbers.input[first:last]
    needed[0] -= numbers.input[first]  # stored outside
    return np.minimum(np.maximum.accumulate(needed), numbers.slots + 1)


def _use_numba(numbers: ChainNumbers) -> bool:
    """Whether numba, if installed, is the quicker way."""
    loaded = numba_filler.cache_info().currsize > 0
    return numbers.sums >= (_WORTH_A_CALL if loaded else _WORTH_AN_IMPORT)


@functools.cache
def numba_filler() -> Filler | None:
    """`fill_by_numpy` compiled by numba; None where numba is not installed."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:
        return None
    try:
        kernel = numba.njit(cache=True)(_fill_cells)
    except RuntimeError:  # there is no folder to keep the compiled code in
        kernel = numba.njit(_fill_cells)

    def filler(numbers: ChainNumbers, times: Times) -> None:
        elapsed = np.concatenate([[0.0], np.cumsum(numbers.forward_ms)])
        own_ms = np.stack([numbers.own_ms, numbers.alone_ms])
        kernel(times, elapsed, own_ms, numbers.input, numbers.saved, numbers.keep, numbers.through)

    return filler


def _fill_cells(
    times: Times, elapsed: Times, own_ms: Times, inputs: Slots, saved: Slots, keep: Slots, through: Slots
) -> None:
    """What `fill_by_numpy` does, in loops to be compiled."""
    count, width = times.shape[0], times.shape[2]
    below = np.empty((count + 1, width))  # [k]: T[k, last], in one run of memory
    for last in range(count):
        for memory in range(width):
            below[last + 1, memory] = 0.0  # nothing is left to run after the last block
        for first in range(last, -1, -1):
            for memory in range(width):
                below[first, memory] = np.inf
            for option in range(keep.shape[2]):
                own, kept = own_ms[0, first, option], saved[first, option]
                if first == last:
                    own, kept = own_ms[1, first, option], 0
                for memory in range(keep[first, last, option], width):
                    below[first, memory] = min(below[first, memory], own + below[first + 1, memory - kept])
            needed = 0
            for place in range(first + 1, last + 1):
                needed = max(needed, through[place - 1, last] + (inputs[place - 1] if place - 1 > first else 0))
                shift = inputs[place]
                pass_ms = elapsed[place] - elapsed[first]
                for memory in range(max(needed, shift), width):
                    total = below[place, memory - shift] + times[first, place - 1, memory] + pass_ms
                    below[first, memory] = min(below[first, memory], total)
            for memory in range(width):
                times[first, last, memory] = below[first, memory]
