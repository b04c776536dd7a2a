"""The user's cache of plans: a second start finds its plan, and nothing that is wrong there does harm."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rk_solvers import Greedy, Problem, Solution
from rkgb import RockmateError
from rockmate import Rockmate, plan_files
from rockmate.plan_files import cache, reuse
from tests.free_memory import free_is
from tests.module.steps import assert_trains_exactly, squares
from tests.where import placed

WIDTH = 16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROCKMATE_CACHE", "1")
    monkeypatch.setenv("ROCKMATE_CACHE_DIR", str(tmp_path / "plans"))
    monkeypatch.delenv("ROCKMATE_CACHE_SIZE", raising=False)
    return tmp_path / "plans"


def network(rate: float = 0.1, depth: int = 3) -> nn.Module:
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(rate)) for _ in range(depth)]
    return placed(nn.Sequential(*parts))


def sample(batch: int = 64) -> torch.Tensor:
    return placed(torch.randn(batch, WIDTH))


def planned(model: nn.Module | None = None, x: torch.Tensor | None = None, budget: Any = 0.7, **other: Any) -> Rockmate:
    options = {"loss": squares, "solver": Greedy(), **other}
    return Rockmate(model or network(), sample() if x is None else x, budget, **options)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many entries as plans were made."""
    made: list[int] = []
    real = reuse.make_plan
    monkeypatch.setattr(reuse, "make_plan", lambda *given: made.append(1) or real(*given))
    return made


def test_a_second_start_finds_the_plan_and_trains_exactly(searches: list[int], folder: Path):
    first, second = planned(), planned()
    assert len(searches) == 1
    assert second.code == first.code
    assert second.plan.schedule == first.plan.schedule
    assert second.plan.measured_peak_bytes == first.plan.measured_peak_bytes
    assert [entry.load().graph.model for entry in cache.entries()] == ["Sequential"]
    assert folder.stat().st_mode & 0o077 == 0, "nobody else's"
    assert_trains_exactly(second, [sample()] * 2)


@pytest.mark.parametrize(
    "other",
    [
        {"model": network(rate=0.2)},
        {"model": network(depth=4)},
        {"x": sample(32)},
        {"budget": 0.8},
        {"budget": 40_000},
        {"gap": 0.5},
        {"time_limit": 3},
        {"solver": Greedy(seed=5)},
        {"solver": "rotor"},
        {"loss": lambda output: output.exp().exp().sum()},
        {"loss": None},
        {"pin": torch.ops.aten.gelu, "budget": 0.9},
        {"scope": "total", "budget": 0.9},
        {"scope": "total", "budget": 0.9, "optimizer": torch.optim.AdamW},
    ],
    ids=lambda other: " ".join(other),
)
@pytest.mark.ci
def test_what_decides_a_plan_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]):
    asked: list[str] = []

    def look_up(key: str) -> None:
        asked.append(key)
        raise LookupError  # nothing need be measured

    monkeypatch.setattr(cache, "get", look_up)
    for options in ({}, other, other):
        with pytest.raises(LookupError):
            planned(**options)
    first, second, again = asked
    assert first != second == again


def test_a_solver_that_cannot_be_told_from_others_is_not_cached(searches: list[int]):
    class Own(Greedy().__class__.__mro__[1]):  # type: ignore[misc]
        name = "own"

        def solve(self, problem: Any, budget_bytes: int) -> Any:
            return Greedy().solve(problem, budget_bytes)

    planned(solver=Own())
    planned(solver=Own())
    assert len(searches) == 2
    assert not cache.entries()


@pytest.mark.ci
def test_other_code_or_another_place_makes_its_own_plan(searches: list[int], monkeypatch: pytest.MonkeyPatch):
    planned()
    monkeypatch.setattr(reuse, "code_digest", lambda: "another")
    planned()
    assert len(searches) == 2
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        planned()
    finally:
        torch.set_num_threads(before)
    assert len(searches) == 3


@pytest.mark.parametrize("said", ["0", "off", "No", "false"])
@pytest.mark.ci
def test_it_can_be_switched_off(searches: list[int], said: str, monkeypatch: pytest.MonkeyPatch, folder: Path):
    planned(cache=False)
    monkeypatch.setenv("ROCKMATE_CACHE", said)
    planned()
    assert len(searches) == 2
    assert not folder.exists()


@pytest.mark.parametrize("harm", [b"", b"{}", b"\x1f\x8b\x08", b"[" * 10_000])
@pytest.mark.ci
def test_a_damaged_plan_is_made_again(searches: list[int], harm: bytes):
    planned()
    (entry,) = cache.entries()
    entry.path.write_bytes(harm)
    planned()
    planned()
    assert len(searches) == 2


