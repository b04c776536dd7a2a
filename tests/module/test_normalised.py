"""Batch normalisations that are repeated from the statistics of their forward: exact, counted, forgotten in time."""

import copy

import pytest
import torch
from torch import nn

from rk_solvers import peak_and_time, schedule_of, simulate
from rk_solvers.groups import normalise
from rkgb import make_all_graphs
from rkgb.profile import recompute_cost
from rkgb.profile.recompute_cost import ColdClock
from rkgb.restore.batch_norm import normalised
from rockmate.planning.request import PlanRequest
from tests.module.steps import (
    assert_fits_and_trains_exactly,
    assert_same_walk,
    assert_trains_exactly,
    following,
    keep_every_other,
    keep_nothing,
    measured_for,
    peak_of_step,
    rockmate_from,
    squares,
    walk_twice,
)


def network(**options):
    """Convolutions, each normalised; the last one's output is normalised in one dimension too."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16, **options),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16, **options),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.BatchNorm2d(8, **options),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 36, 32),
        nn.BatchNorm1d(32, **options),
    )


class ReadsItsData(nn.Module):
    """What reads a number of its data is recorded, below autograd, where normalisations return their statistics."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x if x.max() > -100.0 else -x)


def images():
    return torch.randn(8, 3, 24, 24) * 3 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "shape", [(64, 7), (16, 5, 9), (4, 12, 9, 11), (4, 64, 16, 16), (2, 3, 4, 5, 6)], ids=lambda shape: f"{len(shape)}d"
)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_statistics_give_the_output_of_training_again(shape, affine, dtype, last):
    x = torch.randn(shape, dtype=dtype) * 5 - 2
    if last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], dtype=dtype), torch.randn(shape[1], dtype=dtype)) if affine else (None, None)
    output, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    again = normalised(x, weight, bias, mean, inverse)
    assert torch.equal(again, output)
    assert again.stride() == output.stride()


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}], ids=["usual", "without weights", "not tracked"]
)
def test_training_is_exact(options, plan_of):
    torch.manual_seed(0)
    model = network(**options)
    costs = measured_for(model, images())
    module = following(costs, model, plan_of(costs))
    assert "step.unpack(" in module.code
    assert_trains_exactly(module, [images() for _ in range(3)])


def test_recorded_normalisations_are_repeated_from_statistics_too():
    torch.manual_seed(0)
    model = ReadsItsData(network())
    costs = measured_for(model, images())
    assert costs.graphs.B_graph.tracer == "record"
    module = following(costs, model, keep_nothing(costs))
    assert module.code.count("step.unpack(") >= 3
    assert_trains_exactly(module, [images() for _ in range(3)])


class Lowered(nn.Module):
    """Normalises in bfloat16, with running statistics in float32."""

    def __init__(self, norm):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(copy.deepcopy(norm) for _ in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x).to(torch.bfloat16))).float() + x
        return x


@pytest.mark.parametrize("around", [lambda layers: layers, ReadsItsData], ids=["traced", "recorded"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_statistics_of_a_wider_type_than_the_input_are_saved_as_they_were(affine, tracked, around):
    torch.manual_seed(0)
    model = around(Lowered(nn.BatchNorm2d(3, affine=affine, track_running_stats=tracked)))
    costs = measured_for(model, images())
    # Without parameters of that type too, leaving the statistics out would change the type of what is saved.
    once = {node.name for node in costs.graphs.S_graph if "module's state" in node.keep_reason}
    assert len([name for name in once if "batch_norm" in name]) == (3 if tracked and not affine else 0)
    assert_trains_exactly(following(costs, model, keep_nothing(costs)), [images() for _ in range(2)])


class ReturnsStatistics(nn.Module):
    """Hands on what the operation returns beside its output."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))

    def forward(self, x):
        found = []
        for layer in self.layers:
            x, mean, inverse = torch.native_batch_norm(layer(x), None, None, None, None, True, 0.1, 1e-5)
            found.append(mean / inverse)
        assert x.max() > -100.0
        return x.relu() + torch.stack(found).sum().detach()


def test_statistics_that_are_read_stay_values():
    torch.manual_seed(0)
    model = ReturnsStatistics()
    costs = measured_for(model, images())
    assert costs.graphs.B_graph.tracer == "record"
    assert not costs.graphs.K_graph.restorations
    assert_trains_exactly(following(costs, model, keep_nothing(costs)), [images() for _ in range(2)])


def test_channels_last_are_exact():
    torch.manual_seed(0)
    model = network()[:9].to(memory_format=torch.channels_last)
    x = images().contiguous(memory_format=torch.channels_last)
    costs = measured_for(model, x)
    module = following(costs, model, keep_nothing(costs))
    assert "step.unpack(" in module.code
    assert_trains_exactly(module, [x, -x])


class Transposed(nn.Module):
    """Normalises the last dimension, as models of time series do: what it reads lies in another order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x).transpose(1, 2)).transpose(1, 2)) + x
        return x


