"""Rockmate's solver: exact options for the blocks of a chain, and what it owes to rotor and to the oracle."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import BackwardOp, Chain, Data, ForwardOp, Oracle, Problem, check, peak_and_time
from rk_solvers.chain.blocks import blocks_of, has_choice, with_more_options
from rk_solvers.chain.two_level import ExactPlanner, RockmateSolver, coarser
from tests.solver.instances import gpt2, resnet50


def chain_of_blocks(seed: int, classes: int = 2, count: int = 4) -> tuple[Problem, Chain]:
    """Blocks drawn from a few classes; in a block, operations read earlier ones of it or what it is given.

    The backward goes back through the operations; each needs what its operation has read, and some its output.
    """
    rng = random.Random(seed)
    kinds = [[_operation(rng, index) for index in range(rng.randint(1, 4))] for _ in range(classes)]
    data: list[Data] = []
    forward: list[ForwardOp] = []
    needs: list[tuple[int, ...]] = []
    blocks: list[range] = []
    for _ in range(count):
        start, kind = len(forward), rng.choice(kinds)
        for reads, size, time_ms, own in kind:
            number = len(forward)
            inputs = tuple(sorted({start - 1 if read < 0 else start + read for read in reads} - {-1}))
            forward.append(ForwardOp(f"f{number}", time_ms, inputs, (number,)))
            data.append(Data(f"y{number}", size, number))
            needs.append((*inputs, number) if own else inputs)
        blocks.append(range(start, len(forward)))
    sizes = [item.size_bytes for item in data]
    backward = [BackwardOp("loss", 1.0, (len(forward) - 1,), 0, sizes[-1])]
    for number in reversed(range(len(forward))):
        made = sum(sizes[item] for item in forward[number].inputs)
        backward.append(BackwardOp(f"b{number}", 1.0, needs[number], sizes[number], sizes[number] + made))
    stages = [len(blocks), *(index for index in reversed(range(count)) for _ in blocks[index])]
    return Problem(tuple(data), tuple(forward), tuple(backward)), Chain(tuple(blocks), tuple(stages))


def _operation(rng: random.Random, index: int) -> tuple[tuple[int, ...], int, float, bool]:
    """What it reads (-1: what the block is given), its bytes and time, and whether its backward needs its output."""
    reads = {index - 1, *(rng.randint(-1, index - 1) for _ in range(rng.randint(0, 1)))}
    return tuple(reads), rng.randint(1, 8), float(rng.randint(1, 9)), rng.random() < 0.3


@given(st.integers(0, 10**6), st.floats(0.2, 1.0))
@settings(max_examples=6, deadline=None)
def test_plans_fit_what_they_say_and_lie_between_the_oracle_and_greedy_options(seed, share):
    problem, chain = chain_of_blocks(seed, count=3)
    budget = int(share * peak_and_time(problem, problem.no_recompute)[0])
    solver = RockmateSolver(chain, steps=3, together=1)
    found = solver.solve(problem, budget)
    for solution in (found, RockmateSolver(chain, steps=3, grid=2).solve(problem, budget)):
        check(problem, solution.schedule, budget if solution.status.fits else None)
        if solution.status.fits and len(problem.forward) <= 10:
            assert Oracle().solve(problem, budget).time_ms <= solution.time_ms + 1e-9
    greedy, exact = solver.prepare(problem, max(budget, 1))
    times = exact.table.times[0, 0, -1], greedy.table.times[0, 0, -1]
    assert (times[0] <= times[1] * (1 + 1e-12)).all()  # more options, whatever the memory
    alone = greedy.solve(budget)
    assert not alone.status.fits or (found.status.fits and found.time_ms <= alone.time_ms)


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_options_are_within_their_bounds_and_none_is_worse_than_another(seed):
    problem, chain = chain_of_blocks(seed, classes=1, count=2)
    greedy = blocks_of(problem, chain)
    planner = ExactPlanner(len({block.part for block in greedy}), time.monotonic() + 60)
    for before, block in zip(greedy, with_more_options(greedy, planner), strict=True):
        for old in before.options:
            assert any(
                new.extra_ms <= old.extra_ms and new.saved_bytes <= old.saved_bytes
                and new.backward_bytes <= old.backward_bytes
                for new in block.options
            )  # fmt: skip
        assert len(set(block.options)) == len(block.options)


def test_one_block_under_every_bound_is_solved_as_by_the_oracle():
    """The oracle sees the block with a barrier that leaves the same room: no option of it takes less time."""
    problem, chain = chain_of_blocks(3, classes=1, count=1)
    greedy = blocks_of(problem, chain)
    planner = ExactPlanner(1, time.monotonic() + 60, steps=(6, 6))
    block = with_more_options(greedy, planner)[0]
    assert planner.proven
    assert block.part
    for option in block.options:
        peak = max(option.forward_bytes, option.backward_bytes, option.saved_bytes)
        barrier = BackwardOp("barrier", 0.0, block.part.problem.backward[0].needs, 0, peak - option.saved_bytes)
        inside = block.part.problem
        bounded = Problem(inside.data, inside.forward, (barrier, *inside.backward[1:]), inside.held)
        best = Oracle().solve(bounded, peak)
        assert best.status.fits
        assert best.time_ms == pytest.approx(inside.keep_all_time_ms + option.extra_ms)


def test_coarser_chains_cover_the_same_operations_in_the_same_blocks():
    _, chain = gpt2(layers=5)
    first, *others = coarser(chain, 3)
    assert first == chain
    assert len(others) == 5
    for other in others:
        borders = {block.start for block in other.blocks}
        assert borders <= {block.start for block in chain.blocks}
        assert max(len(block) for block in other.blocks) > max(len(block) for block in chain.blocks)
        for fine, coarse in zip(chain.backward_block, other.backward_block, strict=True):
            if fine == len(chain.blocks):
                assert coarse == len(other.blocks)
            else:
                assert set(chain.blocks[fine]) <= set(other.blocks[coarse])


def test_equal_blocks_share_the_exact_options():
    problem, chain = gpt2(layers=3)
    greedy = blocks_of(problem, chain)
    asked: list[object] = []
    exact = with_more_options(greedy, lambda part, options: asked.append(part) or [])
    assert len(asked) == len({block.part for block in greedy if block.part and has_choice(block.part)}) == 3
    assert exact[1].options is exact[2].options is exact[3].options


def test_the_same_numbers_give_the_same_plan():
    problem, chain = chain_of_blocks(11)
    budget = int(0.6 * peak_and_time(problem, problem.no_recompute)[0])
    solver = RockmateSolver(chain, time_limit_s=60)
    assert solver.solve(problem, budget) == solver.solve(problem, budget)


def test_the_time_limit_is_respected_and_blocks_too_large_keep_greedy_options():
    problem, chain = resnet50(layers=(1, 1, 1, 1))
    whole = Chain((range(len(problem.forward)),), tuple(int(b == len(chain.blocks)) for b in chain.backward_block))
    greedy = blocks_of(problem, chain)
    for planner in (ExactPlanner(9, time.monotonic()), ExactPlanner(9, time.monotonic() + 60, max_forward=0)):
        start_s = time.process_time()  # of this process: what else the machine does is not counted
        assert with_more_options(greedy, planner) == greedy
        assert time.process_time() - start_s < 1
    start_s = time.process_time()
    budget = int(0.7 * peak_and_time(problem, problem.no_recompute)[0])
    for division in (chain, whole):
        solution = RockmateSolver(division, time_limit_s=1, grid=2, rounds=1).solve(problem, budget)
        check(problem, solution.schedule, budget if solution.status.fits else None)
    assert time.process_time() - start_s < 20  # two limits, greedy options of five classes, and a slow machine


def test_too_small_a_budget_names_one_that_works():
    problem, chain = chain_of_blocks(5)
    small = RockmateSolver(chain).solve(problem, 1)
    assert not small.status.fits
    assert small.smallest_budget_bytes == small.peak_bytes
    assert RockmateSolver(chain).solve(problem, small.peak_bytes).status.fits
