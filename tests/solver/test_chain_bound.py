"""The bound of chains: never above the best plan, and near it where all data are of one size."""

import heapq
import itertools
import math
import random

import pytest

from rk_solvers import Auto, BackwardOp, Data, ForwardOp, Oracle, Problem, Rotor, evaluate, peak_and_time
from rk_solvers.bounds.chain_bound import _least_cost_ms, chain_bound_ms
from rk_solvers.exact.oracle import least_peak
from tests.solver.instances import chain_of, gpt2, random_problem
from tests.solver.test_merging import pairs, share


def random_chain(seed: int, count: int) -> Problem:
    """A chain with all that real ones have: skips, data of several sizes, workspaces, needs of outputs and inputs."""
    rng = random.Random(seed)
    sizes = rng.choice([(4,), (4,), (3, 4), (2, 4, 9)])
    data: list[Data] = []
    forward: list[ForwardOp] = []
    made: list[list[int]] = []
    for index in range(count):
        outputs = []
        for slot in range(rng.choice([1, 1, 1, 2])):
            outputs.append(len(data))
            data.append(Data(f"d{index}.{slot}", rng.choice(sizes), index, "phantom" if slot else "data"))
        before = [made[index - 1][0]] if index else []
        if index > 1 and rng.random() < 0.2:
            before.append(made[rng.randrange(index - 1)][0])
        forward.append(
            ForwardOp(
                f"f{index}",
                rng.choice([1.0, 2.0, 5.0]),
                tuple(sorted(before)),
                tuple(outputs),
                workspace_bytes=rng.choice([0, 0, 3]),
                recomputable=rng.random() < 0.95,
            )
        )
        made.append(outputs)
    backward = [
        BackwardOp(f"loss{i}", 0.0, (made[-1][0],) if rng.random() < 0.3 else (), 0, rng.choice([0, 2, 8]))
        for i in range(rng.choice([1, 1, 2]))
    ]
    resident = 0
    for index in reversed(range(count)):
        needs = set(rng.choice([(made[index][-1],), (), (made[index][0],)]))
        if index and rng.random() < 0.6:
            needs.add(made[index - 1][0])
        resident += rng.choice([0, 0, 1, 3])
        peak = resident + rng.choice([0, 2, 5])
        backward.append(BackwardOp(f"b{index}", 1.0, tuple(sorted(needs)), resident, peak))
    held = frozenset({made[-1][0]}) if rng.random() < 0.4 else frozenset()
    return Problem(tuple(data), tuple(forward), tuple(backward), held, rng.choice([0, 7]))


