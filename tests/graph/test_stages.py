"""The stages under the names that users know, and the summary that `test_rkgb` prints."""

import re

import pytest
import torch
from torch import nn

import rkgb
from rkgb import TraceWarning, make_all_graphs
from rkgb.check import summary
from rkgb.ir.sample import make_sample
from rkgb.replay.fresh import fresh_sample
from rkgb.replay.replay import run_graph
from rockmate import zoo
from tests.graph.programs import Program, bytes_of, linear, rows, state_of


@pytest.mark.parametrize("tracer", ["auto", "jit", "record"])
@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny", "unet-tiny"])
def test_stages_one_by_one_give_what_all_at_once_gives(name, tracer):
    entry = zoo.get(name)
    graphs = make_all_graphs(entry.model, entry.sample, tracer=tracer)
    basic = rkgb.make_B(entry.model, entry.sample, tracer=tracer)
    dataflow = rkgb.B_to_D(basic, entry.model, entry.sample)
    simplified = rkgb.D_to_S(dataflow)
    blocks = rkgb.cut(simplified, rkgb.chain(simplified).skip_values)
    k_graph = rkgb.S_to_K(simplified, entry.model, entry.sample)
    k_graphs, classes = rkgb.S_list_to_K_list_eco(blocks, simplified, entry.model, entry.sample)
    assert [node.name for node in basic] == [node.name for node in graphs.B_graph]
    assert basic.tracer == graphs.B_graph.tracer == {"auto": "jit"}.get(tracer, tracer)
    assert str(simplified) == str(graphs.S_graph)
    assert [comp.name for comp in k_graph] == [comp.name for comp in graphs.K_graph]
    assert classes == graphs.equivalent_classes
    assert [[comp.name for comp in k] for k in k_graphs] == [[comp.name for comp in k] for k in graphs.K_graph_list]


def test_stages_put_the_model_in_training_mode_and_back():
    entry = zoo.get("gpt2-tiny")
    entry.model.eval()
    graph = rkgb.make_B(entry.model, entry.sample)
    assert any("dropout" in node.name for node in graph)
    assert not entry.model.training


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny", "unet-tiny", "transformer-tiny", "mixer-tiny"])
def test_k_graphs_of_blocks_are_the_parts_of_the_whole(name):
    entry = zoo.get(name)
    graphs = make_all_graphs(entry.model, entry.sample)
    whole, parts = graphs.K_graph, graphs.K_graph_list
    for part in parts:
        part.verify()
    assert [comp.name for part in parts for comp in part.forward] == [comp.name for comp in whole.forward]
    assert [comp.name for part in reversed(parts) for comp in part.backward] == [c.name for c in whole.backward]
    data = [data for part in parts for data in part.data.values() if data.kind != "grad" and data.producers]
    assert {d.name: d.size_bytes for d in data} == {
        d.name: d.size_bytes for d in whole.data.values() if d.kind != "grad"
    }
    for part, block in zip(parts, graphs.S_graph_list, strict=True):
        given = {graphs.D_graph.owner(value) for value in block.inputs}
        assert {d.name for d in part.data.values() if d.kind == "data" and not d.producers} <= given


def test_every_block_is_a_tree_of_parts_of_at_most_forty_nodes():
    entry = zoo.get("transformer-tiny")
    graphs = make_all_graphs(entry.model, entry.sample)
    assert [tree.block.nodes for tree in graphs.sub_graphs] == [block.nodes for block in graphs.blocks]

    def parts(tree):
        return [tree] if not tree.children else [part for child in tree.children for part in parts(child)]

    assert all(len(part.block.nodes) <= 40 for tree in graphs.sub_graphs for part in parts(tree))


@pytest.mark.ci
def test_gradients_flow_from_the_outputs_to_the_leaves_without_a_gap():
    for name in ("gpt2-tiny", "resnet18-tiny", "unet-tiny", "transformer-tiny", "mixer-tiny"):
        entry = zoo.get(name)
        graphs = make_all_graphs(entry.model, entry.sample)
        outputs = {f"{graphs.D_graph.owner(value)}.grad" for value in graphs.D_graph.output_names}
        orphans = [
            data.name
            for data in graphs.K_graph.data.values()
            if data.kind == "grad" and not data.producers and data.name not in outputs
        ]
        assert orphans == []