@pytest.mark.ci
def test_a_plan_of_another_graph_is_made_again(searches: list[int]):
    other = planned(network(depth=4)).plan_file()
    planned()
    entry, _ = cache.entries()
    plan_files.save(other, entry.path)
    assert_trains_exactly(planned(), [sample()] * 2)
    assert len(searches) == 3


def test_a_folder_that_cannot_be_written_keeps_nothing(searches: list[int], folder: Path):
    folder.write_text("a file is in its place")
    planned()
    planned()
    assert len(searches) == 2
    assert (cache.entries(), cache.clear(), cache.get("0" * 64)) == ([], 0, None)


def test_what_was_not_used_for_longest_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plan_file = planned().plan_file()
    cache.clear()
    keys = [f"{number:064x}" for number in range(4)]
    for number, key in enumerate(keys):
        assert cache.put(key, plan_file)
        os.utime(folder / f"{key}.json.gz", (number, number))
    assert [entry.key for entry in cache.entries()] == keys[::-1]
    assert cache.get(keys[0]) == plan_file, "used now"
    size_bytes = cache.entries()[0].size_bytes
    monkeypatch.setenv("ROCKMATE_CACHE_SIZE", str(3 * size_bytes))
    assert cache.put("f" * 64, plan_file)
    assert {entry.key for entry in cache.entries()} == {keys[0], keys[3], "f" * 64}
    monkeypatch.setenv("ROCKMATE_CACHE_SIZE", "1")
    assert not cache.put("e" * 64, plan_file), "larger than all that may be there"
    assert cache.entries() == []


@pytest.mark.ci
def test_only_plans_are_cleared(folder: Path):
    planned()
    (folder / "mine.json.gz").write_text("the user's")
    abandoned = folder / f".{'0' * 64}.json.gz.abc"
    abandoned.write_text("half")
    os.utime(abandoned, (0, 0))
    assert cache.clear() == 1
    planned()
    assert not abandoned.exists(), "left by a process that ended"
    assert (folder / "mine.json.gz").exists()


@pytest.mark.ci
def test_many_writers_and_readers_at_once_see_whole_plans(monkeypatch: pytest.MonkeyPatch):
    plan_file = planned().plan_file()
    cache.clear()
    cache.put("0" * 64, plan_file)
    monkeypatch.setenv("ROCKMATE_CACHE_SIZE", str(3 * cache.entries()[0].size_bytes))
    wrong: list[Any] = []
    end = time.monotonic() + 2

    def work(number: int) -> None:
        while time.monotonic() < end:
            key = f"{number % 5:064x}"
            cache.put(key, plan_file)
            found = cache.get(key)
            if found not in (None, plan_file):
                wrong.append(found)
            cache.entries()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    cache.put("0" * 64, plan_file)
    assert 1 <= len(cache.entries()) <= 3


STARTS = """
import torch
from torch import nn
from rockmate import Rockmate
from rockmate.plan_files import reuse

torch.set_num_threads(2)
real, made = reuse.make_plan, []
reuse.make_plan = lambda *given: made.append(1) or real(*given)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
planned = Rockmate(model, torch.randn(64, 16), 0.7, solver="greedy")
print(len(made), planned.plan.schedule.recomputed)
"""


def _start() -> subprocess.Popen[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow  # each imports torch
def test_processes_share_plans():
    first = [_start() for _ in range(2)]
    told = [process.communicate(timeout=300)[0].split(maxsplit=1) for process in first]
    made, recompute = _start().communicate(timeout=300)[0].split(maxsplit=1)
    assert made == "0"
    assert recompute in [other for _, other in told]


@dataclasses.dataclass(frozen=True)
class Interrupted(Greedy):
    """A search that the user ends."""

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        return dataclasses.replace(super().solve(problem, budget_bytes), interrupted=True)


@pytest.mark.ci
def test_a_search_that_was_interrupted_is_not_kept(searches: list[int]):
    for _ in range(2):
        planned(solver=Interrupted())
    assert len(searches) == 2
    assert cache.entries() == []


@pytest.mark.ci
def test_a_budget_of_what_is_free_is_compared_with_what_is_free_now(searches: list[int], monkeypatch):
    free = [10**9]
    monkeypatch.setattr("rockmate.memory.budget.device_of", free_is(lambda: free[0]))
    planned(budget=None)
    planned(budget="auto")
    assert len(searches) == 1
    free[0] = 10**9 - 1
    planned(budget=None)
    assert len(searches) == 2, "there is less than the plan may take"
    free[0] = 10**10
    planned(budget=None)
    assert len(searches) == 2, "it recomputes nothing: more memory makes it no better"


def test_errors_are_those_of_planning():
    planned()
    with pytest.raises(RockmateError):
        planned(budget=1)
    assert len(cache.entries()) == 1
