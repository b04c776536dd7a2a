"""Regions of graphs: what may be in one, and that a graph with regions does what it did without."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkgb import DGraph, Sample, make_sample
from rkgb.pipeline import exact_trace
from rkgb.replay.replay import run_graph, seed_streams
from rkgb.replay.step_record import bitwise_equal
from rkgb.state.module_state import for_planning, module_devices, module_state_kept, random_states
from rkgb.tree import leaves
from rockmate import zoo
from rockmate.regions.code import call_of
from rockmate.regions.find import Region, regions_of
from rockmate.regions.function import normalisations
from rockmate.regions.join import joined
from tests.module.models import Layers, Normalised, built, rows
from tests.module.random_modules import RandomModule
from tests.module.random_networks import random_case

pytestmark = pytest.mark.usefixtures("fresh")


def traced(module: nn.Module, sample: object) -> tuple[DGraph, Sample]:
    arguments = make_sample(module, sample)
    with for_planning(module):
        return exact_trace(module, arguments)[1], arguments


def graph_of(function, *sample: Tensor) -> DGraph:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, *given: Tensor) -> Tensor:
            return function(self.weight, *given)

    return traced(Module(), sample)[0]


def names_of(regions: list[Region]) -> list[list[str]]:
    return [[op.call.op_name for op in region.ops] for region in regions]


def step(graph: DGraph, module: nn.Module, sample: Sample) -> dict[str, Tensor]:
    """All that a step by the graph leaves behind."""
    devices = module_devices(module, sample.tensors)
    with module_state_kept(module, devices, graph.generators), torch.enable_grad():
        seed_streams(3, module, graph.generators)
        given = sample.copy()
        outputs = leaves(run_graph(graph, module, given))
        found = {f"output {place}": one.detach().clone() for place, one in enumerate(outputs)}
        roots = [one for one in outputs if one.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(one) + place for place, one in enumerate(roots)])
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        for place, one in enumerate(given.tensors):
            if one.grad is not None:
                found[f"gradient of input {place}"] = one.grad
        found |= {f"buffer {name}": one.clone() for name, one in module.named_buffers()}
        found |= {f"stream {place}": state.clone() for place, (_, state) in enumerate(random_states(devices))}
    for one in sample.tensors:
        one.grad = None
    return found


def assert_same_step_with_regions(module: nn.Module, sample: object) -> int:
    """How many regions there are; their operations run one by one."""
    graph, arguments = traced(module, sample)
    regions = regions_of(graph)
    other = joined(graph, [(region, call_of(graph, region)) for region in regions])
    statistics = any(normalisations(region) for region in regions)
    with for_planning(module):
        expected, found = (step(one, module, arguments) for one in (graph, other))
    assert expected.keys() == found.keys()
    for name, one in expected.items():
        if statistics and name.startswith("buffer"):  # written from the batch's in another order of rounding
            torch.testing.assert_close(found[name], one)
        elif name.startswith("gradient"):  # of several readers the parts come in another order
            away = float((found[name].double() - one.double()).norm())
            assert away <= (1e-5 if one.dtype is torch.float32 else 2e-2) * float(one.double().norm()), name
        else:
            assert bitwise_equal(found[name], one), name
    return len(regions)


@pytest.mark.parametrize("name", sorted(name for name in zoo.names() if "tiny" in name))
def test_models_do_with_regions_what_they_did(name):
    entry = zoo.get(name)
    found = assert_same_step_with_regions(entry.model, entry.sample)
    assert (found > 0) == (name != "vgg-tiny")  # which has one operation between two products


@pytest.mark.parametrize("seed", range(30))
def test_random_modules_do_with_regions_what_they_did(seed):
    module = RandomModule(seed)
    assert_same_step_with_regions(module.train(), rows(seed)[:64])


@pytest.mark.parametrize("seed", range(30))
def test_random_networks_do_with_regions_what_they_did(seed):
    case = random_case(seed)
    with case.casting():
        assert_same_step_with_regions(case.network, case.batch(0))


def test_products_and_draws_are_in_none(fresh):
    module = built(Layers)
    graph, _ = traced(module, rows())
    regions = regions_of(graph)
    inside = {op.call.op_name for region in regions for op in region.ops}
    assert {"gelu", "add", "mul"} >= inside
    assert not any(op.is_random for region in regions for op in region.ops)


def test_no_way_leads_out_of_a_region_and_back(fresh):
    def function(weight, x):
        before = torch.tanh(x) * 2
        return torch.sin(before + (before @ weight)) * 3

    found = names_of(regions_of(graph_of(function, torch.randn(4, 8))))
    assert found == [["tanh", "mul"], ["add", "sin", "mul"]]


def test_a_view_is_inside_or_outside_and_no_border(fresh):
    def function(weight, x):
        inner = (torch.tanh(x @ weight) * 2).view(2, 2, 8)
        outer = (torch.sin(inner) + 1).transpose(0, 1)
        return outer @ weight

    graph = graph_of(function, torch.randn(4, 8))
    (region,) = regions_of(graph)
    assert [op.call.op_name for op in region.ops][:5] == ["tanh", "mul", "view", "sin", "add"]
    assert all(graph.owner(name) == name for name in region.outputs)


def test_what_is_written_afterwards_is_read_by_none(fresh):
    def function(weight, x):
        made = x @ weight
        read = (made + 1) * 2
        made.mul_(2)
        return read @ weight + made @ weight

    assert names_of(regions_of(graph_of(function, torch.randn(4, 8)))) == []


def test_what_a_region_makes_is_written_by_itself_alone(fresh):
    def function(weight, x):
        made = torch.sin(x @ weight) * 2
        made[0] = 0
        return made @ weight

    graph = graph_of(function, torch.randn(4, 8))
    for region in regions_of(graph):
        assert not {op.call.op_name for op in region.ops} & {"fill_", "copy_"}


def test_single_operations_are_left_alone(fresh):
    assert regions_of(graph_of(lambda weight, x: F.gelu(x @ weight) @ weight, torch.randn(4, 8))) == []


def test_operations_that_are_set_apart_are_in_none(fresh):
    graph = graph_of(lambda weight, x: torch.sin(torch.tanh(x @ weight) * 2) @ weight, torch.randn(4, 8))
    (region,) = regions_of(graph)
    middle = region.ops[1].name
    assert not any(op.name == middle for one in regions_of(graph, {middle}) for op in one.ops)


def test_equal_regions_are_of_one_class(fresh):
    graph, _ = traced(built(Normalised), torch.randn(2, 3, 8, 8))
    regions = regions_of(graph)
    calls = [call_of(graph, region) for region in regions]
    assert len(regions) > len(set(calls)) or len(regions) == 1
    graph, _ = traced(built(Layers, 6), rows())
    regions = regions_of(graph)
    assert len({call_of(graph, region) for region in regions}) == 2 < len(regions)  # the last one ends otherwise


def test_regions_in_a_chain_of_thousands_are_found_in_time(fresh):
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            chance = random.Random(0)
            for _ in range(300):
                x = torch.tanh(x * 2) @ self.weight if chance.random() < 0.5 else torch.sin(x) + 1
            return x

    assert len(regions_of(traced(Chain(), torch.randn(2, 4))[0])) > 50
