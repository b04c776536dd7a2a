"""Blocks that share an input, as a skip value or not, are measured as the whole is: waiting gradients count once."""

import pytest
import torch
from torch import nn

from rk_solvers import peak_and_time
from rkgb import AllGraphs, cut, make_sample, s_to_k
from rkgb.passes.cut import chain
from rkgb.profile.measure import measure_blocks
from rkgb.tree import map_leaves
from rockmate.memory.peak import PeakMemory
from rockmate.planning.costs import build_problem, measure_loss
from tests.graph.programs import Program, simplified, timed_once


def measured(module, sample, skipped):
    """The K graph, cut with as many skip values as there can be, or with none."""
    graph = simplified(module, sample)
    blocks = cut(graph, chain(graph, max_nodes=2).skip_values if skipped else ())
    with timed_once():
        profiles = measure_blocks(graph, blocks, module, make_sample(module, sample))
    return graph, blocks, s_to_k(graph, blocks, profiles)


def as_leaf(tensor):
    return tensor.detach().requires_grad_(tensor.requires_grad)


def heads(m, x):
    h = m.layer(x).exp()
    return [layer(h).tanh().sin().sum() for layer in m.heads]


def skip(m, x):
    h = m.layer(x)
    return torch.cat([h.exp().tanh().sin().cos(), h], 1)


MODULES = {
    "heads": lambda: Program(heads, layer=nn.Linear(64, 512), heads=nn.ModuleList(nn.Linear(512, 512) for _ in "four")),
    "skip": lambda: Program(skip, layer=nn.Linear(64, 512)),
}


@pytest.mark.parametrize("skipped", [False, True], ids=["as it is", "skipped"])
@pytest.mark.parametrize("name", MODULES)
def test_the_peak_of_eager_is_predicted(name, skipped):
    module, sample = MODULES[name](), 0.1 * torch.randn(256, 64)

    def loss(output):
        return sum(output) if isinstance(output, list) else output.square().sum()

    graph, blocks, kgraph = measured(module, sample, skipped)
    graphs = AllGraphs(None, graph.dgraph, graph, blocks, [], kgraph, [])
    problem, _ = build_problem(graphs, measure_loss(loss, map_leaves(as_leaf, module(sample))))
    predicted, _ = peak_and_time(problem, problem.no_recompute)
    with PeakMemory(torch.device("cpu")) as memory:
        loss(module(sample)).backward()
    assert predicted == pytest.approx(memory.peak_bytes, rel=0.01)
