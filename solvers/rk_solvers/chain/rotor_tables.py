"""The table of rotor's dynamic program, filled by numba where that pays, else by numpy; equal to the last bit.

`T[s, i, j, m]` is the least time to run the forwards and backwards of blocks `i..j` with the input of `i` stored
outside and `m` slots of memory, where in state `s = 1` what `j` hands on is still stored, inside, when the cell starts.
A pin (a value that blocks farther on read too) is no input: it is counted inside, wherever it is alive. The recursion
is told in `rotor`.

Columns (one `j`) are filled in order, and each of them upwards (`i` from `j` down). Then all that a cell reads
lies in two runs of memory: row `i` up to `j - 1`, and column `j` below `i`, which is copied aside.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rk_solvers.chain.blocks import Block, BlockOption, Rerun

Times = NDArray[np.float64]
Slots = NDArray[np.int64]
Filler = Callable[["ChainNumbers", Times, int, int], None]

# Sums of two cells from which numba pays. It adds about four times as many per second as numpy, but its import and the
# reading of its cache take most of a second: once in a process, and only for what takes numpy about half a second.
_WORTH_AN_IMPORT = 50_000_000
_WORTH_A_CALL = 100_000
_COLUMNS = 4  # filled between two looks at the clock


class ChainNumbers(NamedTuple):
    """The blocks of a chain in slots, sizes rounded up. What is missing or cannot be needs more than all slots.

    `state` is 0, and 1 where any block has a use for what it hands on. A tuple, for numba to take it.
    """

    slots: int
    elapsed: Times  # [block]: time of the forwards of all blocks before it
    input: Slots  # [block]: what must be stored to start at it, pins left out
    own_ms: Times  # [block, option]: to run it once, and its backward
    alone_ms: Times  # [state, block, option]: the same where it is the whole cell: run again for its backward alone
    saved: Slots  # [block, option]
    keep: Slots  # [state, first, last, option]: least memory to run `first` once in cell (first, last)
    through: Slots  # [block, last]: least memory to run `block` keeping nothing; its input left out
    given: Slots  # [state, last]: what `last` hands on and its backward needs, stored in state 1; -1: it needs nothing
    sweep: Slots  # [state, last, option]: least memory to run `last` for its backward with no input stored for long
    reads: NDArray[np.bool_]  # [state, last, option]: whether the blocks before must run for that; if for no option,
    # nothing runs before the backward of `last`, hence nothing is newly stored across it

    @staticmethod
    def of(blocks: tuple[Block, ...], slot_bytes: int, slots: int) -> ChainNumbers:
        """Round the numbers of `blocks` up to slots of `slot_bytes` bytes, at most `slots` of them."""
        return _numbers(blocks, slot_bytes, slots)

    @property
    def length(self) -> int:
        """Number of blocks, the loss included."""
        return len(self.input)

    @property
    def sums(self) -> int:
        """How often filling the table adds two cells: what it takes, up to a factor."""
        columns = 1 + float(np.mean(self.given[1:] >= 0)) if len(self.given) > 1 else 1.0
        return int(columns * (self.length**3 // 6) * (self.slots + 1))


class _Rounding:
    """Numbers of blocks and options as arrays of slots."""

    def __init__(self, blocks: tuple[Block, ...], slot_bytes: int) -> None:
        self.blocks, self.slot_bytes = blocks, slot_bytes
        self.most = max(len(block.options) for block in blocks)

    def up(self, size: Slots) -> Slots:
        """Bytes as slots."""
        return -(-size // self.slot_bytes)

    def each(self, value: Callable[[Block, BlockOption], float], missing: float = 0) -> Times:
        """[block, option]: a time."""
        rows = [[value(block, option) for option in block.options] for block in self.blocks]
        return np.array([row + [missing] * (self.most - len(row)) for row in rows])

    def bytes_of(self, value: Callable[[Block, BlockOption], int]) -> Slots:
        """[block, option]: a size."""
        return self.each(value).astype(np.int64)


def _numbers(blocks: tuple[Block, ...], slot_bytes: int, slots: int) -> ChainNumbers:
    """See `ChainNumbers.of`."""
    rounding = _Rounding(blocks, slot_bytes)
    up, each, bytes_of = rounding.up, rounding.each, rounding.bytes_of
    pinned = pinned_bytes(blocks)
    missing = each(lambda block, option: 0, missing=1).astype(bool)
    saved = up(bytes_of(lambda block, option: option.saved_bytes - sum(pin.size_bytes for pin in block.pins)))
    # Resident while forwards run: the gradients that the backward of the last block finds; none before the loss.
    resident = up(np.array([block.resident_bytes for block in blocks[:-1]] + [0], np.int64))
    forward = bytes_of(lambda block, option: option.forward_bytes)[:, None, :] + pinned[:, :, None]
    backward = bytes_of(lambda block, option: option.backward_bytes + block.resident_bytes)
    backward = up(backward[:, None] + pinned[:, :, None])
    useful = [any(option.given for option in block.options) for block in blocks]
    sizes = [block.given_bytes if use else -slot_bytes for block, use in zip(blocks, useful, strict=True)]
    states = 1 + any(useful)
    given = up(np.array([[0] * len(blocks), sizes], np.int64))[:states]
    keep = np.maximum(up(forward) + resident[None, :, None] + given[:, None, :, None], backward)
    keep = np.maximum(keep, saved[:, None, :])
    own_ms = each(lambda block, option: block.forward_ms + block.backward_ms + option.extra_ms)
    alone_ms = np.stack([own_ms] * states)
    sweep = np.full((states, len(blocks), rounding.most), slots + 1)
    reads = np.zeros(sweep.shape, bool)
    for number, block in enumerate(blocks):
        within = int(pinned[number, number])
        for state in range(states):
            for rank, option in enumerate(block.options):
                rerun = _rerun(block, option, state, loss=number == len(blocks) - 1)
                extra = block.resident_bytes + within
                keep[state, number, number, rank] = -(-(rerun.peak_bytes + extra) // slot_bytes)
                alone_ms[state, number, rank] = rerun.time_ms + block.backward_ms
                reads[state, number, rank] = rerun.reads_input
                if not rerun.reads_input or rerun.total_bytes < rerun.peak_bytes + block.input_bytes:
                    sweep[state, number, rank] = -(-(rerun.total_bytes + extra) // slot_bytes)
    keep[np.broadcast_to(missing[:, None, :], keep.shape)] = slots + 1
    forget = np.array([block.forget_bytes for block in blocks], np.int64)
    forward_ms = np.array([block.forward_ms for block in blocks])
    return ChainNumbers(
        slots,
        np.concatenate([[0.0], np.cumsum(forward_ms)[:-1]]),
        up(np.array([block.input_bytes for block in blocks], np.int64)),
        own_ms,
        alone_ms,
        saved,
        np.ascontiguousarray(np.minimum(keep, slots + 1)),
        up(forget[:, None] + pinned) + resident[None, :],
        given,
        np.minimum(sweep, slots + 1),
        reads,
    )


def _rerun(block: Block, option: BlockOption, state: int, *, loss: bool) -> Rerun:
    """What it takes to run a block in a cell of its own. Nothing runs again before the loss, but the cells of which it
    is the last run the blocks before it for the first time."""
    if loss:
        backward = option.again or Rerun(0.0, option.backward_bytes, option.backward_bytes + block.input_bytes, True)
        time_ms = block.forward_ms + option.extra_ms
        peak = max(option.forward_bytes - block.resident_bytes, backward.peak_bytes)
        return Rerun(time_ms, peak, max(peak, backward.total_bytes), True)
    if state and option.given:
        return option.given
    return option.again or Rerun(option.again_ms, option.again_bytes, option.again_bytes + block.input_bytes, True)


@dataclass(frozen=True, slots=True)
class ChainTable:
    """A filled table."""

    numbers: ChainNumbers
    times: Times  # [state, first, last, memory], where first <= last; infinite where it does not fit


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


def fill(numbers: ChainNumbers, deadline: float = math.inf) -> ChainTable:
    """All cells of the table. Raises `TimeoutError` once `time.monotonic` reaches `deadline`."""
    times = np.empty(table_shape(numbers))  # cells below the diagonal are never touched
    filler = (numba_filler() if _use_numba(numbers) else None) or fill_by_numpy
    for column in range(0, numbers.length, _COLUMNS):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the table of {numbers.length} blocks was not filled within the time limit")
        filler(numbers, times, column, min(column + _COLUMNS, numbers.length))
    return ChainTable(numbers, times)


def table_shape(numbers: ChainNumbers) -> tuple[int, int, int, int]:
    """The shape of `ChainTable.times`."""
    return len(numbers.given), numbers.length, numbers.length, numbers.slots + 1


def fill_by_numpy(numbers: ChainNumbers, times: Times, begin: int, end: int) -> None:
    """Fill these columns of `times`, one cell after the other."""
    states, count, width = len(times), numbers.length, numbers.slots + 1
    sweeping: NDArray[np.bool_] = np.any(numbers.sweep < width, axis=2)
    stores: NDArray[np.bool_] = np.any(numbers.reads, axis=2)
    # [s, k]: T[s, k, last] with the input of k paid from the memory, and the time to reach k from the first block
    stored = np.empty((states, count, width))
    totals = np.empty((count, width))
    for last in range(begin, end):
        for first in range(last, -1, -1):
            for state in range(states):
                cell = times[state, first, last]
                cell[:] = times[0, first, last] if state else np.inf
                if numbers.given[state, last] < 0:
                    continue
                if sweeping[state, last] and first < last:
                    _sweep_in_numpy(numbers, times, state, first, last)
                if stores[state, last] or first == last:
                    _keep_in_numpy(numbers, times[state], state, first, last)
                if stores[state, last] and first < last:
                    total = totals[: last - first]
                    np.add(stored[state, first + 1 : last + 1], times[-1, first, first:last], out=total)
                    for row, least in zip(total, least_to_pass(numbers, state, first, last).tolist(), strict=True):
                        row[:least] = np.inf
                    np.minimum(cell, total.min(axis=0) - numbers.elapsed[first], out=cell)
                shift = min(int(numbers.input[first]), width)
                stored[state, first, :shift] = np.inf
                np.add(cell[: width - shift], numbers.elapsed[first], out=stored[state, first, shift:])


def _keep_in_numpy(numbers: ChainNumbers, times: Times, state: int, first: int, last: int) -> None:
    """Lower a cell by the plans in which block `first` runs once, with one of its options."""
    cell, width = times[first, last], numbers.slots + 1
    for option, least in enumerate(numbers.keep[state, first, last]):
        if least >= width:
            continue
        if first == last:
            np.minimum(cell[least:], numbers.alone_ms[state, first, option], out=cell[least:])
        else:
            own, saved = numbers.own_ms[first, option], numbers.saved[first, option]
            np.minimum(cell[least:], own + times[first + 1, last, least - saved : width - saved], out=cell[least:])


def _sweep_in_numpy(numbers: ChainNumbers, times: Times, state: int, first: int, last: int) -> None:
    """Lower a cell by the plans that store nothing across the backward of `last`."""
    cell = times[state, first, last]
    for option, (least, pass_ms) in enumerate(sweeps(numbers, state, first, last)):
        if least <= numbers.slots:
            total = times[0, first, last - 1, least:] + numbers.alone_ms[state, last, option]
            np.minimum(cell[least:], total + pass_ms, out=cell[least:])


def sweeps(numbers: ChainNumbers, state: int, first: int, last: int) -> list[tuple[int, float]]:
    """For each option of `last`, the slots and the time to reach it, storing nothing across its backward."""
    found: list[tuple[int, float]] = []
    for least, reads in zip(numbers.sweep[state, last].tolist(), numbers.reads[state, last], strict=True):
        if reads and first < last and least <= numbers.slots:
            passed = int(least_to_pass(numbers, state, first, last)[-1])
            found.append((max(least, passed), float(numbers.elapsed[last] - numbers.elapsed[first])))
        else:
            found.append((least, 0.0))
    return found


def least_to_pass(numbers: ChainNumbers, state: int, first: int, last: int) -> Slots:
    """For k = first+1..last, the slots needed to run first..k-1 keeping nothing but the input of k."""
    needed = numbers.through[first:last, last] + numbers.input[first:last]
    needed[0] -= numbers.input[first]  # stored outside
    return np.minimum(np.maximum.accumulate(needed) + numbers.given[state, last], numbers.slots + 1)


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
        kernel: Filler = numba.njit(cache=True)(_fill_cells)
    except RuntimeError:  # there is no folder to keep the compiled code in
        kernel = numba.njit(_fill_cells)
    return kernel


def _fill_cells(numbers: ChainNumbers, times: Times, begin: int, end: int) -> None:
    """What `fill_by_numpy` does, in loops to be compiled."""
    inputs, elapsed, saved = numbers.input, numbers.elapsed, numbers.saved
    states, count, width = times.shape[0], times.shape[1], times.shape[3]
    left = times[states - 1]
    below = np.empty((states, count + 1, width))  # [s, k]: T[s, k, last], in one run of memory
    later = np.empty((states, count, width))  # the same with the time to reach k from the first block
    best = np.empty(width)
    for last in range(begin, end):
        below[:, last + 1] = 0.0  # nothing is left to run after the last block
        for first in range(last, -1, -1):
            for state in range(states):
                given = numbers.given[state, last]
                stores = numbers.reads[state, last].any() or first == last
                for memory in range(width):
                    below[state, first, memory] = below[0, first, memory] if state else np.inf
                for option in range(saved.shape[1] if given >= 0 and stores else 0):
                    own, kept = numbers.own_ms[first, option], saved[first, option]
                    if first == last:
                        own, kept = numbers.alone_ms[state, first, option], 0
                    for memory in range(numbers.keep[state, first, last, option], width):
                        total = own + below[state, first + 1, memory - kept]
                        below[state, first, memory] = min(below[state, first, memory], total)
                best[:] = np.inf
                needed = 0
                for place in range(first + 1, last + 1 if given >= 0 else 0):
                    step = numbers.through[place - 1, last] + (inputs[place - 1] if place - 1 > first else 0)
                    needed = max(needed, step + given)
                    shift = inputs[place]
                    for memory in range(max(needed, shift) if stores else width, width):
                        total = later[state, place, memory - shift] + left[first, place - 1, memory]
                        best[memory] = min(best[memory], total)
                for memory in range(width):
                    below[state, first, memory] = min(below[state, first, memory], best[memory] - elapsed[first])
                for option in range(saved.shape[1] if given >= 0 and first < last else 0):
                    least, pass_ms = numbers.sweep[state, last, option], 0.0
                    if numbers.reads[state, last, option]:
                        least, pass_ms = max(least, needed), elapsed[last] - elapsed[first]
                    for memory in range(least, width):
                        total = times[0, first, last - 1, memory] + numbers.alone_ms[state, last, option] + pass_ms
                        below[state, first, memory] = min(below[state, first, memory], total)
                for memory in range(width):
                    times[state, first, last, memory] = below[state, first, memory]
                    later[state, first, memory] = below[state, first, memory] + elapsed[first]
