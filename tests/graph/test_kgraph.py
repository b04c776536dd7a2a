"""The K graph joins the blocks: every computation once, data of three kinds, in the order of the step."""

import pytest
import torch
from torch import nn

from rkgb import GraphError, LeafKind, make_all_graphs
from rkgb.ir.profiles import SavedKind
from tests.graph.cases import CASES, program
from tests.graph.examined import examined
from tests.graph.programs import TINY, Program, graphs_of, linear, rows, scale, state_of, zoo_graphs

LOSS_BYTES = 4 + 4  # a loss of float32 and its gradient
ALL = [*(f"zoo {name}" for name in TINY), *CASES]


def taken(name):
    """Graphs of a zoo entry ("zoo …") or of a case."""
    return zoo_graphs(name.removeprefix("zoo ")) if name.startswith("zoo ") else examined(name).graphs


def chain(length=3):
    """linear, then `length` times tanh: each saves its result."""
    return graphs_of(nn.Sequential(linear(), *(nn.Tanh() for _ in range(length))), rows()).K_graph


# ---- structure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_graph_verifies(name):
    graphs = taken(name)
    graphs.B_graph.verify()
    graphs.D_graph.verify()
    graphs.S_graph.verify()
    graphs.K_graph.verify()


@pytest.mark.parametrize("name", ALL)
def test_each_node_is_computed_forward_once_in_order(name):
    graphs = taken(name)
    assert [comp.node for comp in graphs.K_graph.forward] == graphs.S_graph.nodes
    assert not any(comp.is_backward for comp in graphs.K_graph.forward)
    assert all(comp.is_backward for comp in graphs.K_graph.backward)
    assert list(graphs.K_graph) == graphs.K_graph.forward + graphs.K_graph.backward


@pytest.mark.parametrize("name", ALL)
def test_blocks_run_forward_in_order_and_backward_in_reverse(name):
    kgraph = taken(name).K_graph
    assert [comp.block for comp in kgraph.forward] == sorted(comp.block for comp in kgraph.forward)
    assert [comp.block for comp in kgraph.backward] == sorted((comp.block for comp in kgraph.backward), reverse=True)


@pytest.mark.parametrize("name", ALL)
def test_data_are_of_three_kinds_and_account_for_everything_saved(name):
    graphs = taken(name)
    kgraph, values = graphs.K_graph, graphs.D_graph.values
    by_kind = {kind: {d.name: d.size_bytes for d in kgraph.data.values() if d.kind == kind} for kind in KINDS}
    assert sum(map(len, by_kind.values())) == len(kgraph.data)
    assert by_kind["data"] == {owner: values[owner].storage_bytes for node in graphs.S_graph for owner in node.data}
    assert by_kind["phantom"] == {
        phantom.name: phantom.size_bytes
        for node in graphs.S_graph
        for op in node.ops
        for phantom in kgraph.op_profiles[op.name].phantoms
    }
    assert by_kind["grad"].keys() <= {f"{owner}.grad" for owner in by_kind["data"]}
    assert all(size == by_kind["data"][name.removesuffix(".grad")] for name, size in by_kind["grad"].items())


KINDS = ("data", "grad", "phantom")


@pytest.mark.parametrize("name", ALL)
def test_producers_and_users_mirror_outputs_and_deps(name):
    kgraph = taken(name).K_graph
    for comp in kgraph:
        assert all(comp in data.users for data in comp.deps)
        assert all(comp in data.producers for data in comp.outputs)
    for data in kgraph.data.values():
        assert all(data in comp.deps for comp in data.users)
        assert all(data in comp.outputs for comp in data.producers)
        if data.kind != "grad":
            assert len(data.producers) == 1


@pytest.mark.parametrize("name", ALL)
def test_a_forward_reads_the_data_of_the_nodes_that_it_depends_on(name):
    graphs = taken(name)
    values = graphs.D_graph.values
    for comp in graphs.K_graph.forward:
        read = {values[value].owner for op in comp.node.ops for value in op.call.inputs} - set(comp.node.data)
        assert {data.name for data in comp.deps} == read & set(graphs.K_graph.data)
        assert {data.name for data in comp.outputs if data.kind == "data"} == set(comp.node.data)


