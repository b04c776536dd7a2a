"""Bytes of the backward in the whole step, where they differ from those of blocks that run alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkgb import AllGraphs, KGraph, make_all_graphs, make_sample
from rkgb.passes.s_to_k import s_to_k
from rkgb.profile.in_context import measure_in_context
from rockmate import zoo
from rockmate.planning.costs import assumed_loss_cost, build_problem
from tests.free_memory import free_is
from tests.module.models import WIDTH, built, rows
from tests.module.random_modules import random_plan
from tests.module.steps import following, keep_nothing, measured_for, peak_of_step


class Skips(nn.Module):
    """Two blocks apart, a value is read again by a concatenation: its gradient from there is a part of a larger one."""

    def __init__(self, width: int = WIDTH, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2 * depth)])
        self.joins = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(depth)])

    def forward(self, hidden: Tensor) -> Tensor:
        skips = []
        for layer in self.layers:
            hidden = F.gelu(layer(hidden))
            skips.append(hidden)
        for join in self.joins:
            hidden = torch.tanh(join(torch.cat([skips.pop(0), hidden], dim=1)))
        return hidden


def bytes_of(graph: KGraph) -> list[tuple[str, int, int]]:
    return [(comp.name, comp.resident_bytes, comp.peak_bytes) for comp in graph.backward]


def alone(graphs: AllGraphs) -> KGraph:
    """The K graph as the blocks by themselves make it."""
    return s_to_k(graphs.S_graph, graphs.blocks, graphs.profiles)


def test_a_gradient_that_is_a_part_of_another_is_counted_as_it_lies():
    network = built(Skips)
    graphs = make_all_graphs(network, rows())
    assert len(graphs.blocks) > 1
    assert bytes_of(graphs.K_graph) != bytes_of(alone(graphs))


@pytest.mark.parametrize("make", [Skips], ids=["skips"])
def test_predictions_are_exact_where_gradients_come_from_several_blocks(make):
    network = built(make)
    measured = measured_for(network, rows())
    for plan in (keep_nothing(measured), *(random_plan(measured.problem, seed) for seed in range(6))):
        model = following(measured, network, plan)
        assert abs(peak_of_step(model, (rows(),)) - model.plan.peak_bytes) <= 0.002 * model.plan.peak_bytes
        model.zero_grad()


@pytest.mark.parametrize("name", ["mixer-tiny", "transformer-tiny", "unet-tiny"])
def test_the_step_is_the_same_however_often_it_is_measured(name):
    entry = zoo.get(name)
    graphs = make_all_graphs(entry.model, entry.sample)
    first = bytes_of(graphs.K_graph)
    assert measure_in_context(graphs.K_graph, graphs.profiles, entry.model, make_sample(entry.model, entry.sample))
    assert bytes_of(graphs.K_graph) == first


def test_the_module_is_left_as_it_was():
    network = built(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh()))
    graphs = make_all_graphs(network, rows())
    network(rows()).sum().backward()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    stream = torch.get_rng_state()
    assert measure_in_context(graphs.K_graph, graphs.profiles, network, make_sample(network, rows()))
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, network.parameters(), strict=True))
    assert torch.equal(stream, torch.get_rng_state())


def test_a_step_that_does_not_fit_is_predicted_from_its_blocks(monkeypatch):
    network = built(Skips)
    monkeypatch.setattr("rkgb.profile.in_context.device_of", free_is(1 << 10))
    graphs = make_all_graphs(network, rows())
    assert bytes_of(graphs.K_graph) == bytes_of(alone(graphs))
    problem, _ = build_problem(graphs, assumed_loss_cost(graphs.K_graph))
    assert problem.keep_all_time_ms > 0


def test_out_of_memory_in_the_step_leaves_the_graph_as_it_was(monkeypatch):
    network = built(Skips)
    graphs = make_all_graphs(network, rows())
    graph = alone(graphs)
    before = bytes_of(graph)

    def refuse(*_):
        raise MemoryError("no more")

    monkeypatch.setattr("rkgb.profile.in_context.observe_memory", refuse)
    assert not measure_in_context(graph, graphs.profiles, network, make_sample(network, rows()))
    assert bytes_of(graph) == before