def test_the_summary_says_what_was_found(capsys):
    entry = zoo.get("gpt2-tiny")
    before = state_of(entry.model)
    graphs = rkgb.test_rkgb(entry.model, entry.sample)
    printed = capsys.readouterr().out
    assert state_of(entry.model) == before
    assert printed.startswith("GPT2, traced by jit\n")
    assert f"{len(graphs.S_graph.nodes)} nodes that fill a storage" in printed
    assert f"{len(graphs.blocks)} blocks, {len(graphs.equivalent_classes)} distinct" in printed
    assert "every bit" in printed
    assert len(re.findall(r"^    block ", printed, re.MULTILINE)) == len(graphs.equivalent_classes)


def test_the_summary_tells_guards_and_what_runs_once():
    module = Program(lambda m, x, k: m.layer(x) if bool(k.all()) else x, layer=linear())
    text = summary(make_all_graphs(module, (rows(), torch.ones(3, dtype=torch.bool))), "Program")
    assert "read out of the data, and compared at every run:" in text
    assert "guard(_local_scalar_dense == True) at (root) test_stages.py:" in text


def test_pytest_does_not_take_it_for_a_test():
    assert rkgb.test_rkgb.__test__ is False


@pytest.mark.both_walks
def test_progress_is_said_on_request(capsys):
    make_all_graphs(linear(), rows(), verbose=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "rkgb: trace 0/4"
    assert "rkgb: measure 1/1" in said
    assert said[-1] == "rkgb: time 1/1"
    make_all_graphs(linear(), rows())
    assert capsys.readouterr().err == ""


def test_keyword_arguments_may_be_given_beside_positional_ones():
    module = Program(lambda m, x, scale: m.layer(x) * scale, layer=linear())
    graphs = make_all_graphs(module, (rows(),), {"scale": torch.tensor(2.0)})
    assert [leaf.kind.value for leaf in graphs.D_graph.leaves.values()].count("input") == 2


# ---- shapes that depend on data ----------------------------------------------------------------------------


def test_shapes_that_vary_are_told_kept_and_exact():
    module = Counted()
    with pytest.warns(TraceWarning, match=r"values, first %index_0 at \(root\) test_stages.py:\d+, have a shape that"):
        graphs = make_all_graphs(module, torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 9.0]))
    varying = graphs.D_graph.varying
    kept = [node for node in graphs.S_graph if any(not varying.isdisjoint(op.output_names) for op in node.ops)]
    assert kept
    assert all("shape depends on data" in node.keep_reason for node in kept)
    for data in (torch.arange(6.0), torch.tensor([1.0, 1, 1, 1, 1, -9])):
        assert bytes_of(run_graph(graphs.D_graph, module, make_sample(module, data))) == bytes_of(module(data))


class Counted(nn.Module):
    """Handles those of its inputs that are above their mean: how many, the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (x[x > x.mean()] * self.weight).exp().sum()


def test_a_count_that_fresh_data_repeat_by_chance_still_varies():
    """Of many counts, such as the rows of each expert, some are the sample's: no guard may hold later data to these."""
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    fresh = fresh_sample(make_sample(nn.Identity(), x)).tensors[0]
    limits = torch.linspace(-2, 2, 401)
    counts, theirs = ((data[:, :1] > limits).sum(0) for data in (x, fresh))
    limit = float(limits[(counts == theirs) & (counts > 20) & (counts < 180)][0])

    def chosen_alone(m, x):
        rows_above = (x[:, 0] > limit).nonzero()[:, 0]
        return torch.zeros_like(x).index_add(0, rows_above, m.layer(x[rows_above]))

    module = Program(chosen_alone, layer=linear())
    with pytest.warns(TraceWarning, match="shape that depends on data"):
        graph = make_all_graphs(module, x).D_graph
    assert not any(node.is_guard for node in graph)
    assert any(node.call.op_name == "nonzero" and node.name in graph.varying for node in graph)
