"""What generated code does not do where there is no need of it, and what it calls instead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rkgb.profile import recompute_cost as repetition
from tests.module.steps import assert_trains_exactly, following, keep_nothing, measured_for

ROWS, WIDTH = 64, 32


class Normed(nn.Module):
    """A masked product behind each of two kinds of normalisation: the mask is a view of a view of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.groups = nn.GroupNorm(4, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("visible", torch.ones(2 * ROWS, WIDTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.groups(self.norm(self.first(x).relu()).relu())
        return self.last(hidden.masked_fill(~self.visible[:ROWS][:, :WIDTH], 0.5).tanh())


def sample() -> tuple[Tensor]:
    return (torch.randn(ROWS, WIDTH),)


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model = Normed()
    return model, measured_for(model, sample())


def recomputations(code: str) -> str:
    return code[code.index("def recompute_0") :]


def test_normalisations_are_repeated_without_a_graph(measured):
    model, costs = measured
    module = following(costs, model, keep_nothing(costs))
    repeated = recomputations(module.code)
    assert "aten.native_layer_norm.default(" in repeated
    assert "aten.native_group_norm.default(" in repeated
    assert "step.captures(" not in module.code
    assert_trains_exactly(module, [sample() for _ in range(2)])


def test_only_what_lies_otherwise_than_what_is_made_is_looked_at_anew(measured):
    """A linear layer saves its input as a matrix: here it is one."""
    model, costs = measured
    assert "as_strided" not in following(costs, model, keep_nothing(costs)).code
    deep = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    batches = [torch.randn(2, ROWS, WIDTH) for _ in range(2)]
    costs = measured_for(deep, batches[0])
    module = following(costs, deep, keep_nothing(costs))
    assert f".as_strided(({2 * ROWS}, {WIDTH}), ({WIDTH}, 1), 0))" in recomputations(module.code)
    assert_trains_exactly(module, batches)


def test_views_of_leaves_are_repeated_and_timed_with_what_reads_them(monkeypatch):
    repeated: list[list[str]] = []
    repeat = repetition._Repeating._repeat

    def noted(self, ops, values):
        repeated.append([op.call.op_name for op in ops])
        return repeat(self, ops, values)

    monkeypatch.setattr(repetition._Repeating, "_repeat", noted)
    measured_for(Normed(), sample())
    (ops,) = {tuple(ops) for ops in repeated if any("bitwise_not" in op for op in ops)}
    assert sum("slice" in op for op in ops) >= 2
    assert "bitwise_not" in ops[-1]


def test_handling_is_part_of_what_a_repetition_takes(monkeypatch):
    monkeypatch.setattr(repetition, "_handling_ms", lambda others_bytes: 1000.0)
    costs = measured_for(Normed(), sample())
    repeated = [op.repeat_ms for op in costs.graphs.K_graph.forward if op.repeat_ms is not None]
    assert repeated
    assert min(repeated) > 1000.0


class Listed(nn.Module):
    """Parameters whose names are no identifiers."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))
        self.scales = nn.ParameterDict({"class": torch.rand(8), "per channel": torch.rand(8)})
        self.register_buffer("0", torch.rand(8))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.scales["class"] + self.scales["per channel"] * getattr(self, "0")
        return x


def test_parameters_have_names_that_are_no_identifiers():
    torch.manual_seed(0)
    model = Listed()
    costs = measured_for(model, torch.randn(16, 8))
    module = following(costs, model, keep_nothing(costs))
    assert "getattr(weights, '0')" in module.code
    assert_trains_exactly(module, [torch.randn(16, 8) for _ in range(2)])