def budgets(problem: Problem) -> list[int]:
    low, high = peak_and_time(problem, least_peak(problem))[0], peak_and_time(problem, problem.no_recompute)[0]
    return sorted({low + (high - low) * part // 5 for part in range(6)})


def assert_a_bound(problem: Problem) -> int:
    """How often it is above keep-all's time."""
    told = 0
    for budget in budgets(problem):
        best = Oracle().solve(problem, budget)
        bound_ms = chain_bound_ms(problem, budget)
        assert problem.keep_all_time_ms <= bound_ms <= best.time_ms + 1e-9
        told += bound_ms > problem.keep_all_time_ms
    return told


@pytest.mark.parametrize("count", [3, 4, 5])
def test_no_plan_takes_less(count):
    assert sum(assert_a_bound(random_chain(seed, count)) for seed in range(60)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(8))
def test_no_plan_of_many_chains_takes_less(chunk):
    told = sum(assert_a_bound(random_chain(1000 * chunk + seed, 3 + seed % 4)) for seed in range(150))
    assert told > 20


@pytest.mark.parametrize("seed", range(40))
def test_problems_that_are_no_chains_have_that_of_keep_all_or_a_true_one(seed):
    assert_a_bound(random_problem(seed, 5))


def least_cost_of_the_game(times: list[float], places: list[int], room: list[int]) -> float:
    """Of serving `places`, the last first, each with so many tokens before it at most.

    By Dijkstra's algorithm over all sets of tokens. Between two that are served there is room for any number."""
    best = {(len(places) - 1, (1 << len(times)) - 1): 0.0}  # the next to be served, and where tokens are
    queue = [(0.0, *state) for state in best]
    while queue:
        cost, index, tokens = heapq.heappop(queue)
        if index < 0:
            return cost
        if cost > best[index, tokens]:
            continue
        place = places[index]
        moves = [(cost, index, tokens & ~(1 << at)) for at in range(len(times)) if tokens >> at & 1]
        moves += [
            (cost + times[at], index, tokens | 1 << at)
            for at in range(len(times))
            if not tokens >> at & 1 and (at == 0 or tokens >> (at - 1) & 1)
        ]
        if tokens >> place & 1 and (tokens & ((1 << place) - 1)).bit_count() <= room[index]:
            moves.append((cost, index - 1, tokens))
        for move in moves:
            if move[0] < best.get(move[1:], math.inf):
                best[move[1:]] = move[0]
                heapq.heappush(queue, move)
    return math.inf


@pytest.mark.parametrize("seed", range(60))
def test_the_dynamic_program_is_exact_for_the_game(seed):
    rng = random.Random(seed)
    count = rng.randint(4, 9)
    times = [float(rng.choice([1, 1, 2, 3, 7, 20])) for _ in range(count)]
    places = sorted(rng.sample(range(count), rng.randint(3, count)))
    room = [rng.randint(0, 4) for _ in places]
    forward = tuple(ForwardOp(f"f{i}", time_ms, (i - 1,) if i else (), (i,)) for i, time_ms in enumerate(times))
    data = tuple(Data(f"d{i}", 1, i) for i in range(count))
    problem = Problem(data, forward, (BackwardOp("loss", 0.0, (count - 1,), 0, 0),))
    most = min(max(room), len(places))
    found = _least_cost_ms(problem, places, [min(tokens, most) for tokens in room], most)
    assert found == pytest.approx(least_cost_of_the_game(times, places, room))
    # Asked for again and again, with other room: only the first time counts, which is the last in these lists.
    often = [
        (place, number) for place, tokens in zip(places, room, strict=True) for number in (rng.randint(0, 4), tokens)
    ]
    repeated = least_cost_of_the_game(times, [place for place, _ in often], [number for _, number in often])
    assert found <= repeated + 1e-9


@pytest.mark.parametrize("count", [4, 6])
def test_equal_operations_with_room_for_whole_tokens_take_just_that(count):
    problem = chain_of(count)
    for budget in budgets(problem):
        best = Oracle().solve(problem, budget)
        assert chain_bound_ms(problem, budget) == pytest.approx(best.time_ms, abs=1.001)  # within one operation


@pytest.mark.parametrize("part", [0.5, 0.3, 0.15])
def test_plans_of_rotor_are_proven_near_the_best_where_few_values_can_stay(part):
    problem, chain = pairs(100)
    budget = share(problem, part)
    found = Rotor(chain).solve(problem, budget)
    assert found.status.fits
    assert chain_bound_ms(problem, budget) == pytest.approx(found.time_ms)  # it is the best there is


def test_the_default_search_ends_with_that_proof():
    problem, chain = pairs(100)
    found = Auto(chain, time_limit_s=60).solve(problem, share(problem, 0.15))
    assert found.lower_bound_ms is not None
    assert 1 - found.lower_bound_ms / found.time_ms <= 0.02
    assert not found.out_of_time


def test_a_model_that_is_none_is_told_at_once():
    problem = gpt2()[0]
    budget = int(0.5 * evaluate(problem, problem.no_recompute).peak_bytes)
    assert chain_bound_ms(problem, budget) >= problem.keep_all_time_ms


def test_it_grows_as_the_budget_falls():
    problem, _ = pairs(60)
    bounds = [chain_bound_ms(problem, share(problem, part / 20)) for part in range(4, 20)]
    assert all(tight >= wide for tight, wide in itertools.pairwise(bounds))
