"""The chain is cut wherever one differentiable value passes, into blocks that run one after another."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import SGraph, chain, cut, make_sample
from rkgb.ir.dgraph import leaf_tensors, run_nodes
from rkgb.replay.step_record import bitwise_equal
from rkgb.state.module_state import module_state_kept
from rockmate import zoo
from tests.graph.cases import CASES, program
from tests.graph.examined import examined
from tests.graph.programs import TINY, Program, linear, rows, simplified, zoo_graphs
from tests.graph.test_sgraph import with_guard

LAYERS = [2, 3, 6, 12]
# The cache is written by no block, but between them: a block alone computes other values of the same sizes.
RUN_ALONE = [*(f"zoo {name}" for name in TINY), *(name for name in CASES if name != "in_place-buffer_as_a_cache")]


def bodies(blocks):
    return [[node.ops[0].call.op_name for node in block.nodes] for block in blocks]


def cut_of(function, *sample, **parts):
    return cut(simplified(program(function, **parts), sample or rows()))


def crossing(graph: SGraph, place: int) -> set[str]:
    """Nodes before `place` that a gradient reaches or that depend on one, read from `place` on."""
    reached = set()
    for node in graph:
        if graph.requires_grad(node) or reached & set(node.deps):
            reached.add(node)
    index = {node: i for i, node in enumerate(graph)}
    return {node.name for node in reached if index[node] < place and any(index[user] >= place for user in node.users)}


# ---- where ---------------------------------------------------------------------------------------------


def test_a_chain_is_cut_after_every_node():
    blocks = cut_of(lambda m, x: m.layer(x).exp().tanh())
    assert bodies(blocks) == [["linear"], ["exp"], ["tanh"]]


def test_a_residual_branch_stays_in_one_block():
    blocks = cut_of(lambda m, x: (h := m.layer(x)) + h.exp().tanh())
    assert bodies(blocks) == [["linear"], ["exp", "tanh", "add"]]


def test_nested_residual_branches_stay_in_one_block():
    blocks = cut_of(lambda m, x: ((h := m.layer(x)) + ((g := h.exp()) + g.tanh()).sin()).cos())
    assert bodies(blocks) == [["linear"], ["exp", "tanh", "add", "sin", "add"], ["cos"]]


def test_a_value_without_gradient_may_be_read_from_any_block():
    """A mask made at the start does not hold the chain together."""
    blocks = cut_of(lambda m, x, k: ((m.layer(x) * (mask := k.exp())).tanh() * mask).sin(), rows(), rows())
    assert bodies(blocks) == [["linear", "exp"], ["mul"], ["tanh"], ["mul"], ["sin"]]
    assert blocks[3].inputs == ["tanh_0", "exp_0"]


def test_what_no_gradient_reaches_makes_no_block_of_its_own():
    blocks = cut_of(lambda m, x, k: m.layer(x) * k.exp().tanh().sin(), rows(), rows())
    assert bodies(blocks) == [["linear"], ["exp", "tanh", "sin", "mul"]]


def test_a_mask_for_several_blocks_goes_with_the_block_before_them():
    """So the first layer that reads it stays equal to the others."""
    blocks = cut_of(lambda m, x, k: (m.layer(x) * (mask := k.exp().tanh())).sin() * mask, rows(), rows())
    assert bodies(blocks) == [["linear", "exp", "tanh"], ["mul"], ["sin"], ["mul"]]


def test_parts_with_nothing_in_common_are_cut_apart():
    blocks = cut_of(lambda m, x: ((h := m.layer(x)).exp() + h, (g := m.layer(x * 2)).sin() + g))
    assert bodies(blocks) == [["linear"], ["exp", "add"], ["mul", "linear"], ["sin", "add"]]


def test_a_pinned_value_does_not_hold_its_range_together():
    graph = simplified(program(lambda m, x: (h := m.layer(x)).exp().tanh().sin().cos() * h), rows())
    blocks = cut(graph, graph.nodes[:1])
    assert bodies(blocks) == [["linear"], ["exp"], ["tanh"], ["sin"], ["cos"], ["mul"]]
    assert blocks[-1].inputs == ["cos_0", "linear_0"]
    assert blocks[0].outputs == ["linear_0"]


def test_what_depends_on_a_detached_value_stays_on_the_chain():
    """It must come after that value in the backward's blocks, though it has no backward itself."""
    blocks = cut_of(lambda m, x: ((h := m.layer(x)).exp() * h.detach().sin()).tanh())
    assert bodies(blocks) == [["linear"], ["exp", "sin", "mul"], ["tanh"]]


