"""Rotor: equal to the oracle on persistent chains, one table for many budgets, names of its operations."""

from __future__ import annotations

import functools
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import BackwardOp, Chain, Data, ForwardOp, Oracle, Problem, Rotor, check, evaluate, peak_and_time
from rk_solvers import rotor_tables as tables
from rk_solvers.blocks import Block, Option, Pin, blocks_of
from rk_solvers.sequence import format_sequence
from tests.solver.instances import chain_of, gpt2, random_problem, resnet50


def unit_chain(count: int) -> Chain:
    """Each operation a block; the first backward operation plays the loss."""
    return Chain(tuple(range(i, i + 1) for i in range(count)), tuple(reversed(range(count))))


@pytest.mark.parametrize("budget", range(12, 33, 4))
def test_a_chain_of_unit_blocks_is_solved_as_by_the_oracle(budget):
    problem = chain_of(7)
    found, best = Rotor(unit_chain(7)).solve(problem, budget), Oracle().solve(problem, budget)
    assert found.status.fits == best.status.fits
    assert found.time_ms == pytest.approx(best.time_ms)
    check(problem, found.schedule, budget)


def test_the_sequence_bears_the_usual_names():
    table = Rotor(unit_chain(4)).prepare(chain_of(4), 20)
    words = {operation.kind for operation in table.sequence(12)}
    assert {"Fe", "B"} <= words <= {"Fck", "Fng", "Fe", "B"}
    assert format_sequence(table.sequence(table.table.numbers.slots)).startswith("Fe 0.0; Fe 1.0")
    with pytest.raises(ValueError, match="does not fit"):
        table.sequence(0)


def test_equal_blocks_are_solved_once():
    problem, chain = gpt2(layers=4)
    blocks = blocks_of(problem, chain)
    assert blocks[1].options is blocks[3].options
    assert all(option.saved_bytes <= blocks[1].options[0].saved_bytes for option in blocks[1].options)


@pytest.mark.parametrize("build", [gpt2, resnet50])
def test_one_table_serves_all_smaller_budgets(build):
    problem, chain = build()
    most = evaluate(problem, problem.no_recompute).peak_bytes
    table = Rotor(chain, rounds=3).prepare(problem, int(0.7 * most))
    previous = 0.0
    for share, overhead in ((0.7, 0.05), (0.5, 0.12), (0.4, 0.22)):
        solution = table.solve(int(share * most))
        checked = check(problem, solution.schedule, int(share * most))
        assert previous < checked.overhead <= overhead
        previous = checked.overhead


def test_too_small_a_budget_names_one_that_works():
    problem, chain = gpt2(layers=2)
    solver = Rotor(chain, rounds=0)
    small = solver.solve(problem, 1 << 20)
    assert not small.status.fits
    assert small.smallest_budget_bytes == peak_and_time(problem, small.recompute)[0]
    assert solver.solve(problem, small.smallest_budget_bytes).status.fits


