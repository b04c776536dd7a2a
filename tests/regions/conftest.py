"""Regions compiled by no compiler: their graphs are interpreted, which takes no seconds and rounds as eager does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.fx import GraphModule

from rockmate.choices import parts
from rockmate.regions import build, choose, code, trial
from rockmate.regions.option import RegionTrial


def interpreted_graph(graph: GraphModule, is_backward: bool) -> Callable[[list[Any]], Any]:
    return lambda given: graph(*given)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing was compiled or tried before, and nothing is left of it."""
    held = (code.CALLS, code.FORMS, choose._TRIED, choose._TOLD)
    for one in held:
        one.clear()
    yield
    for one in held:
        one.clear()


@pytest.fixture
def said_to_pay(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """What is compiled is said to pay wherever it is right, steps included."""

    def tried(*given: Any) -> RegionTrial:
        return replace(trial.tried(*given), eager_ms=1e3, compiled_ms=1.0)

    monkeypatch.setattr(choose, "tried", tried)
    monkeypatch.setattr(parts, "steps_by_turns_ms", lambda *_: (1.0, 2.0))  # with such parts, and without


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, said_to_pay: None) -> None:
    """What is compiled is interpreted, and said to pay wherever it is right."""
    monkeypatch.setattr(build, "compiled", interpreted_graph)