@pytest.mark.parametrize("name", ALL)
def test_a_backward_needs_only_what_its_operation_saved(name):
    graphs = taken(name)
    saved = {
        tensor.source
        for profile in graphs.K_graph.op_profiles.values()
        for tensor in profile.saved
        if tensor.kind is not SavedKind.LEAF
    }
    needed = {data.name for comp in graphs.K_graph.backward for data in comp.deps if data.kind != "grad"}
    assert needed <= saved


@pytest.mark.parametrize("name", ALL)
def test_everything_saved_is_needed_by_a_backward_where_all_of_it_runs(name):
    """What is saved but never read would be held for nothing: only outputs without gradient may do so."""
    graphs = taken(name)
    reached = {comp.node for comp in graphs.K_graph.backward}
    needed = {data.name for comp in graphs.K_graph.backward for data in comp.deps}
    for node in reached:
        own = {t.source for op in node.ops for t in graphs.K_graph.op_profiles[op.name].saved if "leaf" != t.kind.value}
        stages = [comp for comp in graphs.K_graph.backward if comp.node is node]
        assert own <= needed or len(stages) < len(node.ops)


@pytest.mark.parametrize("name", ALL)
def test_bytes_of_the_backward_are_consistent(name):
    kgraph = taken(name).K_graph
    assert all(0 <= comp.resident_bytes <= comp.peak_bytes for comp in kgraph.backward)
    assert all(comp.workspace_bytes >= 0 for comp in kgraph.forward)
    assert all(data.size_bytes >= 0 for data in kgraph.data.values())


# ---- gradients -----------------------------------------------------------------------------------------------


def test_a_gradient_flows_from_each_computation_to_the_one_before():
    kgraph = chain()
    flow = [([d.name for d in c.deps if d.kind == "grad"], [d.name for d in c.outputs]) for c in kgraph.backward]
    assert flow == [
        (["tanh_2.grad"], ["tanh_1.grad"]),
        (["tanh_1.grad"], ["tanh_0.grad"]),
        (["tanh_0.grad"], ["linear_0.grad"]),
        (["linear_0.grad"], []),
    ]


def test_a_value_read_twice_gets_its_gradient_from_two():
    kgraph = graphs_of(program(lambda m, x: (h := m.layer(x)).exp() * h), rows()).K_graph
    producers = [comp.name for comp in kgraph.data["linear_0.grad"].producers]
    assert sorted(producers) == ["exp_0.backward", "mul_0.backward"]


def test_what_requires_no_gradient_gets_none():
    kgraph = graphs_of(program(lambda m, x, k: m.layer(x) * k.exp()), (rows(), rows())).K_graph
    assert [name for name, data in kgraph.data.items() if data.kind == "grad"] == ["mul_0.grad", "linear_0.grad"]
    assert [comp.name for comp in kgraph.backward] == ["mul_0.backward", "linear_0.backward"]


def test_the_loss_hands_over_gradients_of_differentiable_outputs():
    module = program(lambda m, x: {"a": m.layer(x), "b": x.exp(), "c": m.layer.weight, "views": m.layer(x).exp().t()})
    assert graphs_of(module, rows()).K_graph.gradient_bytes == 2 * 3 * 4 * 4


def test_gradients_of_parameters_of_later_blocks_stay_resident():
    """float32 [8, 8] weights without bias: each linear layer leaves 256 bytes behind."""
    kgraph = graphs_of(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))), rows(2, 8)).K_graph
    first = 64 + LOSS_BYTES
    assert [comp.resident_bytes for comp in kgraph.backward] == [first, first + 256, first + 2 * 256]


def test_a_parameter_of_several_blocks_has_one_gradient():
    module = Program(lambda m, x: m.layer(m.layer(m.layer(x))), layer=nn.Linear(8, 8, bias=False))
    kgraph = graphs_of(module, rows(2, 8)).K_graph
    first = 64 + LOSS_BYTES
    assert [comp.resident_bytes for comp in kgraph.backward] == [first, first + 256, first + 256]


def test_gradients_given_to_earlier_outputs_wait_for_their_block():
    """Two outputs of 48 bytes: while the last block runs backward, both gradients are there."""
    module = program(lambda m, x: (h := m.layer(x), h.exp().tanh()))
    kgraph = graphs_of(module, rows()).K_graph
    assert [comp.name for comp in kgraph.backward] == ["tanh_0.backward", "exp_0.backward", "linear_0.backward"]
    assert [comp.resident_bytes - LOSS_BYTES for comp in kgraph.backward] == [2 * 48, 2 * 48, 48]


# ---- nodes ---------------------------------------------------------------------------------------------------