@given(st.integers(0, 10**6), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_schedules_of_any_partition_pass_the_checker_and_never_beat_the_oracle(seed, budget):
    rng = random.Random(seed)
    problem = random_problem(seed, 1 + seed % 6)
    count = len(problem.forward)
    cuts = sorted({0, count, *(rng.randrange(count) for _ in range(2))})
    blocks = tuple(range(a, b) for a, b in itertools.pairwise(cuts))
    stages = sorted((rng.randint(0, len(blocks)) for _ in problem.backward), reverse=True)
    solver = Rotor(Chain(blocks, tuple(stages)), slots=100, rounds=2)
    solution = solver.solve(problem, budget)
    check(problem, solution.schedule, budget if solution.status.fits else None)
    best = Oracle().solve(problem, budget)
    assert not solution.status.fits or best.time_ms <= solution.time_ms + 1e-9


def test_a_hundred_blocks_are_quick():
    problem, chain = gpt2(layers=98, batch=32)
    assert len(chain.blocks) == 100
    budget = int(0.6 * evaluate(problem, problem.no_recompute).peak_bytes)
    solution = Rotor(chain, rounds=0).solve(problem, budget)
    check(problem, solution.schedule, budget)


FILLERS = {"numpy": lambda: tables.fill_by_numpy, "numba": tables.numba_filler}


def random_blocks(seed: int) -> tuple[Block, ...]:
    """A chain of the dynamic program, sizes in slots; some values are read by blocks beyond the next one."""
    rng = random.Random(seed)
    count = rng.randint(1, 8)

    def option() -> Option:
        return Option(
            rng.random(),
            rng.randint(5, 12),
            rng.randint(1, 12),
            rng.randint(1, 15),
            rng.random(),
            rng.randint(1, 15),
            (),
        )

    def pins(home: int) -> tuple[Pin, ...]:
        if home + 2 >= count or rng.random() < 0.5:
            return ()
        first, last = rng.randint(home, count - 1), rng.randint(home + 2, count - 1)
        return (Pin(rng.randint(1, 4), min(first, last), last, rng.random() < 0.5),)

    return tuple(
        Block(
            range(index, index + 1), (), rng.random(), rng.random(), rng.randint(0, 3), pins(index),
            rng.randint(0, 3), rng.randint(1, 6), tuple(option() for _ in range(rng.randint(1, 4))),
        )
        for index in range(count)
    )  # fmt: skip


def least_time(blocks: tuple[Block, ...], slots: int) -> np.ndarray:
    """The recursion as it is told, one cell after the other, and no cell beyond what is asked for."""
    loss = len(blocks) - 1

    def pinned(first: int, last: int) -> int:
        made = [(home, pin) for home, block in enumerate(blocks[:first]) for pin in block.pins]
        return sum(
            pin.size_bytes for _, pin in made if pin.first_reader <= last and (pin.late or pin.last_reader >= first)
        )

    def resident(last: int) -> int:
        return blocks[last].resident_bytes if last < loss else 0

    @functools.cache
    def best(first: int, last: int, memory: int) -> float:
        block, jump = blocks[first], pinned(first, last)
        found = [math.inf]
        for option in block.options:
            saved = option.saved_bytes - sum(pin.size_bytes for pin in block.pins)
            runs = option.forward_bytes + jump + resident(last) <= memory
            own = block.forward_ms + block.backward_ms + option.extra_ms
            if first == last < loss:
                if option.again_bytes + block.resident_bytes + jump <= memory:
                    found.append(option.again_ms + block.backward_ms)
            elif not runs or option.backward_bytes + block.resident_bytes + jump > memory:
                continue
            elif first == last:
                found.append(own)
            elif saved <= memory:
                found.append(own + best(first + 1, last, memory - saved))
        for after in range(first + 1, last + 1):
            passed = range(first, after)
            needed = [
                blocks[k].forget_bytes + pinned(k, last) + resident(last) + (blocks[k].input_bytes if k > first else 0)
                for k in passed
            ]
            left = memory - blocks[after].input_bytes
            if max(needed) <= memory and left >= 0:
                passing = math.fsum(blocks[k].forward_ms for k in passed)
                found.append(passing + best(after, last, left) + best(first, after - 1, memory))
        return min(found)

    count = len(blocks)
    cells = [[[best(i, j, m) if i <= j else 0.0 for m in range(slots + 1)] for j in range(count)] for i in range(count)]
    return np.array(cells)


@pytest.mark.parametrize("filler", FILLERS)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_the_table_is_that_of_the_recursion(filler, seed, slots):
    fill = FILLERS[filler]()
    if fill is None:
        pytest.skip("numba is not installed")
    blocks = random_blocks(seed)
    times = np.zeros((len(blocks), len(blocks), slots + 1))
    fill(tables.ChainNumbers.of(blocks, 1, slots), times)
    np.testing.assert_allclose(times, least_time(blocks, slots), rtol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_numba_and_numpy_agree_to_the_last_bit(seed, slots):
    compiled = tables.numba_filler()
    if compiled is None:
        pytest.skip("numba is not installed")
    numbers = tables.ChainNumbers.of(random_blocks(seed), 1, slots)
    one, other = np.zeros((2, numbers.count, numbers.count, slots + 1))
    compiled(numbers, one)
    tables.fill_by_numpy(numbers, other)
    assert np.array_equal(one, other)


def test_without_numba_the_solutions_are_the_same(monkeypatch):
    problem, chain = gpt2(layers=12)
    budget = int(0.5 * evaluate(problem, problem.no_recompute).peak_bytes)
    monkeypatch.setattr(tables, "_WORTH_AN_IMPORT", 0)
    found = Rotor(chain, rounds=0).solve(problem, budget)
    monkeypatch.setattr(tables, "numba_filler", lambda: None)
    monkeypatch.setattr(tables, "_use_numba", lambda numbers: True)
    assert Rotor(chain, rounds=0).solve(problem, budget) == found


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 28))
@settings(max_examples=40, deadline=None)
def test_chains_of_equal_sizes_and_any_times_are_solved_as_by_the_oracle(times, budget):
    equal = chain_of(len(times))
    forward = tuple(
        ForwardOp(op.name, float(time), op.inputs, op.outputs) for op, time in zip(equal.forward, times, strict=True)
    )
    problem = Problem(equal.data, forward, equal.backward)
    found, best = Rotor(unit_chain(len(times))).solve(problem, budget), Oracle().solve(problem, budget)
    assert found.status.fits == best.status.fits
    assert not best.status.fits or found.time_ms == pytest.approx(best.time_ms)


def chain_with_skips(seed: int) -> tuple[Problem, Chain]:
    """Blocks of one operation that read the one before, and others farther back; backwards need what they read."""
    rng = random.Random(seed)
    count = rng.randint(3, 8)
    reads = [tuple(h for h in range(i) if h == i - 1 or rng.random() < 0.2) for i in range(count)]
    data = tuple(Data(f"y{i}", rng.randint(1, 6), i) for i in range(count))
    forward = tuple(ForwardOp(f"f{i}", float(rng.randint(1, 5)), reads[i], (i,)) for i in range(count))
    backward = [BackwardOp("loss", 1.0, (count - 1,), 0, 2)]
    for index in reversed(range(count)):
        resident = rng.randint(0, 3)
        backward.append(BackwardOp(f"b{index}", 1.0, reads[index], resident, resident + rng.randint(0, 5)))
    blocks = tuple(range(i, i + 1) for i in range(count))
    return Problem(data, forward, tuple(backward)), Chain(blocks, tuple(range(count, -1, -1)))


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_values_that_several_blocks_read_are_counted_once(seed):
    problem, chain = chain_with_skips(seed)
    peak, time_ms = peak_and_time(problem, problem.no_recompute)
    table = Rotor(chain).prepare(problem, peak)
    assert table.slot_bytes == 1
    reached = table.table.times[0, -1]
    assert reached[peak] == pytest.approx(time_ms)
    assert reached[peak - 1] > time_ms + 0.5  # at one byte less, keep-all would be promised wrongly
    for memory in np.flatnonzero(np.isfinite(reached)):
        assert peak_and_time(problem, table.plan(int(memory)))[0] <= memory
