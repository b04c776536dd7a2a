"""A chain with skip values and a prologue has smaller blocks, and runs them to the same values."""

import dataclasses

import pytest
import torch
from torch import nn

from rkgb import GraphError, b_to_d, cut, d_to_s, equivalent_classes, make_sample, trace
from rkgb.ir.dgraph import leaf_tensors, run_nodes
from rkgb.passes.cut import chain
from rkgb.passes.expand import expand_composites
from rkgb.replay.step_record import bitwise_equal
from rkgb.state.module_state import module_state_kept
from rockmate import zoo
from tests.graph.cases import CASES, program
from tests.graph.examined import examined
from tests.graph.programs import TINY, Program, rows, simplified, zoo_graphs
from tests.graph.random_graphs import random_graph
from tests.graph.test_cut import RUN_ALONE, bodies


def s_graph(name):
    return zoo_graphs(name).S_graph if name in TINY else examined(name).graphs.S_graph


def sizes(blocks):
    return [len(block.nodes) for block in blocks]


def skips(depth, pairs=2):
    """Down and up again, each level of the way up reading the one of the way down."""

    def forward(m, x):
        kept, h = [], m.layer(x)
        for _ in range(depth):
            for _ in range(pairs):
                h = h.exp().tanh()
            kept.append(h)
            h = h * 2
        for _ in range(depth):
            h = h + kept.pop()
            for _ in range(pairs):
                h = h.sin().cos()
        return h

    return simplified(program(forward), rows())


# ---- what is off the chain -------------------------------------------------------------------------------


def test_what_one_block_reads_is_private_to_it_and_what_several_read_is_the_prologue():
    module = program(
        lambda m, x, k: (
            (both := k.sin()),
            (own := k.cos().tan()),
            (h := m.layer(x)),
            (g := h * both),
            ((g + own) * both).abs(),
        )[-1]
    )
    result = chain(simplified(module, (rows(), rows())))
    assert bodies([result.prologue]) == [["sin"]]
    assert bodies(result.blocks) == [["linear"], ["mul"], ["cos", "tan", "add"], ["mul"], ["abs"]]
    assert [block.inputs for block in result.blocks] == [[], ["linear_0", "sin_0"], ["mul_0"], ["add_0", "sin_0"],
                                                         ["mul_1"]]  # fmt: skip


def test_what_the_user_gets_without_a_gradient_is_in_the_prologue():
    result = chain(simplified(program(lambda m, x, k: (m.layer(x) * (mask := k.exp()), mask.sin())), (rows(), rows())))
    assert bodies(result)[0] == ["exp", "sin"]
    assert result.prologue.outputs == ["exp_0", "sin_0"]


def test_random_nodes_and_those_that_touch_the_module_s_state_stay_where_they_are():
    """Elsewhere they would draw other numbers, or read other values."""

    def forward(m, x):
        h = m.layer(x).exp()
        noise = torch.rand_like(x)
        h = h.tanh() * noise
        m.count.add_(1)
        return h.sin() * noise + m.count * 2

    graph = simplified(program(forward, count=torch.zeros(4)), rows())
    result = chain(graph)
    assert result.prologue is None
    assert [node for block in result for node in block.nodes] == graph.nodes


def test_a_module_without_gradient_is_a_prologue_alone():
    result = chain(simplified(Program(lambda m, x: x.exp().tanh()), rows()))
    assert bodies(result) == [["exp", "tanh"]]
    assert result.blocks == []


def test_a_module_without_operations_has_an_empty_chain():
    assert list(chain(simplified(nn.Identity(), rows()))) == []


# ---- skips ----------------------------------------------------------------------------------------------------


def test_small_blocks_need_no_skip_values():
    graph = skips(3)
    assert chain(graph, max_nodes=len(graph.nodes)).skip_values == []
    assert chain(graph, max_nodes=len(graph.nodes)).blocks[0].nodes == cut(graph)[0].nodes


@pytest.mark.parametrize("depth", [2, 4, 6, 40])
def test_skip_values_are_found_and_the_chain_is_cut_beneath_them(depth):
    graph = skips(depth)
    result = chain(graph, max_nodes=6)
    assert max(sizes(result)) <= 6
    assert 0 < len(result.skip_values) <= depth


def test_values_that_jump_side_by_side_are_found_together():
    """Either alone would leave the block as it is."""

    def forward(m, x):
        h = g = m.layer(x)
        one, other = h.exp(), g.sin()
        for _ in range(8):
            h = (h.tanh() + one) * other
        return h

    graph = simplified(program(forward), rows())
    result = chain(graph, max_nodes=8)
    assert {"exp_0", "sin_0"} <= {skip.name for skip in result.skip_values}
    assert max(sizes(result)) <= 4


@pytest.mark.parametrize("name", TINY)
def test_no_skip_value_is_in_vain(name):
    graph = s_graph(name)
    skips = chain(graph, max_nodes=10).skip_values
    for skip in skips:
        fewer = cut(graph, [other for other in skips if other is not skip])
        assert len(fewer) < len(cut(graph, skips))


@pytest.mark.parametrize("name", TINY)
def test_more_skip_values_never_make_larger_blocks(name):
    graph = s_graph(name)
    skips = chain(graph, max_nodes=4).skip_values
    largest = [max(sizes(cut(graph, skips[:count]))) for count in range(len(skips) + 1)]
    assert largest == sorted(largest, reverse=True)


# ---- what a chain is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_nodes", [2, 10, 30])
@pytest.mark.parametrize("name", [*TINY, *CASES])
def test_chains_verify_and_have_every_node_once(name, max_nodes):
    graph = s_graph(name)
    result = chain(graph, max_nodes)
    result.verify(graph)
    assert sorted(node.name for block in result for node in block.nodes) == sorted(node.name for node in graph)
    assert not any(graph.requires_grad(node) for node in (result.prologue.nodes if result.prologue else []))