def test_a_long_skip_holds_its_range_together():
    blocks = cut_of(lambda m, x: (h := m.layer(x)).exp().tanh().sin().cos() * h)
    assert [len(body) for body in bodies(blocks)] == [1, 5]


def test_an_output_from_the_middle_does_not_prevent_a_cut():
    blocks = cut_of(lambda m, x: (h := m.layer(x).exp(), h.tanh().sin()))
    assert bodies(blocks) == [["linear"], ["exp"], ["tanh"], ["sin"]]


def test_a_module_without_gradient_is_one_block():
    blocks = cut(simplified(Program(lambda m, x: x.exp().tanh()), rows()))
    assert bodies(blocks) == [["exp", "tanh"]]


def test_a_module_without_operations_has_no_block():
    assert cut(simplified(nn.Identity(), rows())) == []


@pytest.mark.parametrize("name", TINY)
def test_one_differentiable_value_at_most_passes_from_block_to_block(name):
    graphs = zoo_graphs(name)
    place = 0
    for block in cut(graphs.S_graph)[:-1]:
        place += len(block.nodes)
        assert len(crossing(graphs.S_graph, place)) <= 1


@pytest.mark.parametrize("name", TINY)
def test_besides_pinned_values_one_at_most_passes_from_block_to_block(name):
    graphs = zoo_graphs(name)
    pinned = {node.name for node in chain(graphs.S_graph).skip_values}
    place = 0
    for block in graphs.blocks[:-1]:
        place += len(block.nodes)
        assert len(crossing(graphs.S_graph, place) - pinned) <= 1


# ---- what a block is -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_nodes_in_order(name):
    graphs = examined(name).graphs
    assert [node for block in graphs.blocks for node in block.nodes] == graphs.S_graph.nodes


@pytest.mark.parametrize("name", TINY)
def test_operations_of_a_block_are_in_traced_order(name):
    graphs = zoo_graphs(name)
    place = {op: index for index, op in enumerate(graphs.D_graph)}
    for block in graphs.blocks:
        assert [place[op] for op in block.ops] == sorted(place[op] for op in block.ops)
        assert {op for node in block.nodes for op in node.ops} <= set(block.ops)


def test_views_of_leaves_are_repeated_in_every_block_that_uses_them():
    module = program(lambda m, x: (m.layer(x) * (w := m.w.view(4))).exp() * w, w=nn.Parameter(rows(4, 1)))
    blocks = cut(simplified(module, rows()))
    assert [[op.call.op_name for op in block.ops] for block in blocks] == [
        ["linear"],
        ["view", "mul"],
        ["exp"],
        ["view", "mul"],
    ]
    assert blocks[1].leaves == ["w"]
    assert blocks[3].leaves == ["w"]


def test_inputs_and_outputs_are_what_other_blocks_and_the_user_see():
    graph = simplified(program(lambda m, x: (h := m.layer(x), m.layer(h.exp()))), rows())
    blocks = cut(graph)
    assert [block.inputs for block in blocks] == [[], ["linear_0"], ["exp_0"]]
    assert [block.outputs for block in blocks] == [["linear_0"], ["exp_0"], ["linear_1"]]
    assert [block.leaves for block in blocks] == [
        ["input_0", "layer_weight", "layer_bias"],
        [],
        ["layer_weight", "layer_bias"],
    ]


def test_views_made_in_one_block_are_inputs_of_another():
    blocks = cut_of(lambda m, x: F.linear(m.layer(x).view(6, 2).t(), m.w), w=nn.Parameter(rows(3, 6)))
    assert blocks[0].outputs == ["t_0"]
    assert blocks[1].inputs == ["t_0"]


