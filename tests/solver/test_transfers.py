"""Plans that move data to a second memory: two readings of each, small problems solved by trying all, and search."""

import itertools
import random
from dataclasses import replace

import pytest

from rk_solvers import (
    Auto,
    BackwardOp,
    Data,
    ForwardOp,
    Problem,
    Schedule,
    ScheduleError,
    check,
    peak_and_time,
    simulate,
)
from rk_solvers.exact.oracle import Oracle
from rk_solvers.groups import normalise
from rk_solvers.links import Link, SecondMemory
from rk_solvers.transfers import with_moves
from rk_solvers.transfers.bound import lower_bound_with_moves_ms
from rk_solvers.transfers.improving import Found, with_slack
from rk_solvers.transfers.moves import Base, Gap, Move
from rk_solvers.transfers.oracle import least_time_with_moves
from rk_solvers.transfers.placing import least_held, placed
from rk_solvers.transfers.reading import corrected, costs_of, moves_in
from rk_solvers.transfers.search import MoveSearch
from rk_solvers.transfers.with_moves import WithMoves
from tests.solver.instances import random_plan, random_step, resnet50

FAST = SecondMemory(Link(1e12), Link(1e12))


def layers(seed: int, count: int) -> Problem:
    """A chain of operations whose backward reads their outputs, and mostly their inputs."""
    chance = random.Random(seed)
    data = tuple(Data(f"x{place}", chance.randint(1, 20), place) for place in range(count))
    forward = tuple(
        ForwardOp(f"f{place}", chance.uniform(0.5, 3), (place - 1,) if place else (), (place,), chance.randint(0, 5))
        for place in range(count)
    )
    backward = []
    for place in reversed(range(count)):
        needs = {place, place - 1} if place and chance.random() < 0.7 else {place}
        resident_bytes = chance.randint(0, 10)
        peak_bytes = resident_bytes + chance.randint(0, 10)
        backward.append(
            BackwardOp(f"b{place}", chance.uniform(0.5, 4), tuple(sorted(needs)), resident_bytes, peak_bytes)
        )
    return Problem(data, forward, tuple(backward))


def random_memory(chance: random.Random, fastest: float) -> SecondMemory:
    latency_ms = chance.choice([0, 0.1])
    out, back = (Link(chance.uniform(1, fastest), latency_ms) for _ in range(2))
    return SecondMemory(out, back, staging_bytes=chance.choice([0, 5]), unit_bytes=chance.choice([1, 1, 7]))


def random_moves(seed: int) -> tuple[Base, list[Gap], int, int]:
    """Some gaps of a random problem and plan, the least that they take, and a budget from there on."""
    chance = random.Random(seed)
    problem, _ = random_step(seed)
    memory = random_memory(chance, 200)
    base = Base(problem, normalise(problem, random_plan(problem, seed)), memory)
    gaps = [gap for gap in base.gaps if chance.random() < 0.6]
    least_bytes = int(least_held(base, gaps).max(initial=0))
    return base, gaps, least_bytes, chance.randint(least_bytes, max(least_bytes, int(base.curve.max(initial=0))))


def search(problem, memory, **options):
    return MoveSearch(problem, memory, lambda _: Oracle(), time_limit_s=0.3, **options)


