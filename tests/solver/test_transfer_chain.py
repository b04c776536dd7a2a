"""The dynamic program of chains with moves: beside trying all, beside what it gives up, and what it promises."""

import itertools
import random

import pytest

from rk_solvers import BackwardOp, Data, ForwardOp, Problem, check, peak_and_time
from rk_solvers.chain.rotor import Rotor
from rk_solvers.links import Link, SecondMemory
from rk_solvers.liveness import recompute_of
from rk_solvers.problem import Chain
from rk_solvers.transfers.chain_labels import Queue
from rk_solvers.transfers.chain_program import ChainPlan, ChainProgram
from rk_solvers.transfers.improving import Improver, met
from rk_solvers.transfers.moves import Base
from rk_solvers.transfers.oracle import least_time_with_moves
from rk_solvers.transfers.placing import placed
from rk_solvers.transfers.search import MoveSearch

EXACT = 1_000_000  # labels: more than there are


def chain_of(seed: int, count: int) -> tuple[Problem, Chain]:
    """Blocks of one operation, of equal numbers or not: each backward needs its input and maybe what it has saved."""
    chance = random.Random(seed)
    same = chance.random() < 0.3
    first = chance.getrandbits(32)
    data: list[Data] = []
    forward: list[ForwardOp] = []
    backward: list[BackwardOp] = []
    before: int | None = None
    for place in range(count):
        numbers = random.Random(first if same else chance.getrandbits(32))
        read = () if before is None else (before,)
        made = [len(data)]
        data.append(Data(f"x{place}", numbers.randint(1, 20), place))
        saves = numbers.random() < 0.5 or place == 0
        if saves:
            made.append(len(data))
            data.append(Data(f"p{place}", numbers.randint(1, 20), place, "phantom"))
        time_ms, workspace_bytes = numbers.uniform(0.5, 3), numbers.randint(0, 5)
        forward.append(ForwardOp(f"f{place}", time_ms, read, tuple(made), workspace_bytes))
        resident_bytes = numbers.randint(0, 10)
        peak_bytes = resident_bytes + numbers.randint(0, 10)
        needs = (*read, *made[1:])
        backward.append(BackwardOp(f"b{place}", numbers.uniform(0.5, 4), needs, resident_bytes, peak_bytes))
        before = made[0]
    chain = Chain(tuple(range(place, place + 1) for place in range(count)), tuple(reversed(range(count))))
    return Problem(tuple(data), tuple(forward), tuple(reversed(backward))), chain


def memory_of(chance: random.Random) -> SecondMemory:
    out = Link(chance.uniform(2, 40), chance.choice([0, 0.1]))
    return SecondMemory(out, Link(chance.uniform(2, 40)), staging_bytes=chance.choice([0, 3]))


def fastest(
    problem: Problem, chain: Chain, memory: SecondMemory, budget_bytes: int, labels: int = EXACT
) -> ChainPlan | None:
    """Of the plans of the program, each of which is within the budget and takes what it says."""
    plans = ChainProgram(problem, chain, memory, slots=500, labels=labels).plans(budget_bytes)
    for plan in plans:
        found = check(problem, plan.base.schedule(plan.moves), budget_bytes, memory)
        assert found.time_ms == pytest.approx(plan.time_ms, rel=1e-12)
    assert plans == sorted(plans, key=lambda plan: plan.time_ms)
    return plans[0] if plans else None