@pytest.mark.parametrize("name", RUN_ALONE)
def test_blocks_run_one_after_another_give_the_output_of_the_graph(name):
    """Each from what its inputs and leaves name alone; random streams are set alike before each operation."""
    if name.startswith("zoo "):
        entry, graphs = zoo.get(name.removeprefix("zoo ")), zoo_graphs(name.removeprefix("zoo "))
        module, sample = entry.model, make_sample(entry.model, entry.sample)
    else:
        case = examined(name)
        module, sample, graphs = case.module, make_sample(case.module, case.sample), case.graphs
    graph = graphs.D_graph
    with module_state_kept(module), torch.no_grad():
        streams = {}
        leaves = leaf_tensors(graph.leaves, module, sample.tensors)
        expected = dict(leaves)
        for op in graph:
            streams[op] = torch.get_rng_state()
            run_nodes([op], expected, op.output_names)
        expected = {output: expected[output].clone() for output in graph.output_names}
    with module_state_kept(module), torch.no_grad():
        passed = {}
        for block in graphs.blocks:
            values = {value: leaves[value] for value in block.leaves} | {value: passed[value] for value in block.inputs}
            for op in block.ops:
                torch.set_rng_state(streams[op])
                run_nodes([op], values, op.output_names)
            passed |= {value: values[value] for value in block.outputs}
        for output in graph.output_names:
            owner_is_leaf = graph.owner(output) in graph.leaves
            assert owner_is_leaf or bitwise_equal(passed[output], expected[output]), output


def test_an_input_is_shared_where_its_gradient_exists_before_the_block_s_backward():
    """A later block, or the loss, has begun it; the last one to read it begins it itself."""
    module = program(lambda m, x, k: ((h := m.layer(x)).exp() * k.exp(), h.sin() * k.exp(), (g := h.cos()), g.tanh()))
    blocks = cut(simplified(module, (rows(), rows())))
    shared = {block.nodes[-1].name: block.shared_inputs for block in blocks}
    assert shared == {"linear_0": [], "mul_0": ["linear_0"], "mul_1": ["linear_0"], "cos_0": [], "tanh_0": ["cos_0"]}


def test_what_only_a_guard_reads_is_no_output():
    graph = with_guard(program(lambda m, x: m.layer(x).exp().tanh().sin()), rows(), "exp_0")
    blocks = cut(graph)
    assert [op.call.op_name for op in graph.effects] == ["guard"]
    assert all("guard" not in body for body in bodies(blocks))
    assert all(not op.is_guard for block in blocks for op in block.ops)
    assert [block.outputs for block in blocks] == [["linear_0"], ["exp_0"], ["tanh_0"], ["sin_0"]]


# ---- real models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS)
def test_gpt2_has_two_blocks_a_layer_or_more(layers):
    config = dataclasses.replace(zoo.GPT2Config.tiny(), layers=layers)
    blocks = cut(simplified(zoo.GPT2(config), torch.randint(config.vocabulary, (2, 8))))
    assert 2 * layers <= len(blocks) <= 2 * layers + 6


def test_resnet50_has_a_block_for_each_of_its_own():
    blocks = cut(simplified(zoo.resnet50(classes=10, width=8), torch.randn(2, 3, 64, 64)))
    assert len(blocks) >= 17


def test_a_unet_is_cut_above_its_skips_only():
    """The skips hold the middle together; what comes before and after is cut."""
    graphs = zoo_graphs("unet-tiny")
    sizes = [len(block.nodes) for block in graphs.blocks]
    assert len(sizes) >= 5
    assert max(sizes) < len(graphs.S_graph.nodes)


def test_a_transformer_holds_its_decoder_together():
    """Every layer of the decoder reads the encoder's output, which is differentiable."""
    graphs = zoo_graphs("transformer-tiny")
    assert len(graphs.blocks) >= 4


def test_linear_layers_one_after_another_are_one_block_each():
    blocks = cut(simplified(nn.Sequential(*(linear() for _ in range(5))), rows()))
    assert len(blocks) == 5
