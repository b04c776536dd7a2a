"""Between trace and measuring, work grows with the graph and hardly faster: counted in lines run, not in seconds."""

import dataclasses
import math
import sys
import time
from functools import cache

import pytest
import torch

from rkgb import DGraph, b_to_d, cut, d_to_s, equivalent_classes, make_sample, trace
from rkgb.passes.cut import BlockMaker, chain
from rkgb.passes.partition import partition
from rkgb.replay.replay import replay_check
from rockmate import zoo

FEW, MANY = 4, 24  # layers; each makes about 20 S nodes
DEEP = 132  # layers for 2,500 S nodes


def gpt2(layers):
    config = dataclasses.replace(zoo.GPT2Config.tiny(), layers=layers)
    module = zoo.GPT2(config)
    return module, make_sample(module, torch.randint(config.vocabulary, (2, 8)))


@cache
def basic_graph(layers):
    """Module, sample and B graph of a GPT-2."""
    module, sample = gpt2(layers)
    return module, sample, trace(module, sample)


@cache
def dataflow(layers) -> DGraph:
    module, sample, graph = basic_graph(layers)
    return b_to_d(graph, module, sample)


@cache
def simplified(layers):
    return d_to_s(dataflow(layers))


def one_block_cut(layers):
    """A partition of the whole as if nothing could be cut."""
    graph = simplified(layers)
    return partition(graph, BlockMaker(graph).block(graph.nodes))


class Skips(torch.nn.Module):
    """Down and up again with a skip for every ten operations, one inside another."""

    def __init__(self, skips):
        super().__init__()
        self.skips = skips
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        kept = []
        h = self.layer(x)
        for _ in range(self.skips):
            for _ in range(5):
                h = h.exp()
            kept.append(h)
        for _ in range(self.skips):
            for _ in range(5):
                h = h.sin()
            h = h + kept.pop()
        return h


@cache
def simplified_skips(layers):
    """Enough skips that they are tried in doubling numbers, for few layers as for many."""
    module = Skips(8 * layers)
    sample = make_sample(module, torch.randn(2, 3))
    return d_to_s(b_to_d(trace(module, sample), module, sample))


def inspected(layers):
    module, sample, graph = basic_graph(layers)
    return b_to_d(graph, module, sample)


STAGES = {
    "b_to_d": (basic_graph, inspected),
    "d_to_s": (dataflow, lambda layers: d_to_s(dataflow(layers))),
    "cut": (simplified, lambda layers: cut(simplified(layers))),
    "chain": (simplified, lambda layers: chain(simplified(layers))),
    "chain with pins": (simplified_skips, lambda layers: chain(simplified_skips(layers))),
    "partition": (simplified, one_block_cut),
    "equivalent_classes": (
        simplified,
        lambda layers: equivalent_classes(dataflow(layers), cut(simplified(layers))),
    ),
}


def lines_run(function, *arguments) -> int:
    """How many lines of Python run in a call, each turn of a loop counted."""
    count = 0

    def tell(frame, event, argument):
        nonlocal count
        count += event == "line"
        return tell

    previous = sys.gettrace()
    sys.settrace(tell)
    try:
        function(*arguments)
    finally:
        sys.settrace(previous)
    return count


@pytest.mark.parametrize("stage", STAGES)
def test_work_grows_at_most_as_n_log_n(stage):
    prepare, run = STAGES[stage]
    sizes = [len(simplified(layers).nodes) for layers in (FEW, MANY)]
    for layers in (FEW, MANY):
        prepare(layers)
    few, many = (lines_run(run, layers) for layers in (FEW, MANY))
    allowed = sizes[1] * math.log(sizes[1]) / (sizes[0] * math.log(sizes[0]))
    assert many / few <= allowed


@pytest.mark.slow
def test_the_graph_of_a_hundred_layers_is_built_in_a_minute():
    """2,500 S nodes, without measuring. The bar leaves room for a busy machine; benchmarks/graphs.py takes times."""
    started = time.perf_counter()
    module, sample = gpt2(DEEP)
    dgraph = b_to_d(trace(module, sample), module, sample)
    replay_check(dgraph, module, sample)
    graph = d_to_s(dgraph)
    blocks = cut(graph)
    assert len(graph.nodes) >= 2_500
    assert len(equivalent_classes(dgraph, blocks)) <= 9
    assert time.perf_counter() - started <= 60