@pytest.mark.parametrize("name", RUN_ALONE)
def test_blocks_of_a_chain_run_one_after_another_give_the_output_of_the_graph(name):
    if name.startswith("zoo "):
        entry, graphs = zoo.get(name.removeprefix("zoo ")), zoo_graphs(name.removeprefix("zoo "))
        module, sample = entry.model, make_sample(entry.model, entry.sample)
    else:
        case = examined(name)
        module, sample, graphs = case.module, make_sample(case.module, case.sample), case.graphs
    assert wrong_outputs(graphs.S_graph, module, sample) == []


@pytest.mark.parametrize("seed", range(12))
def test_blocks_of_a_chain_of_a_random_graph_give_its_output(seed):
    module, sample = random_graph(seed, length=25)
    assert wrong_outputs(simplified(module, sample), module, make_sample(module, sample)) == []


def wrong_outputs(graph, module, sample):
    """Outputs that differ when each block runs from what its inputs and leaves name alone."""
    dgraph, streams = graph.dgraph, {}
    with module_state_kept(module), torch.no_grad():
        leaves = leaf_tensors(dgraph.leaves, module, sample.copy().tensors)
        expected = dict(leaves)
        for op in dgraph:
            streams[op] = torch.get_rng_state()
            run_nodes([op], expected, op.output_names)
        expected = {name: expected[name].clone() for name in dgraph.output_names}
    with module_state_kept(module), torch.no_grad():
        passed = {}
        leaves = leaf_tensors(dgraph.leaves, module, sample.copy().tensors)
        for block in chain(graph, max_nodes=4):
            values = {name: leaves[name] for name in block.leaves} | {name: passed[name] for name in block.inputs}
            for op in block.ops:
                torch.set_rng_state(streams[op])
                run_nodes([op], values, op.output_names)
            passed |= {name: values[name] for name in block.outputs}
        computed = [name for name in dgraph.output_names if dgraph.owner(name) not in dgraph.leaves]
        return [name for name in computed if not bitwise_equal(passed[name], expected[name])]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda result: result.blocks.reverse(), "comes before linear_0, which it needs"),
        (lambda result: result.blocks.pop(), "S node exp_0 is in no block"),
        (lambda result: result.blocks.append(result.blocks[0]), "S node linear_0 is in two blocks"),
    ],
    ids=["order", "missing", "twice"],
)
def test_broken_chains_are_refused(spoil, message):
    graph = simplified(program(lambda m, x: m.layer(x).exp()), rows())
    result = chain(graph)
    result.verify(graph)
    spoil(result)
    with pytest.raises(GraphError, match=message):
        result.verify(graph)


# ---- how many: leads of the design, at least as many blocks and at most as many distinct ones ------------------


def taken_apart(module, sample):
    """The S graph of the trace with composite operations taken apart, as plans are made for."""
    made = make_sample(module, sample)
    return d_to_s(b_to_d(expand_composites(trace(module, made), module, made), module, made))


def counts(graph):
    """Blocks, distinct ones and skips."""
    result = chain(graph)
    return len(result.blocks), len(equivalent_classes(graph.dgraph, result.blocks)), len(result.skip_values)


def test_gpt2_of_twelve_layers():
    config = dataclasses.replace(zoo.GPT2Config.tiny(), layers=12)
    blocks, distinct, skips = counts(taken_apart(zoo.GPT2(config), torch.randint(config.vocabulary, (2, 8))))
    assert (blocks >= 29, distinct <= 9, skips) == (True, True, 0)


def test_resnet101():
    blocks, distinct, skips = counts(taken_apart(zoo.resnet101(classes=10, width=8), torch.randn(2, 3, 64, 64)))
    assert (blocks >= 38, distinct <= 18, skips) == (True, True, 0)


def test_a_unet_of_four_levels():
    module = zoo.UNet(zoo.UNetConfig(classes=4, width=4, depth=4))
    blocks, _, skips = counts(taken_apart(module, torch.randn(2, 3, 64, 64)))
    assert blocks >= 32
    assert 2 <= skips <= 4


def hugging_face(model, config, **tensors):
    transformers = pytest.importorskip("transformers")
    module = getattr(transformers, model)(getattr(transformers, config.pop("of"))(**config)).train()
    return taken_apart(module, tensors)


def test_llama_of_eight_layers():
    ids = torch.randint(64, (2, 8))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"of": "LlamaConfig", **sizes, "num_hidden_layers": 8, "vocab_size": 64, "use_cache": False}
    blocks, distinct, skips = counts(hugging_face("LlamaForCausalLM", config, input_ids=ids, labels=ids))
    assert (blocks >= 22, distinct <= 8, skips) == (True, True, 0)


def test_t5_of_six_layers_has_the_encoder_s_output_and_the_position_biases():
    ids = torch.randint(64, (2, 8))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 6, "num_decoder_layers": 6}
    config = {"of": "T5Config", **sizes, "vocab_size": 64, "use_cache": False, "decoder_start_token_id": 0}
    graph = hugging_face("T5ForConditionalGeneration", config, input_ids=ids, decoder_input_ids=ids)
    blocks, distinct, skips = counts(graph)
    # The loss, with which the design counts 44, takes a block or more of its own.
    assert (blocks >= 42, distinct <= 20, skips) == (True, True, 3)


def test_a_decoder_that_reads_the_encoder_s_output_everywhere_is_cut():
    graph = zoo_graphs("transformer-tiny").S_graph
    assert max(sizes(cut(graph))) > 100
    assert max(sizes(chain(graph))) <= 30
