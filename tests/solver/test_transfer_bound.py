"""The lower bound of plans that may move data: below every plan, near the best of small problems, quick on large."""

import itertools
import math
import random
import time
from dataclasses import replace

import pytest

from rk_solvers import (
    BackwardOp,
    Data,
    ForwardOp,
    Greedy,
    Oracle,
    Problem,
    Schedule,
    check,
    lower_bound_ms,
    peak_and_time,
)
from rk_solvers.bounds.relaxation import UNITS
from rk_solvers.groups import normalise
from rk_solvers.links import Link, SecondMemory
from rk_solvers.liveness import least_bytes
from rk_solvers.milp import BackendLimits, Outcome, relaxation_bound, solve
from rk_solvers.transfers.bound import lower_bound_with_moves_ms, quick_bound_ms
from rk_solvers.transfers.moves import Base, Move
from rk_solvers.transfers.oracle import least_time_with_moves
from rk_solvers.transfers.placing import least_held
from rk_solvers.transfers.relaxation import MovesRelaxation
from rk_solvers.transfers.search import MoveSearch
from tests.solver.instances import gpt2, random_plan, random_problem, random_step
from tests.solver.test_transfers import layers, simple

FAST = SecondMemory(Link(1e12), Link(1e12))
SLOW = SecondMemory(Link(1e-9), Link(1e-9))


def bound(problem, budget_bytes, memory, **options):
    return lower_bound_with_moves_ms(problem, budget_bytes, memory, limit_s=20.0, **options)


# ---- never above a plan -----------------------------------------------------------------------------------


def small_case(seed: int) -> tuple[Problem, SecondMemory, int]:
    """A problem that the oracle takes, links that matter, and a budget that not all fits."""
    chance = random.Random(seed)
    problem = layers(seed, 3)
    out, back = (
        Link(chance.uniform(2, 40), chance.choice([0, 0.3]), chance.choice([0, 0, 0.1, 0.9])) for _ in range(2)
    )
    base = Base(problem, problem.no_recompute, FAST)
    most = peak_and_time(problem, problem.no_recompute)[0] - 1
    budget_bytes = chance.randint(min(int(least_held(base, base.gaps).max()), most) - 1, most)
    limit_bytes = chance.choice([None, None, chance.randint(0, 40)])
    return problem, SecondMemory(out, back, limit_bytes, chance.choice([0, 0, 3])), budget_bytes


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 400), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_below_the_oracle_and_near_it_on_small_problems(seeds):
    told, least = 0.0, 0.0  # beyond keeping all
    for seed in seeds:
        problem, memory, budget_bytes = small_case(seed)
        best = least_time_with_moves(problem, memory, budget_bytes)
        best_ms = math.inf if best is None else best[0].costs(best[1]).time_ms
        linear = bound(problem, budget_bytes, memory, integer=False)
        whole = bound(problem, budget_bytes, memory)
        assert problem.keep_all_time_ms <= linear <= whole + 1e-9
        # The integer program's back end takes rows for satisfied within 1e-6 of numbers of about 1000.
        assert whole <= best_ms * (1 + 1e-6), seed
        if best is not None:
            told += whole - problem.keep_all_time_ms
            least += best_ms - problem.keep_all_time_ms
    assert told > 0.5 * least


