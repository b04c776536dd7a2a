"""Random networks with habits in random loops: exact, or by themselves and told, or refused before the first step.

A seed alone says all: ``python -m tests.module.test_habits SEED`` prints its case and what comes of it.
"""

from __future__ import annotations

import collections
import random
import re
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rkgb import RockmateError
from rockmate import BudgetTooSmall, Rockmate
from tests.module import further_loops
from tests.module.further_habits import FURTHER
from tests.module.habit_loops import (
    EVENTS,
    Event,
    Run,
    Shape,
    Within,
    batch,
    beside_a_planner,
    difference,
    seed_streams,
    seen,
    squares,
    state_of,
    train,
)
from tests.module.habits import HABITS, Network, Part
from tests.module.models import built

QUICK = [1, 2, 3, 5, 7, 9]  # of a second or two each
MANY = range(100, 400)
# Which have shown what was wrong: layers left out at random, buffers that grow, other tensors saved in some calls,
# plans made between a forward and its backward.
FOUND = (1319, 40530, 48343, 60381, 63432, 74820, 75727, 80167)

UNPLANNED = re.compile(r"runs? without a plan|is one operation|by itself|above the budget")
TOLD_TO = 60


@dataclass
class Case:
    """All that a seed says."""

    seed: int
    shape: Shape
    budget: float
    lazily: bool
    events: list[tuple[Event, int]]
    habits: list[type[Part]]

    def network(self) -> Network:
        return built(Network, random.Random(self.seed), self.habits, seed=self.seed)

    def __str__(self) -> str:
        network = self.network()
        parts = ", ".join(f"{type(part).__name__} {part.option}".strip() for part in network.parts)
        events = ", ".join(f"{event.__name__} {seed}" for event, seed in self.events)
        first = "with the first batch" if self.lazily else "with a sample"
        return f"seed {self.seed}: {parts}; returns {network.form}; {self.budget} {first}; {self.shape}; {events}"


def drawn(seed: int, *, further: bool = False) -> Case:
    """The case of this seed, less the events that eager PyTorch does not take; `further`: of both families."""
    habits, kinds = (HABITS + FURTHER, EVENTS + further_loops.EVENTS) if further else (HABITS, EVENTS)
    rng = random.Random(seed + 1_000_000)
    shape = Shape(mask=rng.random() < 0.3, flag=rng.random() < 0.2, requires_grad=rng.random() < 0.3)
    events = [(rng.choice(kinds), 10 * place + rng.randrange(4)) for place in range(1, rng.randint(5, 7))]
    if rng.random() < 0.04:
        events[1] = (Within("profiler"), 23)
    events.append((train, 90))
    case = Case(seed, shape, rng.choice([1.0, 1.0, 0.9, 0.8]), rng.random() < 0.25, events, habits)
    while True:
        found, out = eagerly(case)
        for place, (left, (event, number)) in enumerate(zip(found, case.events, strict=False)):
            # Random numbers are the process's: what a thread draws while another plans may be anything.
            if event is beside_a_planner and draws(left, number):
                out = place
                break
        if out is None:
            return case
        case.events.pop(out)


def draws(left: dict[str, Any], seed: int) -> bool:
    """Whether an event that leaves this has drawn random numbers of PyTorch's, of Python's or of NumPy's."""
    seed_streams(seed)
    if left["Python's random stream"] != random.getstate():
        return True
    if left["NumPy's random stream"] != np.random.get_state()[1].tolist():
        return True
    return not torch.equal(left["random stream"], torch.get_rng_state())


def eagerly(case: Case) -> tuple[list[dict[str, Any]], int | None]:
    """What each event leaves, and which one PyTorch refuses."""
    run = Run(case.network(), case.shape)
    run.begin()
    found = []
    for place, (event, seed) in enumerate(case.events):
        try:
            found.append(after(run, event, seed))
        except Exception:  # noqa: BLE001  whatever PyTorch refuses
            return found, place
    return found, None


def after(run: Run, event: Event, seed: int) -> dict[str, Any]:
    """What can be seen after this event."""
    run.outputs = []
    seed_streams(seed)
    event(run, seed)
    return {"outputs": seen(run.outputs), **state_of(run.network)}


def planned(case: Case, network: Network) -> Rockmate:
    """Under the fraction, or under the smallest budget that its refusal names."""
    sample = None if case.lazily else batch(0, case.shape)
    arguments: dict[str, Any] = {"loss": squares, "solver": "greedy", "time_limit": 0.5, "cache": False}
    try:
        return Rockmate(network, sample, 1.0 if case.lazily else case.budget, **arguments)
    except BudgetTooSmall as error:
        if case.budget == 1.0:
            raise AssertionError("the whole of the eager step was refused") from error
        return Rockmate(network, sample, error.smallest_budget_bytes, **arguments)


class Failed(AssertionError):
    """None of what may come of a case."""