@pytest.mark.parametrize("start", ["as made", "drawn"])
def test_parameters_that_training_moves_stay_exact(start):
    torch.manual_seed(0)
    model, x = Transposed(), torch.randn(8, 12, 24)
    if start == "drawn":
        for norm in model.norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    costs = measured_for(model, x)
    assert_trains_exactly(following(costs, model, keep_nothing(costs)), [x, -x, 2 * x, x - 1])


def test_frozen_parts_are_exact():
    torch.manual_seed(0)
    model = network()
    model[1].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    model[0].requires_grad_(False)
    costs = measured_for(model, images())
    assert_trains_exactly(following(costs, model, keep_nothing(costs)), [images() for _ in range(2)])


def test_statistics_are_counted_from_the_forward_on(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(ColdClock, "times", lambda _, runs: [1e-3] * len(runs))  # less than any forward takes
    monkeypatch.setattr(recompute_cost, "_handling_ms", lambda _: 1e-4)
    costs = measured_for(network(), images())
    graph = costs.graphs.K_graph
    assert len(graph.restorations) >= 3
    for op in costs.problem.forward:
        if any(node.name == op.name for node in graph.restorations):
            assert op.replay_bytes == sum(
                item.size_bytes
                for item in costs.problem.data
                if item.kind == "phantom" and item.name.startswith(op.name + ".")
            )
            assert op.recompute_ms == pytest.approx(1.1e-3)
            assert op.recompute_ms < op.time_ms


def test_the_peak_is_as_simulated():
    torch.manual_seed(0)
    model = network()
    costs = measured_for(model, images())
    plan = normalise(costs.problem, keep_nothing(costs))
    simulated = simulate(costs.problem, schedule_of(costs.problem, plan)).peak_bytes
    found = peak_of_step(following(costs, model, plan), (images(),))
    assert abs(found - simulated) <= 16384  # the statistics themselves, and what scales by them


def test_a_graph_is_walked_twice():
    torch.manual_seed(0)
    model = network()
    costs = measured_for(model, images())
    assert_same_walk(following(costs, model, keep_nothing(costs)), walk_twice(images()))


def test_what_does_not_give_the_same_bits_is_run_again(monkeypatch):
    monkeypatch.setattr("rkgb.restore.batch_norm.normalised", lambda x, *_: x + 1)
    torch.manual_seed(0)
    model = network()
    costs = measured_for(model, images())
    assert not costs.graphs.K_graph.restorations
    module = following(costs, model, keep_nothing(costs))
    assert "step.unpack(" not in module.code
    assert_trains_exactly(module, [images()])


@pytest.mark.parametrize("tracer", ["jit", "record"])
def test_evaluation_and_mixed_types_are_left_alone(tracer):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8).eval())
    graphs = make_all_graphs(model, images(), tracer=tracer)
    assert len(graphs.K_graph.restorations) <= 1
    with torch.autocast("cpu"):
        mixed = make_all_graphs(model, images())
    assert not mixed.K_graph.restorations


def test_a_planned_module_stays_in_its_budget():
    # Not in a share of eager's peak: what convolutions take beside their tensors is the processor's own, and may bind.
    torch.manual_seed(0)
    model, x = network(), images()
    costs = measured_for(model, x)
    reachable_bytes = peak_and_time(costs.problem, normalise(costs.problem, keep_nothing(costs)))[0]
    module = rockmate_from(costs, model, PlanRequest(reachable_bytes, squares))
    assert module.plan.recomputations
    assert_fits_and_trains_exactly(module, x)
