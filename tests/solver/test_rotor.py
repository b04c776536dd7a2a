"""Rotor: equal to the oracle on persistent chains, one table for many budgets, names of its operations."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import BackwardOp, Chain, Data, ForwardOp, Oracle, Problem, Rotor, check, evaluate, peak_and_time
from rk_solvers.chain import rotor_tables as tables
from rk_solvers.chain.blocks import blocks_of
from rk_solvers.groups import serving
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
    text = str(table.sequence(table.table.numbers.slots))
    assert text.startswith("Fe 0.0; Fe 1.0; ")
    assert text.split("; ")[-2:] == ["B 1.0", "B 0.0"]
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
    assert small.smallest_budget_bytes == peak_and_time(problem, small.schedule)[0]
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
@pytest.mark.ci
def test_values_that_several_blocks_read_are_counted_once(seed):
    problem, chain = chain_with_skips(seed)
    peak, time_ms = peak_and_time(problem, problem.no_recompute)
    table = Rotor(chain).prepare(problem, peak)
    assert table.slot_bytes == 1
    reached = table.table.times[0, 0, -1]
    assert reached[peak] == pytest.approx(time_ms)
    assert reached[peak - 1] > time_ms + 0.5  # at one byte less, keep-all would be promised wrongly
    for memory in np.flatnonzero(np.isfinite(reached)):
        assert peak_and_time(problem, table.plan(int(memory)))[0] <= memory


def chain_of_operations(seed: int, kinds: tuple[str, ...]) -> tuple[Problem, Chain]:
    """Blocks of one operation, any times and sizes; a backward reads its block's input, output, both or none."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    data = tuple(Data(f"y{i}", rng.randint(0, 6), i) for i in range(count))
    forward = tuple(
        ForwardOp(f"f{i}", float(rng.randint(1, 9)), (i - 1,) if i else (), (i,), rng.choice([0, 0, 2]))
        for i in range(count)
    )
    backward = [BackwardOp("loss", 1.0, (count - 1,), 0, rng.randint(0, 3))]
    for index in reversed(range(count)):
        kind = rng.choice(kinds)
        needs = {index - 1} if index and kind in ("input", "both") else set()
        needs |= {index} if kind in ("output", "both") else set()
        resident = rng.randint(0, 3)
        backward.append(BackwardOp(f"b{index}", 1.0, tuple(needs), resident, resident + rng.randint(0, 4)))
    blocks = tuple(range(i, i + 1) for i in range(count))
    return Problem(data, forward, tuple(backward)), Chain(blocks, tuple(range(count, -1, -1)))


def bytes_of(problem: Problem, items: frozenset[int]) -> int:
    return sum(problem.data[item].size_bytes for item in items)


def runs(problem: Problem, stage: int) -> Iterator[tuple[int, ...]]:
    """What may be computed again for a backward operation of a chain of operations."""
    count = len(problem.forward)
    for mask in itertools.product((False, True), repeat=count):
        group = tuple(itertools.compress(range(count), mask))
        if serving(problem, set(group), stage) == set(group):
            yield group


def through_stage(problem: Problem, stage: int, group: tuple[int, ...], alive: frozenset[int]) -> tuple[int, frozenset]:
    """The peak of a stage, and what is alive before it, from what is alive after it."""
    op = problem.backward[stage]
    alive |= set(op.needs)
    peak = bytes_of(problem, alive) + op.peak_bytes
    for index in reversed(group):
        inputs = frozenset(problem.forward[index].inputs)
        now = bytes_of(problem, alive | inputs | {index})
        peak = max(peak, now + problem.forward[index].workspace_bytes + op.resident_bytes)
        alive = (alive - {index}) | inputs
    return peak, alive


def least_persistent_ms(problem: Problem, budget: int) -> float:
    """By trying all plans: what is alive across a backward operation stays until the backward of the operation whose
    input it is, and is not computed again before. Sweeps back through the step, where what is alive is known."""
    last = len(problem.forward) - 1
    states = {(frozenset[int](), frozenset[int]()): 0.0}  # alive; must not be alive across a backward operation
    for stage in reversed(range(len(problem.backward))):
        reached: dict[tuple[frozenset[int], frozenset[int]], float] = {}
        own = frozenset({last - stage} if stage <= last else ())  # the input of the operation of this stage
        groups = list(runs(problem, stage))
        for (alive, barred), value in states.items():
            stored = own <= alive | set(problem.backward[stage].needs)
            for kept in {stored, True}:  # what is not needed here may be kept until here all the same
                for group in groups:
                    again = {index for index in group if last - index >= stage}
                    peak, before = through_stage(problem, stage, group, alive | own if kept else alive)
                    never = barred | again | (frozenset() if kept else own)
                    if peak > budget or (stage and before & never):
                        continue
                    spent = value + sum(problem.forward[index].time_ms for index in group)
                    reached[before, never] = min(spent, reached.get((before, never), math.inf))
        states = reached
    fitting = [value for (alive, _), value in states.items() if first_peak(problem, alive) <= budget]
    return min(fitting, default=math.inf) + problem.keep_all_time_ms


def first_peak(problem: Problem, alive: frozenset[int]) -> int:
    """The peak of the forward phase, from what is alive after it."""
    peak = 0
    for index in reversed(range(len(problem.forward))):
        inputs = frozenset(problem.forward[index].inputs)
        peak = max(peak, bytes_of(problem, alive | inputs | {index}) + problem.forward[index].workspace_bytes)
        alive = (alive - {index}) | inputs
    return peak


@pytest.mark.parametrize("kinds", [("input",), ("input", "both"), ("input", "output", "both", "none")], ids="-".join)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_the_table_has_the_least_time_of_persistent_schedules_at_every_budget(kinds, seed):
    problem, chain = chain_of_operations(seed, kinds)
    most, least_ms = peak_and_time(problem, problem.no_recompute)
    table = Rotor(chain).prepare(problem, most)
    assert table.slot_bytes == 1
    reached = table.table.times[0, 0, -1, : most + 1]
    assert reached[most] == pytest.approx(least_ms)
    for budget, time_ms in enumerate(reached):
        assert time_ms == pytest.approx(least_persistent_ms(problem, budget))
        best = Oracle().solve(problem, budget)  # of all schedules, persistent or not
        if math.isfinite(time_ms):
            peak, found_ms = peak_and_time(problem, table.plan(budget))
            assert best.status.fits
            assert peak <= budget
            assert best.time_ms - 1e-9 <= found_ms <= time_ms + 1e-9


def test_an_output_that_its_own_backward_reads_is_not_computed_twice():
    """Each backward reads the input and the output of its operation; budgets of three to five values."""
    data = tuple(Data(f"y{i}", 3, i) for i in range(5))
    forward = tuple(ForwardOp(f"f{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(5))
    loss = BackwardOp("loss", 1.0, (4,), 0, 0)
    backward = (BackwardOp(f"b{i}", 1.0, (i - 1, i) if i else (i,), 0, 0) for i in reversed(range(5)))
    problem = Problem(data, forward, (loss, *backward))
    chain = Chain(tuple(range(i, i + 1) for i in range(5)), tuple(range(5, -1, -1)))
    for budget in range(9, 16):
        found, best = Rotor(chain).solve(problem, budget), Oracle().solve(problem, budget)
        assert found.status.fits == best.status.fits
        assert found.time_ms == pytest.approx(best.time_ms)
