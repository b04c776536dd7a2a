"""Large blocks become trees of small sub-graphs, cut where the fewest bytes pass."""

import itertools

import pytest
import torch

from rkgb import GraphError, cut, equivalent_classes, make_sample
from rkgb.ir.dgraph import leaf_tensors, run_nodes
from rkgb.passes.cut import BlockMaker
from rkgb.passes.partition import MAX_NODES, partition
from rkgb.replay.step_record import bitwise_equal
from rkgb.state.module_state import module_state_kept
from rockmate import zoo
from tests.graph.cases import program
from tests.graph.programs import TINY, rows, simplified, zoo_graphs
from tests.graph.random_graphs import random_graph

WIDEST = [2, 3, 5, 11, 40]


def whole(graph):
    """The block of all nodes, as if nothing could be cut."""
    return BlockMaker(graph).block(graph.nodes)


def random_s_graph(seed, length=24):
    return simplified(*random_graph(seed, length))


def bytes_between(graph, nodes, ends):
    """Bytes of what nodes before each of `ends` fill and nodes after it read, added up."""
    total = 0
    for end in ends:
        before, after = set(nodes[:end]), set(nodes[end:])
        for node in before:
            if any(user in after for user in node.users):
                total += sum(graph.dgraph.values[owner].storage_bytes for owner in node.data)
    return total


def inner_ends(parts):
    """Places between neighbouring parts."""
    return list(itertools.accumulate(len(part.block.nodes) for part in parts))[:-1]


def test_a_small_block_is_its_own_leaf():
    graph = zoo_graphs("gpt2-tiny").S_graph
    for block in cut(graph):
        tree = partition(graph, block)
        assert tree.block is block
        assert tree.leaves == [tree]
        assert tree.depth == 0


@pytest.mark.parametrize("max_nodes", WIDEST)
@pytest.mark.parametrize("name", TINY)
@pytest.mark.ci
def test_leaves_are_small_parts_few_and_every_node_is_in_one_leaf(name, max_nodes):
    graph = zoo_graphs(name).S_graph
    tree = partition(graph, whole(graph), max_nodes)
    tree.verify()
    assert [node for leaf in tree.leaves for node in leaf.block.nodes] == graph.nodes
    assert all(len(leaf.block.nodes) <= max_nodes for leaf in tree.leaves)
    assert all(len(part.children) <= max_nodes for part in tree)
    assert all(len(part.children) != 1 for part in tree)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_nodes", [2, 3, 7])
def test_random_graphs_are_partitioned_too(seed, max_nodes):
    graph = random_s_graph(seed)
    tree = partition(graph, whole(graph), max_nodes)
    tree.verify()
    assert [node for leaf in tree.leaves for node in leaf.block.nodes] == graph.nodes


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_nodes", [3, 4])
@pytest.mark.slow
def test_no_other_ranges_let_fewer_bytes_pass(seed, max_nodes):
    graph = random_s_graph(seed, length=9)
    count = len(graph.nodes)
    tree = partition(graph, whole(graph), max_nodes)
    possible = [
        bytes_between(graph, graph.nodes, ends)
        for parts in range(count)
        for ends in itertools.combinations(range(1, count), parts)
        if all(stop - start <= max_nodes for start, stop in itertools.pairwise((0, *ends, count)))
    ]
    assert bytes_between(graph, graph.nodes, inner_ends(tree.leaves)) == min(possible)


def test_a_long_chain_of_narrow_places_is_cut_at_them():
    """Wide between, narrow at the layers."""

    def forward(m, x):
        h = m.layer(x)
        for _ in range(4):
            wide = torch.cat([h] * 50, 1).exp().sin()
            h = wide.tanh()[:, :4] + 1
        return h

    graph = simplified(program(forward), rows())
    tree = partition(graph, whole(graph), 6)
    assert all(leaf.block.nodes[-1].ops[0].call.op_name in ("add", "linear") for leaf in tree.leaves)


def test_equal_layers_give_equal_parts():
    def forward(m, x):
        h = first = m.layer(x)
        for _ in range(8):
            h = (h.exp().tanh().sin() * h + first).cos()
        return h

    graph = simplified(program(forward), rows())
    leaves = partition(graph, whole(graph), 6).leaves
    classes = equivalent_classes(graph.dgraph, [leaf.block for leaf in leaves])
    assert max(len(members) for members in classes) >= 6


def test_partitions_do_not_depend_on_the_run():
    def shape(tree):
        return [[node.name for node in part.block.nodes] for part in tree]

    graphs = [random_s_graph(3) for _ in range(2)]
    assert shape(partition(graphs[0], whole(graphs[0]), 4)) == shape(partition(graphs[1], whole(graphs[1]), 4))


@pytest.mark.parametrize("name", ["unet-tiny", "transformer-tiny"])
@pytest.mark.parametrize("max_nodes", [3, MAX_NODES])
def test_leaves_run_one_after_another_from_what_they_are_handed(name, max_nodes):
    entry, graph = zoo.get(name), zoo_graphs(name).S_graph
    dgraph, streams = graph.dgraph, {}
    sample = make_sample(entry.model, entry.sample)
    leaves = leaf_tensors(dgraph.leaves, entry.model, sample.tensors)
    with module_state_kept(entry.model), torch.no_grad():
        expected = dict(leaves)
        for op in dgraph:
            streams[op] = torch.get_rng_state()
            run_nodes([op], expected, op.output_names)
    with module_state_kept(entry.model), torch.no_grad():
        passed = {}
        for leaf in partition(graph, whole(graph), max_nodes).leaves:
            block = leaf.block
            values = {name: leaves[name] for name in block.leaves} | {name: passed[name] for name in block.inputs}
            for op in block.ops:
                torch.set_rng_state(streams[op])
                run_nodes([op], values, op.output_names)
            passed |= {name: values[name] for name in block.outputs}
    assert all(bitwise_equal(passed[output], expected[output]) for output in dgraph.output_names)


def test_parts_of_less_than_two_nodes_are_refused():
    graph = simplified(program(lambda m, x: m.layer(x).exp().tanh()), rows())
    with pytest.raises(ValueError, match="max_nodes is 1; parts of less than 2 make no tree"):
        partition(graph, whole(graph), 1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda tree: tree.children.reverse(),
            "the parts of the sub-graph that begins with linear_0 are not its nodes",
        ),
        (lambda tree: tree.children.pop(), "the parts of the sub-graph that begins with linear_0 are not its nodes"),
        (
            lambda tree: tree.children[0].block.outputs.clear(),
            "a part reads exp_0, which neither its parent nor a part",
        ),
        (lambda tree: tree.children[-1].block.outputs.clear(), "has no part that hands on sin_0"),
    ],
    ids=["order", "missing", "input", "output"],
)
def test_broken_trees_are_refused(spoil, message):
    graph = simplified(program(lambda m, x: m.layer(x).exp().tanh().sin()), rows())
    tree = partition(graph, whole(graph), 2)
    tree.verify()
    spoil(tree)
    with pytest.raises(GraphError, match=message):
        tree.verify()