# ---- what a plan costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 600), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_the_checker_counts_what_solvers_count_and_placed_moves_are_within_the_budget(seeds):
    moved = 0
    for seed in seeds:
        base, gaps, least_bytes, budget_bytes = random_moves(seed)
        problem, memory = base.problem, base.memory
        moves = placed(base, gaps, budget_bytes)
        assert placed(base, gaps, least_bytes - 1) is None
        schedule, costs = base.schedule(moves), base.costs(moves)
        assert Schedule.parse(str(schedule)) == schedule
        found = check(problem, schedule, budget_bytes, memory)
        assert (found.peak_bytes, found.stored_bytes) == (costs.peak_bytes, costs.stored_bytes)
        assert found.time_ms == pytest.approx(costs.time_ms, rel=1e-12)  # sums of floats in another order
        assert found.waiting_ms == pytest.approx(costs.waiting_ms, rel=1e-9, abs=1e-9)
        moved += len(moves)
    assert moved > len(seeds)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 400), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_transfers_get_what_room_there_is_and_take_no_more_time(seeds):
    eased = 0
    for seed in seeds:
        base, gaps, _, budget_bytes = random_moves(seed)
        moves = placed(base, gaps, budget_bytes)
        found = Found(base, gaps, moves, base.costs(moves))
        eased_plan = with_slack(found, budget_bytes)
        costs = check(base.problem, base.schedule(eased_plan.moves), budget_bytes, base.memory)
        assert costs.time_ms <= found.costs.time_ms * (1 + 1e-12)
        assert [move.gap for move in eased_plan.moves] == [move.gap for move in moves]
        for before, after in zip(moves, eased_plan.moves, strict=True):
            assert before.left <= after.left < after.recalled <= before.recalled
        eased += eased_plan.moves != moves
    assert eased > len(seeds) / 4


def test_a_transfer_has_time_to_spare_where_there_is_room_for_it_alone():
    """Let go of later and taken back earlier where the budget is wide; within the least that it takes, neither."""
    problem = replace(layers(0, 6), base_bytes=0)
    link = Link(1e6, latency_ms=0.01)
    base = Base(problem, problem.no_recompute, SecondMemory(link, link))
    gap = max(base.gaps, key=lambda gap: gap.after - gap.before)
    moves = [Move(gap, gap.before, gap.after)]
    found = Found(base, [gap], moves, base.costs(moves))
    least_bytes = found.costs.peak_bytes
    wide = with_slack(found, int(base.curve.max())).moves[0]
    assert gap.before < wide.left < wide.recalled < gap.after
    narrow = with_slack(found, least_bytes)
    assert check(problem, base.schedule(narrow.moves), least_bytes, base.memory).peak_bytes == least_bytes


SCHEDULE = """
compute f0
offload x0
compute f1
leave x0
compute f2
backward b2
recall x0
backward b1
arrive x0
backward b0
"""
BROKEN = [
    ("compute f0\noffload x0", "offload x0\ncompute f0", "offload x0: this data is not alive"),
    ("offload x0", "offload x0\noffload x0", "is in the second memory already, or on its way"),
    ("offload x0\n", "", "leave x0: this data is not alive and on its way out, or there already"),
    ("leave x0", "forget x0", "forget x0: this data is on its way out; let it leave"),
    ("leave x0\n", "", "recall x0: this data is not in the second memory"),
    ("recall x0\n", "", "arrive x0: this data is not on its way back"),
    ("recall x0", "recall x0\nrecall x0", "is back already, or on its way"),
    ("arrive x0\n", "", "backward b0: needs x0, which is not alive"),
    ("arrive x0", "compute f0\narrive x0", "makes a new instance of x0, which is on its way back"),
    ("offload x0", "offload x9", "offload x9: the problem has no such data"),
    ("arrive x0\nbackward b0", "backward b0\narrive x0", "needs x0, which is not alive"),
]


def simple() -> Problem:
    """Three operations of one ms each, of whose outputs each is read by its own backward alone, of 100 bytes."""
    data = tuple(Data(f"x{place}", 100, place) for place in range(3))
    forward = tuple(ForwardOp(f"f{place}", 1.0, (), (place,)) for place in range(3))
    backward = tuple(BackwardOp(f"b{place}", 1.0, (place,), 0, 0) for place in reversed(range(3)))
    return Problem(data, forward, backward)


def test_a_schedule_is_timed_by_its_links():
    memory = SecondMemory(Link(50.0), Link(100.0, latency_ms=0.5), staging_bytes=7)
    found = check(simple(), Schedule.parse(SCHEDULE), None, memory)
    # Sent at 1, there at 3, waited for at 2; recalled at 5, back at 6.5, and b1 ends at 6.
    assert (found.time_ms, found.waiting_ms) == (7.5, 1.5)
    assert (found.peak_bytes, found.stored_bytes) == (307, 100)
    with pytest.raises(ScheduleError, match="no second memory was given"):
        check(simple(), Schedule.parse(SCHEDULE))
    with pytest.raises(ScheduleError, match="100 bytes are in the second memory, its limit is 99"):
        check(simple(), Schedule.parse(SCHEDULE), None, replace(memory, limit_bytes=99))