def test_saved_tensors_of_an_operation_are_at_hand():
    graphs = graphs_of(nn.Sequential(linear(), nn.Tanh()), rows())
    first, second = graphs.D_graph
    assert [(s.kind, s.source) for s in graphs.K_graph.saved_by(first)] == [(SavedKind.LEAF, "input_0")]
    assert [(s.kind, s.source) for s in graphs.K_graph.saved_by(second)] == [(SavedKind.DATA, "tanh_0")]


def test_stages_of_one_operation_are_numbered():
    """The parts of a split get their gradients one by one, and give them on together, twice."""
    module = program(lambda m, x: torch.cat([part.exp().sum(1) for part in m.layer(x).view(2, 2, 3).chunk(2)]))
    names = [comp.name for comp in graphs_of(module, rows()).K_graph]
    assert len(set(names)) == len(names)


def test_views_of_a_parameter_do_not_need_a_node_of_their_own():
    graphs = graphs_of(Program(lambda m, x: x @ m.w.view(4, 3), w=scale(12)), rows())
    assert [comp.name for comp in graphs.K_graph.forward] == ["matmul_0"]
    assert {leaf.kind for leaf in graphs.D_graph.leaves.values()} == {LeafKind.INPUT, LeafKind.PARAMETER}
    graphs.K_graph.verify()


def test_a_storage_allocated_before_its_node_is_counted_in_the_nodes_between():
    """The sum of zeros and of what is written into it: zeros are there while exp runs, whose node comes first."""
    module = program(lambda m, x: (o := torch.zeros(3, 4), o.add_(m.layer(x).exp()))[1].tanh())
    kgraph = graphs_of(module, rows()).K_graph
    workspace = {comp.name: comp.workspace_bytes for comp in kgraph.forward}
    assert workspace == {"linear_0": 48, "exp_0": 48, "zeros_0": 0, "tanh_0": 0}


# ---- verification ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda k: setattr(k.forward[1], "name", k.forward[0].name), "two K computations are named linear_0"),
        (lambda k: k.forward.reverse(), "K computation tanh_2 reads tanh_1, which nothing before it makes"),
        (lambda k: k.forward.pop(0), "K computation tanh_0 reads linear_0, which nothing"),
        (lambda k: k.forward.pop(), "the backward tanh_2.backward reads tanh_2, which no forward makes"),
    ],
    ids=["names", "order", "missing", "unmade"],
)
def test_broken_graphs_are_refused(spoil, message):
    kgraph = chain()
    kgraph.verify()
    spoil(kgraph)
    with pytest.raises(GraphError, match=message):
        kgraph.verify()


# ---- outputs that the loss leaves alone --------------------------------------------------------------------


def two_outputs(m, x):
    """As models with labels return: the loss, and the predictions that it is made of."""
    predictions = m.layer(x).exp()
    return predictions.square().mean(), predictions


def test_outputs_that_the_loss_leaves_alone_have_no_gradient_of_their_own():
    module, sample = Program(two_outputs, layer=nn.Linear(4, 512)), rows(64, 4)
    both = make_all_graphs(module, sample).K_graph
    first = make_all_graphs(module, sample, backward=lambda output: output[0].backward()).K_graph
    assert first.sgraph.dgraph.gradient_outputs == first.sgraph.dgraph.output_names[:1]
    assert first.gradient_bytes == both.gradient_bytes - 64 * 512 * 4
    assert max(c.peak_bytes for c in first.backward) < max(c.peak_bytes for c in both.backward)
    assert [comp.name for comp in first.backward] == [comp.name for comp in both.backward]


def test_what_only_an_output_without_gradient_needs_has_no_backward():
    module, sample = Program(lambda m, x: (m.layer(x).sum(), m.layer(x).tanh()), layer=linear()), rows()
    graph = make_all_graphs(module, sample, backward=lambda output: output[0].backward()).K_graph
    assert not [comp.name for comp in graph.backward if comp.name.startswith(("tanh", "linear_1"))]


def test_a_backward_that_fails_leaves_everything_as_it_was():
    module, sample = Program(two_outputs, layer=nn.Linear(4, 8)), rows()
    before, stream = state_of(module), torch.get_rng_state()

    def backward(output):
        torch.rand(3)
        output[0].backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_all_graphs(module, sample, backward=backward)
    assert state_of(module) == before
    assert torch.equal(torch.get_rng_state(), stream)