def any_plan(seed: int) -> tuple[Problem, SecondMemory, Base, list[Move]]:
    """Any recomputations, and any moves beside them, of any problem and links."""
    chance = random.Random(seed)
    if chance.random() < 0.6:
        problem, _ = random_step(seed, chance.choice([None, 4, 6, 8]))
    else:
        problem = random_problem(seed, chance.randint(1, 8))
    out, back = (
        Link(10 ** chance.uniform(-0.3, 3), chance.choice([0, 0.3]), chance.choice([0, 0, 0.1, 1])) for _ in range(2)
    )
    memory = SecondMemory(out, back, None, chance.choice([0, 5]))
    recompute = normalise(problem, random_plan(problem, seed, chance.choice([0, 0.05, 0.3])))
    base = Base(problem, recompute, memory)
    rate, moves = chance.choice([0.2, 0.6, 1]), []
    for gap in base.gaps:
        if chance.random() < rate:
            ends = sorted(chance.sample(range(gap.before, gap.after + 1), 2))
            moves.append(Move(gap, *(ends if chance.random() < 0.6 else (gap.before, gap.after))))
    return problem, memory, base, moves


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_any_grouping_and_moments_are_below_any_plan(seeds):
    moved = 0
    for seed in seeds:
        problem, memory, base, moves = any_plan(seed)
        if not problem.backward:
            continue
        chance, costs = random.Random(seed), base.costs(moves)
        if chance.random() < 0.5:
            memory = replace(memory, limit_bytes=costs.stored_bytes)
        checked = check(problem, base.schedule(moves), costs.peak_bytes, memory)
        room_bytes = costs.peak_bytes - memory.staging_bytes * bool(moves)
        rate = chance.choice([0.1, 0.5, 1])
        relaxation = MovesRelaxation(
            problem,
            room_bytes,
            sorted({0, *(stage for stage in range(len(problem.backward)) if chance.random() < rate)}),
            brief=chance.random() < 0.1,
            memory=memory,
            most_extra_ms=costs.time_ms + 1,
            most_moments=chance.choice([1, 2, 5, 100]),
        )
        linear = relaxation_bound(relaxation.model)
        relaxation.model.integer = relaxation.integer
        whole = solve(relaxation.model, "scipy", BackendLimits(0.5))
        most = (checked.time_ms - problem.keep_all_time_ms) / (problem.keep_all_time_ms / UNITS or 1.0)
        for result in (linear, whole):
            assert result.outcome is not Outcome.INFEASIBLE, seed
            assert result.bound <= most + 1e-5 * max(1.0, most), seed  # the back end's tolerance
        assert quick_bound_ms(problem, room_bytes, memory) <= checked.time_ms * (1 + 1e-9), seed
        moved += len(moves)
    assert moved > len(seeds)


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 150), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_the_bound_is_below_any_plan(seeds):
    for seed in seeds:
        problem, memory, base, moves = any_plan(seed)
        costs = base.costs(moves)
        memory = replace(memory, limit_bytes=costs.stored_bytes)
        told = lower_bound_with_moves_ms(problem, costs.peak_bytes, memory, limit_s=1.0)
        assert problem.keep_all_time_ms <= told <= costs.time_ms * (1 + 1e-6)  # the back end's tolerance


EARLY = """
compute f0
offload x0
compute f1
leave x0
compute f2
backward b2
forget x2
backward b1
forget x1
recall x0
arrive x0
backward b0
forget x0
"""


def test_data_may_be_sent_before_the_use_after_which_they_leave():
    """`Base` sends them after it; the checker, and so the bound, knows plans that do it before, and wait less."""
    data = tuple(Data(f"x{place}", 100, place) for place in range(3))
    times_ms = (1.0, 3.0, 1.0)
    forward = tuple(
        ForwardOp(f"f{place}", times_ms[place], (place - 1,) if place else (), (place,), recomputable=False)
        for place in range(3)
    )
    backward = tuple(BackwardOp(f"b{place}", 1.0, (place,), 0, 0) for place in reversed(range(3)))
    problem = Problem(data, forward, backward)
    memory = SecondMemory(Link(25.0), Link(1e6))
    checked = check(problem, Schedule.parse(EARLY), 200, memory)
    best = least_time_with_moves(problem, memory, 200)
    assert best is not None
    assert checked.waiting_ms == pytest.approx(1.0, rel=1e-3)
    assert best[0].costs(best[1]).waiting_ms == pytest.approx(4.0, rel=1e-3)
    assert bound(problem, 200, memory) <= checked.time_ms * (1 + 1e-9)
    assert bound(problem, 200, memory) == pytest.approx(9.0, rel=1e-3)


# ---- not too low ------------------------------------------------------------------------------------------


def test_what_has_to_wait_is_told():
    """Of three times 100 bytes 200 fit, and nothing may be computed again: one data goes and comes back."""
    problem = simple()
    problem = replace(problem, forward=tuple(replace(op, recomputable=False) for op in problem.forward))
    for memory, least_ms in (
        # x0 is sent at 1, has left at 5 in place of 2, and is back in time.
        (SecondMemory(Link(25.0), Link(1e9)), 9.0),
        # x0 leaves at once; it is recalled at 4, when x2 is gone, and is there at 8 in place of 5.
        (SecondMemory(Link(1e9), Link(25.0)), 9.0),
        (SecondMemory(Link(100.0), Link(100.0)), 6.0),
        (SecondMemory(Link(100.0, latency_ms=2.0), Link(1e9)), 8.0),
    ):
        best = least_time_with_moves(problem, memory, 200)
        assert best is not None
        assert best[0].costs(best[1]).time_ms == pytest.approx(least_ms)
        assert bound(problem, 200, memory) == pytest.approx(least_ms, rel=1e-4)  # its margin is in what is beyond 6
    assert bound(problem, 99, FAST) == math.inf
    assert bound(problem, 200, replace(FAST, limit_bytes=99)) == math.inf
    assert bound(problem, 200, replace(FAST, staging_bytes=101)) == math.inf
    assert bound(problem, 300, SLOW) == problem.keep_all_time_ms


