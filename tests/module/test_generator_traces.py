"""How random generators of the user's own get into graphs: both tracers follow them, and some forwards are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rkgb import TraceError, make_all_graphs, make_sample
from rkgb.export.json_form import GraphFormatError, to_json
from rkgb.pipeline import exact_trace
from tests.models.tracing import step_difference
from tests.module.models import rows
from tests.module.noisy import OPERATIONS, assert_exact, noisy, seeded
from tests.module.steps import recomputing


@pytest.mark.parametrize("tracer", ["jit", "record"])
@pytest.mark.parametrize("draw", OPERATIONS.values(), ids=OPERATIONS)
def test_both_tracers_follow_the_generator(draw, tracer):
    generator = seeded()
    network = noisy(draw, generator)
    begin = generator.get_state()
    sample = make_sample(network, rows())
    graph = exact_trace(network, sample, tracer)[1]
    assert [own.name for own in graph.generators] == ["generator held"]
    assert step_difference(graph, network, sample, 7) is None
    assert torch.equal(generator.get_state(), begin)


@pytest.mark.parametrize("tracer", ["jit", "record", "auto"])
@pytest.mark.parametrize("way", ["made", "kept-anew", "seeded", "copied"])
def test_a_generator_that_forward_makes_or_puts_elsewhere_is_refused(way, tracer):
    """No run of a graph would do that: it would go on where the last step has ended."""

    def draw(m: Any, x: Tensor) -> Tensor:
        if way == "kept-anew":
            m.held = seeded()
        generator = {"made": seeded, "copied": lambda: copy.deepcopy(m.held)}.get(way, lambda: m.held)()
        if way == "seeded":
            generator.manual_seed(5)
        return x * torch.rand(x.shape, generator=generator)

    network = noisy(draw, seeded())
    held, begin = network.held, network.held.get_state()
    with pytest.raises(TraceError):
        exact_trace(network, make_sample(network, rows()), tracer)
    assert network.held is held
    assert torch.equal(held.get_state(), begin)


def test_a_generator_that_the_first_call_makes_is_refused_until_that_call():
    def draw(m: Any, x: Tensor) -> Tensor:
        m.held = m.held or seeded()
        return x * torch.rand(x.shape, generator=m.held)

    network = noisy(draw)
    with pytest.raises(TraceError, match=r"%rand_0 .* draws from a generator that must be made before the first call"):
        recomputing(network, rows())
    network(rows())
    assert_exact(network, lambda module: [module.held])


def test_graphs_with_a_generator_cannot_be_stored():
    for draw in (OPERATIONS["rand"], OPERATIONS["function-with-a-closure"]):
        graphs = make_all_graphs(noisy(draw, seeded()), rows())
        for graph in (graphs.B_graph, graphs.K_graph, graphs):
            with pytest.raises(GraphFormatError, match="random generator of the module's own has no form in JSON"):
                to_json(graph)


def test_blocks_that_differ_in_their_generators_are_measured_once():
    network = noisy(lambda m, x: x, None, 1)
    blocks = nn.Sequential(*(noisy(OPERATIONS["rand"], seeded(seed), 1) for seed in range(4)), network)
    classes = make_all_graphs(blocks, rows()).equivalent_classes
    assert max(map(len, classes)) >= 3
    assert_exact(blocks, lambda module: [module.get_submodule(str(index)).held for index in range(4)])