@pytest.mark.parametrize(
    ("seeds", "least_moving", "least_both"),
    [(range(30), 8, 0), pytest.param(range(30, 800), 200, 5, marks=pytest.mark.slow)],
    ids=["few", "more"],
)
def test_no_plan_of_its_class_is_faster_and_none_of_all_beats_what_is_tried(seeds, least_moving, least_both):
    """All plans of the class are tried of chains of two to four blocks, and of two or three all plans with moves."""
    moving, both = 0, 0
    for seed in seeds:
        chance = random.Random(seed)
        count = chance.randint(2, 4)
        problem, chain = chain_of(seed, count)
        memory = memory_of(chance)
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        budget_bytes = chance.randint(peak_bytes // 2, peak_bytes - 1)
        if len(Base(problem, problem.no_recompute, memory, over_the_turn=True).gaps) > 4:
            continue  # too many for the oracle
        best = least_time_with_moves(problem, memory, budget_bytes, of_chain_program=True)
        plan = fastest(problem, chain, memory, budget_bytes)
        if best is None:
            continue
        assert plan is not None, seed
        base, moves = best
        assert plan.time_ms <= base.costs(moves).time_ms + 1e-9, seed
        moving += bool(moves)
        both += bool(moves) and any(base.recompute)
        if count == 2:
            least = least_time_with_moves(problem, memory, budget_bytes)
            assert least is not None
            assert plan.time_ms >= least[0].costs(least[1]).time_ms - 1e-9, seed
    assert moving >= least_moving
    assert both >= least_both


@pytest.mark.parametrize("labels", [EXACT, 5])
def test_it_is_never_slower_than_what_it_chooses_from(labels):
    for seed in range(8):
        chance = random.Random(seed)
        problem, chain = chain_of(seed, 5)
        memory = memory_of(chance)
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        budget_bytes = chance.randint(int(0.6 * peak_bytes), peak_bytes - 1)
        plan = fastest(problem, chain, memory, budget_bytes, labels)
        alone = Rotor(chain, slots=500).solve(problem, budget_bytes)
        base = Base(problem, problem.no_recompute, memory, over_the_turn=True)
        all_moves = [placed(base, base.gaps, budget_bytes)]
        if labels == EXACT:
            subsets = (gaps for size in range(len(base.gaps)) for gaps in itertools.combinations(base.gaps, size))
            all_moves += [placed(base, gaps, budget_bytes) for gaps in subsets]
        if alone.status.fits:
            assert plan is not None
            assert plan.time_ms <= alone.time_ms + 1e-9
        for moves in all_moves:
            if moves is not None:
                assert plan is not None
                assert plan.time_ms <= base.costs(moves).time_ms + 1e-9


def test_a_link_that_moves_nothing_leaves_recomputation_alone():
    link = Link(1e-9)
    for seed in range(5):
        problem, chain = chain_of(seed, 5)
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        alone = Rotor(chain, slots=500).solve(problem, int(0.8 * peak_bytes))
        plan = fastest(problem, chain, SecondMemory(link, link), int(0.8 * peak_bytes))
        if alone.status.fits:
            assert plan is not None
            assert not plan.moves
            assert plan.time_ms == pytest.approx(alone.time_ms)


def test_more_memory_and_faster_links_are_never_slower_where_all_labels_are_kept():
    for seed in range(3):
        problem, chain = chain_of(seed, 4)
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        for speeds, shares in (((10.0,), (0.6, 0.7, 0.8, 0.9, 1.0)), ((1.0, 3.0, 10.0, 30.0, 1e6), (0.75,))):
            times = []
            for speed in speeds:
                memory = SecondMemory(Link(speed), Link(speed))
                for share in shares:
                    plan = fastest(problem, chain, memory, int(share * peak_bytes))
                    times.append(float("inf") if plan is None else plan.time_ms)
            assert times == sorted(times, reverse=True), seed


def test_the_limit_of_the_second_memory_is_kept():
    problem, chain = chain_of(3, 5)
    peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
    for limit_bytes in (0, 5, 15, 40):
        memory = SecondMemory(Link(50), Link(50), limit_bytes=limit_bytes)
        plan = fastest(problem, chain, memory, int(0.8 * peak_bytes))
        assert plan is None or plan.base.costs(plan.moves).stored_bytes <= limit_bytes


@pytest.mark.parametrize("kind", ["_other_gaps", "_recompute_instead", "_move_instead", "_return_at_another_step"])
def test_each_kind_of_change_leads_to_plans_within_the_budget_that_take_what_they_say(kind):
    changed = 0
    for seed in range(8):
        chance = random.Random(seed)
        problem, chain = chain_of(seed, 7)
        memory = memory_of(chance)
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        budget_bytes = int(0.8 * peak_bytes)
        alone = recompute_of(problem, Rotor(chain).solve(problem, int(0.9 * peak_bytes)).schedule)
        improver = Improver(budget_bytes, 0.0, chance)
        for recompute in (problem.no_recompute, alone):
            found = met(Base(problem, recompute, memory, over_the_turn=seed % 2 == 0), [], budget_bytes)
            for _ in range(15):
                other = None if found is None else getattr(improver, kind)(found)
                if other is None:
                    continue
                told = check(problem, other.base.schedule(other.moves), budget_bytes, memory)
                assert told.time_ms == pytest.approx(other.costs.time_ms, rel=1e-12)
                changed += 1
    assert changed > 10


def test_search_is_never_slower_than_the_program_nor_than_recomputation_alone():
    for seed in range(8):
        problem, chain = chain_of(seed, 6)
        memory = memory_of(random.Random(seed))
        peak_bytes, _ = peak_and_time(problem, problem.no_recompute)
        budget_bytes = int(0.75 * peak_bytes)
        alone = Rotor(chain).solve(problem, budget_bytes)
        plans = ChainProgram(problem, chain, memory).plans(budget_bytes)
        search = MoveSearch(problem, memory, lambda _, chain=chain: Rotor(chain), chain=chain, time_limit_s=0.5)
        found = search.solve(budget_bytes)
        if found is not None:
            told = check(problem, found.schedule, budget_bytes, memory)
            assert told.time_ms == pytest.approx(found.costs.time_ms, rel=1e-12)
        least_ms = min([plan.time_ms for plan in plans] + [alone.time_ms] * alone.status.fits, default=None)
        if least_ms is not None:
            assert found is not None
            assert found.costs.time_ms <= least_ms + 1e-9


def test_a_queue_waits_for_as_much_room_as_is_asked_for():
    queue = Queue().asked([(2.0, 10), (3.0, 20)])
    assert (queue.held_bytes, queue.free_ms) == (30, 5.0)
    assert queue.with_room(30) == queue
    assert queue.with_room(20) == Queue(2.0, 5.0, 20, ((5.0, 20),))
    assert queue.with_room(0) == Queue(5.0, 5.0, 0, ())
    assert queue.with_room(-1) is None
    assert queue.at(7.0) == Queue(7.0, 7.0, 0, ())
    assert queue.no_later(queue)
    assert Queue().no_later(queue)
    assert not queue.no_later(queue.at(1.0)._replace(held_bytes=20, under_way=((5.0, 20),)))