def test_with_links_of_no_use_it_is_that_of_recomputation_and_with_endless_ones_that_of_keeping_all():
    for seed in range(10):
        problem = layers(seed, 4)
        peak_bytes, keep_all_ms = peak_and_time(problem, problem.no_recompute)
        alone = Oracle().solve(problem, peak_bytes - 5)
        if not alone.status.fits:
            continue
        told = bound(problem, peak_bytes - 5, SLOW)
        assert lower_bound_ms(problem, peak_bytes - 5) * (1 - 1e-6) <= told <= alone.time_ms * (1 + 1e-6)
        base = Base(problem, problem.no_recompute, FAST)
        budget_bytes = int(least_held(base, base.gaps).max())
        assert bound(problem, budget_bytes, FAST) == pytest.approx(keep_all_ms, rel=1e-6)


def test_the_faster_the_links_and_the_larger_the_budget_the_lower():
    problem, chain = gpt2(layers=2, vocabulary=3000)
    peak_bytes, keep_all_ms = peak_and_time(problem, problem.no_recompute)
    table = []
    least = least_bytes(problem)
    for share in (0.1, 0.3, 0.7):
        budget_bytes, row = int(least + share * (peak_bytes - least)), []
        for speed in (0.05, 0.3, 1.0, 100.0):  # in peaks that are moved in a step
            link = Link(speed * peak_bytes / keep_all_ms)
            memory = SecondMemory(link, link)
            row.append(bound(problem, budget_bytes, memory, chain=chain, integer=False) / keep_all_ms)
        table.append(row)
    for row in [*table, *zip(*table, strict=True)]:
        assert all(first >= second - 1e-9 for first, second in itertools.pairwise(row))
    assert table[0][0] > 1.01
    assert table[0][-1] < 1.0005


def test_staging_is_for_those_that_move_alone():
    problem = layers(5, 4)
    peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
    alone_ms = Oracle().solve(problem, peak_bytes - 5).time_ms
    told = bound(problem, peak_bytes - 5, replace(FAST, staging_bytes=10**6))
    assert lower_bound_ms(problem, peak_bytes - 5) <= told <= alone_ms
    assert told > bound(problem, peak_bytes - 5, FAST)


# ---- larger problems --------------------------------------------------------------------------------------


def test_it_is_near_a_plan_that_was_found_and_the_time_limit_holds():
    problem, chain = gpt2(layers=6, vocabulary=3000)
    peak_bytes, keep_all_ms = peak_and_time(problem, problem.no_recompute)
    link = Link(0.3 * peak_bytes / keep_all_ms)
    memory = SecondMemory(link, link)
    found = MoveSearch(problem, memory, lambda _: Greedy(tries=1, rounds=1), time_limit_s=0.5).solve(peak_bytes // 2)
    assert found is not None
    started = time.monotonic()
    bound_ms = lower_bound_with_moves_ms(problem, peak_bytes // 2, memory, 1.0, chain)
    assert time.monotonic() - started < 5.0  # a program is built before its clock begins, and the machine is shared
    assert keep_all_ms * 1.001 < bound_ms <= found.costs.time_ms


def test_what_transfers_slow_beside_them_is_in_the_bound():
    problem, chain = gpt2(layers=6, vocabulary=3000)
    peak_bytes, keep_all_ms = peak_and_time(problem, problem.no_recompute)
    for burden in (0.1, 0.5):
        link = Link(10 * peak_bytes / keep_all_ms, burden=burden)  # nothing is waited for
        memory = SecondMemory(link, link)
        budget_bytes = peak_bytes // 2
        found = MoveSearch(problem, memory, lambda _: Greedy(tries=1, rounds=1), time_limit_s=0.5).solve(budget_bytes)
        assert found is not None
        told_ms = lower_bound_with_moves_ms(problem, budget_bytes, memory, 5.0, chain, integer=False)
        assert told_ms <= found.costs.time_ms
        assert found.costs.time_ms - told_ms < 0.2 * (found.costs.time_ms - keep_all_ms)


def test_a_problem_without_backward_has_the_time_of_its_forward():
    problem = Problem(
        (Data("x", 10, 0), Data("y", 10, 1)), (ForwardOp("f", 1.0, (), (0,)), ForwardOp("g", 1.0, (), (1,))), ()
    )
    assert bound(problem, 15, FAST) == 2.0
    backward = (BackwardOp("b", 1.0, (0, 1), 0, 0),)
    assert bound(replace(problem, backward=backward), 15, FAST) == math.inf