@pytest.mark.parametrize(("part", "other", "message"), BROKEN)
def test_every_rule_of_moves_is_checked(part, other, message):
    broken = SCHEDULE.replace(part, other, 1)
    assert broken != SCHEDULE
    with pytest.raises(ScheduleError, match=message):
        check(simple(), Schedule.parse(broken), None, FAST)


def test_what_is_held_to_the_end_does_not_leave_and_nothing_is_left_on_its_way():
    problem = replace(simple(), held=frozenset({0}))
    with pytest.raises(ScheduleError, match="leave x0: this data is held to the end of the step"):
        check(problem, Schedule.parse(SCHEDULE), None, FAST)
    with pytest.raises(ScheduleError, match="x2 is moved, and the schedule ends before it has left and arrived"):
        check(simple(), Schedule.parse(SCHEDULE.replace("compute f2", "compute f2\noffload x2")), None, FAST)


@pytest.mark.parametrize("numbers", [(0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (1.0, -0.1), (1.0, float("nan"))])
def test_numbers_of_no_link_are_refused(numbers):
    with pytest.raises(ValueError, match="a link"):
        Link(*numbers)
    with pytest.raises(ValueError, match="neither may be negative"):
        SecondMemory(Link(1), Link(1), staging_bytes=-1)


# ---- which plan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 150), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_search_finds_nearly_always_the_fastest_of_small_problems(seeds):
    """The oracle tries all, and says of none that it is there which is not. All 150 are found on a free machine."""
    missed, with_moves = 0, 0
    for seed in seeds:
        chance = random.Random(seed)
        problem = layers(seed, 3)
        memory = SecondMemory(Link(chance.uniform(2, 40)), Link(chance.uniform(2, 40)))
        base = Base(problem, problem.no_recompute, memory)
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        budget_bytes = chance.randint(int(least_held(base, base.gaps).max()), peak_bytes)
        best = least_time_with_moves(problem, memory, budget_bytes)
        assert best is not None
        base, moves = best
        fastest = check(problem, base.schedule(moves), budget_bytes, memory).time_ms
        found = search(problem, memory).solve(budget_bytes)
        assert found is not None
        assert check(problem, found.schedule, budget_bytes, memory).time_ms >= fastest - 1e-9
        missed += found.costs.time_ms > fastest + 1e-9
        with_moves += bool(moves)
    assert missed <= 1 + len(seeds) // 100
    assert with_moves > len(seeds) // 10


def test_the_oracle_finds_what_takes_less_than_recomputation_alone():
    faster = 0
    for seed in range(20):
        problem = layers(seed, 3)
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        budget_bytes = int(0.8 * peak_bytes)
        alone = Oracle().solve(problem, budget_bytes)
        best = least_time_with_moves(problem, FAST, budget_bytes)
        if alone.status.fits:
            assert best is not None
            assert best[0].costs(best[1]).time_ms <= alone.time_ms + 1e-9
            faster += best[0].costs(best[1]).time_ms < alone.time_ms - 1e-9
    assert faster > 5


def test_the_oracle_takes_small_problems_alone():
    with pytest.raises(ValueError, match="plans of recomputations; all are tried for at most"):
        least_time_with_moves(layers(0, 8), FAST, 100)


@pytest.mark.slow
@pytest.mark.ci
def test_the_faster_the_link_the_more_moves_and_never_slower_than_recomputation_or_moves_alone():
    problem, chain = resnet50(layers=(1, 1, 1, 1))
    peak_bytes, keep_all_ms = peak_and_time(problem, problem.no_recompute)
    budget_bytes = peak_bytes // 2
    alone = Auto(chain, time_limit_s=2.0).solve(problem, budget_bytes)
    assert alone.status.fits
    times = []
    for share in (1e-3, 0.5, 2.0, 1e6):  # of the peak's bytes, moved in the time of a step
        link = Link(share * peak_bytes / keep_all_ms)
        memory = SecondMemory(link, link)
        found = MoveSearch(problem, memory, lambda _: Auto(chain, time_limit_s=1.0), time_limit_s=4.0).solve(
            budget_bytes
        )
        assert found is not None
        checked = check(problem, found.schedule, budget_bytes, memory)
        assert checked.time_ms == pytest.approx(found.costs.time_ms)
        times.append(found.costs.time_ms)
    assert times[0] <= alone.time_ms * 1.01  # a search's own gap
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(keep_all_ms, rel=1e-3)


def test_the_limit_of_the_second_memory_is_kept():
    problem = layers(3, 6)
    peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
    wide = search(problem, FAST).solve(peak_bytes - 12)
    assert wide is not None
    assert wide.costs.stored_bytes > 1
    narrow = search(problem, replace(FAST, limit_bytes=wide.costs.stored_bytes - 1)).solve(peak_bytes - 12)
    assert narrow is None or narrow.costs.stored_bytes < wide.costs.stored_bytes


def test_the_same_seed_gives_the_same_moves_where_no_clock_decides():
    problem = layers(5, 4)
    memory = SecondMemory(Link(20.0), Link(10.0))
    base = Base(problem, problem.no_recompute, memory)
    gaps = base.gaps
    budget_bytes = int(least_held(base, gaps).max()) + 3
    assert placed(base, gaps, budget_bytes) == placed(base, list(reversed(gaps)), budget_bytes)
    assert all(isinstance(move, Move) for move in placed(base, gaps, budget_bytes))


# ---- what is read back, and solvers with moves ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_with_moves_is_read_back_and_simulated_as_it_was_counted(seed):
    chance = random.Random(seed)
    problem, _ = random_step(seed)
    memory = replace(random_memory(chance, 200), out=Link(chance.uniform(1, 200), 0.1, burden=0.3))
    base = Base(problem, normalise(problem, random_plan(problem, seed)), memory)
    gaps = [gap for gap in base.gaps if chance.random() < 0.6]
    moves = placed(base, gaps, int(base.curve.max(initial=0)) + memory.staging_bytes)
    schedule, costs = base.schedule(moves), base.costs(moves)
    again, found = moves_in(problem, schedule, memory)
    assert again.recompute == base.recompute
    assert sorted(found) == sorted(moves)
    read = costs_of(problem, schedule, memory)
    assert replace(read, time_ms=costs.time_ms) == costs
    assert read.time_ms == pytest.approx(costs.time_ms, rel=1e-12)  # sums of floats in another order
    simulation = simulate(problem, schedule, memory)
    checked = check(problem, schedule, None, memory)
    assert max(simulation.peak_bytes, problem.base_bytes) == costs.peak_bytes == checked.peak_bytes
    assert simulation.time_ms == pytest.approx(costs.time_ms, rel=1e-12)  # sums of floats in another order
    assert checked.time_ms == pytest.approx(costs.time_ms, rel=1e-12)
    assert len(simulation.link_uses) == len(moves) + len(schedule.offloaded)
    for way in (True, False):
        spans = [(use.start_ms, use.end_ms) for use in simulation.link_uses if use.is_out == way]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    if moves:
        with pytest.raises(ScheduleError, match="no second memory was given"):
            simulate(problem, schedule)
        with pytest.raises(ScheduleError, match="no second memory was given"):
            costs_of(problem, schedule, None)


def test_links_are_corrected_by_what_a_step_took_more_or_less():
    """Transfers that took so much more are found to; a link cannot slow by less than nothing, or by more than all."""
    problem = layers(3, 12)
    memory = SecondMemory(Link(1e3, burden=0.2), Link(1e3, burden=0.3))
    budget_bytes = round(0.6 * peak_and_time(problem, problem.no_recompute)[0])
    found = search(problem, FAST).solve(budget_bytes)
    assert found is not None
    assert found.moves
    schedule = found.schedule
    took_ms = costs_of(problem, schedule, memory).time_ms
    for late_ms in (1e-3, -1e-3):
        links = corrected(problem, schedule, memory, late_ms)
        assert costs_of(problem, schedule, links).time_ms == pytest.approx(took_ms + late_ms, abs=1e-6)
    quickest, slowest = (corrected(problem, schedule, memory, late_ms) for late_ms in (-1e9, 1e9))
    assert (quickest.out.burden, quickest.back.burden) == (0, 0)
    assert (slowest.out.burden, slowest.back.burden) == (1, 1)


def test_what_a_link_does_slows_what_is_computed_beside_it():
    memory = SecondMemory(Link(100.0, burden=0.5), Link(100.0, burden=0.25))
    found = check(simple(), Schedule.parse(SCHEDULE), None, memory)
    # Each transfer takes 1 ms: it is over when what runs beside has run, and adds a half and a quarter of it.
    assert (found.time_ms, found.waiting_ms) == (6.75, 0.0)
    with pytest.raises(ValueError, match="a burden of 2"):
        Link(1.0, burden=2)


@pytest.mark.parametrize("seed", range(12))
def test_a_solver_with_moves_is_never_slower_than_without_and_hands_on_no_proof_of_less(seed):
    chance = random.Random(seed)
    problem = layers(seed, 5)
    memory = random_memory(chance, 60)
    most, least = peak_and_time(problem, problem.no_recompute)[0], 0
    solver = WithMoves(Oracle(), lambda _: Oracle(), memory, time_limit_s=0.2)
    for share in (1.0, 0.8, 0.6, 0.4, 0.0):
        budget_bytes = int(least + share * (most - least))
        alone, found = Oracle().solve(problem, budget_bytes), solver.solve(problem, budget_bytes)
        assert found.status.fits or not alone.status.fits
        if found.status.fits:
            checked = check(problem, found.schedule, budget_bytes, memory)
            assert checked.time_ms == pytest.approx(found.time_ms)
            assert checked.stored_bytes == found.stored_bytes
            assert found.lower_bound_ms in (None, problem.keep_all_time_ms)
            assert not alone.status.fits or found.time_ms <= alone.time_ms
        else:
            assert found.proven_bytes is None
            assert found.peak_bytes <= alone.peak_bytes
            assert check(problem, found.schedule, None, memory).peak_bytes == found.smallest_budget_bytes > budget_bytes


@pytest.mark.parametrize("share", [0.7, 0.85])
def test_the_bound_of_all_plans_is_computed_beside_the_search(share, monkeypatch):
    for name in ("_START_S", "_MORE_S"):  # however busy the machine is
        monkeypatch.setattr(with_moves, name, 60.0)
    problem, memory = layers(3, 5), random_memory(random.Random(3), 60)
    budget_bytes = int(share * peak_and_time(problem, problem.no_recompute)[0])
    solver = WithMoves(Oracle(), lambda _: Oracle(), memory, time_limit_s=2.5, bound_s=5.0)
    found = solver.solve(problem, budget_bytes)
    assert replace(solver, time_limit_s=0.2).solve(problem, budget_bytes).lower_bound_ms is None  # it would wait for it
    bound_ms = lower_bound_with_moves_ms(problem, budget_bytes, memory, 5.0, integer=False)
    assert found.status.fits
    assert found.lower_bound_ms == pytest.approx(bound_ms)
    assert found.lower_bound_ms <= found.time_ms


@pytest.mark.parametrize("seed", range(10))
def test_nothing_moves_that_a_plan_is_as_fast_without(seed):
    problem = layers(seed, 6)
    memory = random_memory(random.Random(seed), 60)
    budget_bytes = int(0.6 * peak_and_time(problem, problem.no_recompute)[0])
    found = search(problem, memory).solve(budget_bytes)
    if found is None:
        return
    base, moves = moves_in(problem, found.schedule, memory)
    for move in moves:
        others = [one.gap for one in moves if one != move]
        fewer = placed(base, others, budget_bytes)
        assert fewer is None or base.costs(fewer).time_ms > found.costs.time_ms
