"""Regions compiled by no compiler: their graphs are interpreted, which takes no seconds and rounds as eager does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.fx import GraphModule

from rkgb.ir.blocks import Block
from rkgb.ir.dgraph import DGraph
from rkgb.ir.profiles import BlockProfile
from rkgb.profile import measure
from rockmate.choices import parts
from rockmate.planning import costs
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


@pytest.fixture
def a_millisecond_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations, autograd nodes and the loss take a millisecond each, whatever else the machine does."""

    def timed(graph: DGraph, block: Block, values: dict[str, Any], profile: BlockProfile, others: Any) -> BlockProfile:
        nodes = sum(len(stage.nodes) for stage in profile.stages)
        return profile.with_times(dict.fromkeys(profile.ops, 1.0), [1.0] * nodes)

    monkeypatch.setattr(measure, "_timed", timed)
    monkeypatch.setattr(costs, "_timed_ms", lambda *_: 1.0)
