"""Whatever small module is drawn: it is traced exactly, and every graph says what eager PyTorch does."""

import pytest

from rkgb import make_sample
from rkgb.replay.replay import replay_check
from tests.graph.oracles import not_filled_again, saved_in_one_graph, saved_of, untimed
from tests.graph.programs import graphs_of, measured_alone, measured_together, state_of, traced, with_gradients
from tests.graph.random_graphs import random_graph

SEEDS = [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 325))]
LONG_SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_module_is_traced_exactly_and_every_graph_agrees_with_eager(seed):
    module, sample = random_graph(seed)
    with_gradients(module)
    before = state_of(module)
    graphs = graphs_of(module, sample)
    assert state_of(module) == before
    made = make_sample(module, sample)
    replay_check(graphs.D_graph, module, made)
    assert saved_of(graphs) == saved_in_one_graph(graphs, module, made)
    assert not_filled_again(graphs, module, made) == []
    assert [node for block in graphs.blocks for node in block.nodes] == graphs.S_graph.nodes


@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_a_long_random_module_is_measured_alike_together_and_alone(seed):
    module, sample = random_graph(1000 + seed, length=25)
    graphs = graphs_of(module, sample)
    together, alone = measured_together(graphs, module, sample), measured_alone(graphs, module, sample)
    assert [untimed(profile) for profile in together] == [untimed(profile) for profile in alone]


@pytest.mark.parametrize("seed", range(5))
def test_the_trace_before_anything_is_taken_apart_is_exact_too(seed):
    module, sample = random_graph(2000 + seed)
    replay_check(traced(module, sample), module, make_sample(module, sample))
