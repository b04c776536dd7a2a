"""HiRemate's solver: any graph, divided and merged; exact where it is small, and within its time where it is large."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rk_solvers import (
    BackwardOp,
    Chain,
    Data,
    ForwardOp,
    Oracle,
    Problem,
    check,
    evaluate,
    peak_and_time,
    smallest_budget,
)
from rk_solvers.chain.blocks import blocks_of, sub_problems_of
from rk_solvers.chain.hiremate import Hierarchy, Hiremate, backward_places, balanced_cuts, bytes_across, divided
from tests.solver.instances import chain_of, gpt2, random_problem


def u_shape(depth: int, seed: int = 0) -> Problem:
    """Down and up again: each level going up reads what that level made going down; sizes halve with depth.

    Each backward needs what its operation has read.
    """
    rng = random.Random(seed)
    sizes = [max(1, 64 >> level) for level in (*range(depth), *reversed(range(depth))) for _ in range(2)]
    count = len(sizes)
    data = tuple(Data(f"y{i}", size, i) for i, size in enumerate(sizes))
    forward: list[ForwardOp] = []
    for index in range(count):
        reads = {index - 1} if index else set()
        if index >= count // 2 and index % 2 == 0:
            reads.add(count - index - 1)  # the second operation of the same level going down
        forward.append(ForwardOp(f"f{index}", float(rng.randint(1, 9)), tuple(sorted(reads)), (index,)))
    backward = [BackwardOp("loss", 1.0, (count - 1,), 0, sizes[-1])]
    for op, size in zip(reversed(forward), reversed(sizes), strict=True):
        made = sum(sizes[item] for item in op.inputs)
        backward.append(BackwardOp(f"b{op.name}", 2 * op.time_ms, op.inputs, size, size + made))
    return Problem(data, tuple(forward), tuple(backward))


def budget_of(problem: Problem, share: float) -> int:
    return int(share * peak_and_time(problem, problem.no_recompute)[0])


@given(st.integers(0, 10**6), st.integers(0, 80))
@settings(max_examples=25, deadline=None)
def test_a_small_problem_is_solved_as_by_the_oracle(seed, budget):
    problem = random_problem(seed, 1 + seed % 6)
    found, best = Hiremate().solve(problem, budget), Oracle().solve(problem, budget)
    check(problem, found.schedule, budget if found.status.fits else None)
    assert found.status.fits == best.status.fits or not found.status.fits
    if best.status.fits and found.status.fits:
        assert found.time_ms == pytest.approx(best.time_ms)


@given(st.integers(0, 10**6), st.integers(4, 60))
@settings(max_examples=10, deadline=None)
def test_divided_problems_have_plans_that_fit_and_never_beat_the_oracle(seed, budget):
    """So small a leaf makes three levels of eight operations."""
    problem = random_problem(seed, 8, plain=True)
    solver = Hiremate(leaf=3, branch=2, grid=2, rounds=20)
    found = solver.solve(problem, budget)
    check(problem, found.schedule, budget if found.status.fits else None)
    best = Oracle().solve(problem, budget)
    assert best.status.fits or not found.status.fits
    assert not found.status.fits or best.time_ms <= found.time_ms + 1e-9


@pytest.mark.parametrize("share", [0.8, 0.6, 0.0])
def test_a_u_shape_is_planned_with_its_skips_down_to_the_smallest_budget_known(share):
    problem = u_shape(depth=4)
    budget = max(budget_of(problem, share), smallest_budget(problem).budget_bytes)
    found = Hiremate(leaf=6, branch=3, time_limit_s=60).solve(problem, budget)
    assert found.status.fits
    result = check(problem, found.schedule, budget)
    assert result.overhead <= 0.5


@pytest.mark.parametrize("with_chain", [False, True])
def test_the_same_numbers_give_the_same_plan(with_chain):
    problem = u_shape(depth=5)
    chain = divided(problem, 5, 4)
    solver = Hiremate(chain if with_chain else None, leaf=6, branch=3, grid=2, rounds=20, time_limit_s=600)
    budget = budget_of(problem, 0.7)
    first = solver.solve(problem, budget)
    assert first == solver.solve(problem, budget)
    assert check(problem, first.schedule, budget).overhead <= 0.3


def test_equal_segments_are_solved_once():
    """Equal operations in equal blocks: the inner ones are equal but for their place."""
    problem = chain_of(24)
    blocks = tuple(range(start, start + 4) for start in range(0, 24, 4))
    chain = Chain(blocks, tuple(index // 4 for index in reversed(range(24))))
    hierarchy = Hierarchy(Hiremate(leaf=2, branch=2), time.monotonic() + 60)
    hierarchy.expect(problem, chain)
    different = len(hierarchy.expected)
    solved = blocks_of(problem, chain, plans_of=hierarchy.plans)
    assert not hierarchy.expected
    assert len(hierarchy.solved) == different
    assert solved[1].options is solved[2].options
    for part, plans in hierarchy.solved.items():
        assert part.problem.no_recompute in plans
        assert len(plans) <= Hiremate().most_options + 1
        assert not any(plan[0] for plan in plans)  # nothing before the barrier


@pytest.mark.parametrize("limit_s", [0.0, 1.5])
def test_the_time_limit_is_respected_and_a_plan_found_all_the_same(limit_s):
    problem, chain = gpt2(layers=6)
    budget = budget_of(problem, 0.5)
    start_s = time.process_time()
    found = Hiremate(chain, time_limit_s=limit_s).solve(problem, budget)
    assert time.process_time() - start_s < limit_s + 15  # what is always done, on a slow machine
    check(problem, found.schedule, budget if found.status.fits else None)


def test_too_small_a_budget_names_one_that_works():
    problem = u_shape(depth=3)
    solver = Hiremate(leaf=4, branch=2, time_limit_s=5)
    small = solver.solve(problem, 1)
    assert not small.status.fits
    assert small.smallest_budget_bytes == evaluate(problem, small.schedule).peak_bytes
    assert solver.solve(problem, small.peak_bytes).status.fits


def test_a_chain_of_another_problem_is_refused():
    with pytest.raises(ValueError, match="cover"):
        Hiremate(Chain((range(3),), (0, 0, 0))).solve(chain_of(30), 1)


# ---- division -----------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_a_division_is_a_chain_whose_backward_reads_nothing_of_later_blocks(seed, branch):
    problem = random_problem(seed, 8)
    if not problem.backward:
        return
    chain = divided(problem, 3, branch)
    chain.check(problem)
    assert len(chain.blocks) >= 2
    block_of = [index for index, block in enumerate(chain.blocks) for _ in block]
    for op, home in zip(problem.backward, chain.backward_block, strict=True):
        for item in op.needs:
            if item not in problem.held:
                assert block_of[problem.data[item].producer] <= home
    assert chain.backward_block[0] == len(chain.blocks)
    assert len(sub_problems_of(problem, chain)) == len(chain.blocks) + 1


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_bytes_across_a_cut_are_those_of_data_made_before_and_used_behind_it(seed):
    problem = random_problem(seed, 7)
    places = backward_places(problem)
    assert all(first >= second for first, second in itertools.pairwise(places))
    for cut, total in enumerate(bytes_across(problem, places)):
        used = {item for op in problem.forward[cut:] for item in op.inputs}
        used |= {
            item
            for place, op in zip(places, problem.backward, strict=True)
            for item in op.needs
            if place >= cut and cut < len(problem.forward)
        }
        crossing = {item for item in used - problem.held if problem.data[item].producer < cut}
        assert total == sum(problem.data[item].size_bytes for item in crossing)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=40), st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_cuts_are_balanced_and_of_the_least_bytes_among_such(across, pieces):
    across = [0, *across, 0]
    count = len(across) - 1
    cuts = balanced_cuts(across, pieces)
    lengths = [stop - start for start, stop in itertools.pairwise([0, *cuts, count])]
    shortest = max(1, count // (2 * pieces))
    longest = min(count - 1, max(-(-3 * count // (2 * pieces)), 2 * shortest))
    assert all(shortest <= length <= longest for length in lengths)
    assert len(cuts) >= 1
    if count <= 12:
        rivals = (
            sum(across[cut] for cut in rival)
            for size in range(count)
            for rival in itertools.combinations(range(1, count), size)
            if all(shortest <= b - a <= longest for a, b in itertools.pairwise([0, *rival, count]))
        )
        assert sum(across[cut] for cut in cuts) == min(rivals)


@pytest.mark.slow
def test_thousands_of_operations_are_planned_within_the_limit():
    problem, chain = gpt2(layers=120, batch=1)
    assert len(problem.forward) > 2000
    budget = budget_of(problem, 0.6)
    for chosen in (chain, None):
        start = time.monotonic()
        found = Hiremate(chosen, time_limit_s=40).solve(problem, budget)
        assert time.monotonic() - start < 100  # on a slow machine
        assert check(problem, found.schedule, budget).overhead <= 0.3
