"""Indices of max pooling kept in a smaller form for the backward: exact, counted, and worth it."""

import pytest
import torch
from torch import nn

from rk_solvers import normalise, schedule_of
from rockmate import Rockmate
from rockmate.planning.simulator import simulate
from tests.module.steps import (
    assert_fits_and_trains_exactly,
    assert_same_walk,
    assert_trains_exactly,
    following,
    keep_every_other,
    keep_nothing,
    measured_for,
    peak_of_step,
    squares,
    walk_twice,
)

STRIDED = {"kernel_size": 3, "stride": 2, "padding": 1}
DENSE = {"kernel_size": 3, "stride": 1, "padding": 1}


class Pools(nn.Module):
    """Pooling in a row and beside a convolution, as in an Inception block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.MaxPool2d(**STRIDED)
        self.across = nn.MaxPool2d(**DENSE)
        self.beside, self.after = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = self.down(torch.relu(self.stem(x)))
        y = torch.cat([torch.relu(self.after(self.across(y))), torch.relu(self.beside(y))], 1)
        return self.last(self.across(y))


def sample():
    return torch.randn(4, 3, 64, 64)


@pytest.fixture
def measured():
    torch.manual_seed(0)
    model = Pools()
    return model, measured_for(model, sample())


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
def test_training_is_exact(measured, plan_of):
    model, costs = measured
    assert len(costs.graphs.K_graph.forms) == 3
    module = following(costs, model, plan_of(costs))
    assert "step.pack(" in module.code
    assert "step.unpack(" in module.code
    assert_trains_exactly(module, [sample() for _ in range(3)])


def test_nothing_is_packed_where_nothing_is_recomputed(measured):
    model, costs = measured
    module = following(costs, model, costs.problem.no_recompute)
    assert "step.pack(" not in module.code
    assert_trains_exactly(module, [sample()])


def only(costs, chosen):
    """The plan that has just these computations again, each right before the first backward that needs its data."""
    problem = costs.problem
    place = {op.name: index for index, op in enumerate(problem.forward)}
    plan = [list[int]() for _ in problem.backward]
    for name in chosen:
        outputs = set(problem.forward[place[name]].outputs)
        first = next(stage for stage, op in enumerate(problem.backward) if outputs.intersection(op.needs))
        plan[first].append(place[name])
    return normalise(problem, tuple(tuple(sorted(group)) for group in plan))


def test_indices_alone_are_had_again_without_their_pooling(measured):
    model, costs = measured
    names = [node.name for node in costs.graphs.K_graph.forms]
    module = following(costs, model, only(costs, names))
    recomputed = module.code.partition("def recompute_0")[2]
    assert recomputed.count("step.unpack(") == len(names)
    assert "max_pool" not in "".join(line for line in recomputed.splitlines() if "aten." in line)
    assert_trains_exactly(module, [sample(), sample()])


@pytest.mark.parametrize("plan_of", [keep_nothing, keep_every_other], ids=["nothing", "every other"])
def test_the_peak_is_as_simulated(measured, plan_of):
    model, costs = measured
    plan = normalise(costs.problem, plan_of(costs))
    simulated = simulate(costs.problem, schedule_of(costs.problem, plan)).peak_bytes
    assert peak_of_step(following(costs, model, plan), (sample(),)) <= simulated


def test_a_graph_is_walked_twice(measured):
    model, costs = measured
    assert_same_walk(following(costs, model, keep_nothing(costs)), walk_twice(sample()))


def volumes():
    return nn.Sequential(nn.Conv3d(2, 4, 1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 1), nn.MaxPool3d(2, 1))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: Pools().double(), lambda: sample().double()),
        (lambda: Pools().bfloat16(), lambda: sample().bfloat16()),
        (
            lambda: Pools().to(memory_format=torch.channels_last),
            lambda: sample().contiguous(memory_format=torch.channels_last),
        ),
        (volumes, lambda: torch.randn(3, 2, 32, 32, 32)),
    ],
    ids=["float64", "bfloat16", "channels last", "volumes"],
)
def test_other_types_and_layouts_are_exact(model, x):
    torch.manual_seed(0)
    module, batch = model(), x()
    costs = measured_for(module, batch)
    planned = following(costs, module, keep_nothing(costs))
    assert "step.unpack(" in planned.code
    assert_trains_exactly(planned, [batch, -batch])


def test_indices_that_are_used_and_returned_are_eagers():
    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.pools = Pools()

        def forward(self, x):
            y = self.pools(x)
            maxima, indices = nn.functional.max_pool2d_with_indices(torch.tanh(y), 2, 1)
            return nn.functional.max_unpool2d(maxima, indices, 2, 1)

    torch.manual_seed(0)
    model = Back()
    costs = measured_for(model, sample())
    assert_trains_exactly(following(costs, model, keep_nothing(costs)), [sample(), sample()])


def test_a_planned_module_stays_in_its_budget():
    torch.manual_seed(0)
    model = Pools()
    module = Rockmate(model, sample(), 0.6, loss=squares)
    assert "step.unpack(" in module.code
    assert_fits_and_trains_exactly(module, sample())