def outcome(case: Case) -> str:
    """What came of it: exact, told, or refused; raises `Failed` for anything else."""
    expected, _ = eagerly(case)
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    network = case.network()
    before, model = state_of(network), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = planned(case, network)
        except RockmateError as error:
            return refused(network, error, difference(before, state_of(network)))
        except Exception as error:
            raise Failed(f"planning ended in {type(error).__name__}: {error}\n{traceback.format_exc()}") from error
        changed = difference(before, state_of(network))
        if changed is not None:
            raise Failed(f"planning changed{changed}")
        run = Run(model, case.shape)
        run.begin()
        for place, (event, seed) in enumerate(case.events):
            where = f"event {place}, {event.__name__}"
            had_plans = bool(model.plans)
            try:
                found = after(run, event, seed)
            except RockmateError as error:
                if had_plans:
                    raise Failed(f"{where}: {type(error).__name__} after the first plan: {error}") from error
                return refused(network, error, None)
            except Exception as error:
                raise Failed(f"{where}: {type(error).__name__}: {error}\n{traceback.format_exc()}") from error
            differs = difference(expected[place], found)
            if differs is not None:
                told = [str(one.message)[:TOLD_TO] for one in caught]
                raise Failed(f"{where}: eager's and planned are not equal:{differs}; told {told}")
    by_itself = any(UNPLANNED.search(str(one.message)) for one in caught)
    steady = not any(part.option in part.refused for part in run.network.parts)
    if steady and not by_itself and run.is_planned and run.model.plans:
        budget_bytes, peak_bytes = run.model.plan.budget_bytes, run.peak_bytes(90)  # of the last event's step
        if peak_bytes > budget_bytes:
            raise Failed(f"a step of {peak_bytes} bytes within {budget_bytes}")
    return "told" if by_itself else "exact"


def refused(network: Network, error: RockmateError, changed: str | None) -> str:
    """The word for a refusal that names its cause; raises for others."""
    if changed is not None:
        raise Failed(f"a refusal changed{changed}: {error}") from error
    causes = [rf"parts\.{place}\b" for place, part in enumerate(network.parts) if part.option in part.refused]
    if isinstance(error, BudgetTooSmall) or not any(re.search(cause, str(error)) for cause in causes):
        raise Failed(f"refused with {type(error).__name__}, which names no part of {causes}: {error}") from error
    return f"refused: {error}"


@pytest.mark.filterwarnings("ignore")  # of eager PyTorch; what planning tells is caught and judged
@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (*MANY, *FOUND))])
def test_habits_and_loops_are_exact_or_told_or_refused_with_their_cause(seed):
    case = drawn(seed)
    print(case)
    assert outcome(case)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(5000, 5150)])
def test_so_are_further_habits_and_loops(seed):
    case = drawn(seed, further=True)
    print(case)
    assert outcome(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [149, *range(1000, 1040)])
def test_so_they_are_under_plans_for_other_times(seed, monkeypatch):
    """What is measured decides which plan is found: a clock that jumps leads to plans that this machine never has."""
    jumps, real, lost_s = random.Random(seed), time.perf_counter, [0.0]

    def jumping():
        lost_s[0] += jumps.expovariate(1) * jumps.choice([0, 0, 1e-5, 1e-4, 5e-4])
        return real() + lost_s[0]

    monkeypatch.setattr(time, "perf_counter", jumping)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(jumping() * 1e9))
    assert outcome(drawn(seed))


class Alternating(torch.nn.Module):
    """Goes by the count of its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.layer = 0, torch.nn.Linear(8, 8)

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.layer(x)) if self.calls % 2 else self.layer(x)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.alternating = torch.nn.Linear(8, 8), Alternating()

    def forward(self, x, number):
        return torch.tanh(self.alternating(torch.tanh(self.layer(x)))) * (1 + int(number.max()))


@pytest.mark.filterwarnings("ignore::rkgb.TraceWarning", "ignore::rockmate.ReplanWarning")
@pytest.mark.ci
def test_what_a_call_counts_before_its_plan_proves_to_be_another_s_is_taken_back():
    model = Rockmate(Counting(), (torch.randn(16, 8), torch.tensor([3])), 1.0, solver="greedy", cache=False)
    for call, number in enumerate((3, 4, 3)):
        model(torch.randn(16, 8), torch.tensor([number])).sum().backward()
        assert model.original.alternating.calls == call + 1


def main(first: int, last: int, further: bool) -> None:
    """Cases one by one, with what came of them."""
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(first, last):
        case = drawn(seed, further=further)
        try:
            found = outcome(case)
        except Failed as error:
            found = f"FAILED {error}"
        counts[found.split()[0]] += 1
        sys.stdout.write(f"{case}\n  {found}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}\n")


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument != "further"]
    main(numbers[0], numbers[-1] if len(numbers) > 1 else numbers[0] + 1, "further" in sys.argv)
