"""The S graph has one node per storage, with everything that fills it; parameters' views are nobody's node."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import BNode, GraphError, b_to_d, d_to_s, make_sample, trace
from rkgb.ir.call import Call, Ref
from rkgb.passes.d_to_s import STEPS, join_storages, merge_cycles, one_node_per_operation, sort_nodes
from tests.graph.cases import CASES, Square, program
from tests.graph.examined import examined
from tests.graph.oracles import not_filled_again
from tests.graph.programs import Program, linear, rows, scale, simplified, traced


class Guard:
    """Stands for a check of a value that Python read."""

    is_guard = True
    __name__ = "guard"

    def __call__(self, *values):
        """Nothing to check."""


def with_guard(module, sample, value):
    """The S graph of `module` with a guard on `value` right after it."""
    made = make_sample(module, sample)
    basic = trace(module, made)
    place = next(place for place, node in enumerate(basic) if value in node.output_names)
    basic.nodes.insert(place + 1, BNode("guard_0", Call(Guard(), (Ref(value),)), None))
    return d_to_s(b_to_d(basic, module, made))


RUNS_ONCE_CASES = (
    ("layers-custom_function", "apply", "custom function"),
    ("in_place-buffer_as_a_cache", "linear", "reads module state that the forward rewrites"),
    ("in_place-buffer_as_a_counter", "mul", "reads module state that the forward rewrites"),
    ("normalisation-spectral_norm", "clone", "reads module state that the forward rewrites"),
)


def bodies(graph):
    return [[op.call.op_name for op in node.ops] for node in graph]


def test_a_node_is_a_real_operation_with_its_views():
    graph = simplified(program(lambda m, x: m.layer(x).view(2, 6).t().exp()), rows())
    assert bodies(graph) == [["linear", "view", "t"], ["exp"]]


def test_a_node_holds_the_in_place_operations_on_its_storage():
    graph = simplified(program(lambda m, x: m.layer(x).relu_().mul_(2)), rows())
    assert bodies(graph) == [["linear", "relu_", "mul_"]]


def test_the_parts_of_a_split_stay_with_what_is_split():
    graph = simplified(program(lambda m, x: sum(m.layer(x).chunk(2, 1))), rows())
    assert bodies(graph)[0] == ["linear", "chunk"]


def test_an_operation_of_several_storages_is_one_node():
    graph = simplified(program(lambda m, x: (best := m.layer(x).max(1)).values * best.indices), rows())
    assert bodies(graph) == [["linear"], ["max"], ["mul"]]
    assert graph.nodes[1].data == ["max_0_0", "max_0_1"]


def test_nodes_are_named_after_their_first_operation_and_list_their_storages():
    graph = simplified(program(lambda m, x: m.layer(x).view(2, 6).t().exp()), rows())
    assert [(node.name, node.data) for node in graph] == [("linear_0", ["linear_0"]), ("exp_0", ["exp_0"])]


def test_views_of_parameters_inputs_and_constants_are_nobodys_node():
    graph = simplified(Program(lambda m, x: x.t() @ m.w.view(1, 3).t() + torch.ones(4, 1).t().t(), w=scale(3)), rows())
    assert [op.call.op_name for op in graph.leaf_views] == ["t", "view", "t"]
    assert [body[0] for body in bodies(graph)] == ["matmul", "ones", "add"]


def test_writes_into_buffers_are_effects():
    graph = examined("normalisation-batch_norm_1d").graphs.S_graph
    assert [op.call.op_name for op in graph.effects] == ["add_"]


def test_a_reader_before_the_last_write_joins_the_node():
    """Repeated alone, it would read what the write left."""
    graph = simplified(program(lambda m, x: (h := m.layer(x)).exp() + h.add_(1).sigmoid()), rows())
    assert bodies(graph)[0] == ["linear", "exp", "add_"]
    assert graph.nodes[0].data == ["linear_0", "exp_0"]


def test_a_reader_after_the_last_write_stays_apart():
    graph = simplified(program(lambda m, x: (h := m.layer(x)).add_(1).sigmoid() + h.exp()), rows())
    assert bodies(graph)[:2] == [["linear", "add_"], ["sigmoid"]]


def test_a_write_through_a_view_counts_for_the_whole_storage():
    graph = simplified(program(lambda m, x: (h := m.layer(x)).exp() + (h[0].mul_(2), h)[1]), rows())
    assert bodies(graph)[0] == ["linear", "exp", "select", "mul_"]


def test_what_is_written_by_its_own_consumer_is_one_node():
    """x.add_(f(x)) would be a cycle: f reads x, x's node ends with the sum."""
    graph = simplified(program(lambda m, x: (h := m.layer(x)).add_(h.sigmoid())), rows())
    assert bodies(graph) == [["linear", "sigmoid", "add_"]]


def test_longer_cycles_are_one_node():
    module = program(lambda m, x: (h := m.layer(x)).add_(m.layer(h.view(3, 4).sigmoid() * 2).tanh()).exp())
    graph = simplified(module, rows())
    assert [len(body) for body in bodies(graph)] == [7, 1]


def test_a_node_waits_for_the_operands_of_its_writes():
    """The storage filled first is completed last: its node comes after what it reads."""
    graph = simplified(program(lambda m, x: m.layer(x).add_(x.exp().sum()) * 2), rows())
    assert [node.name for node in graph] == ["exp_0", "sum_0", "linear_0", "mul_0"]


def test_guards_are_effects_though_nothing_reads_them():
    graph = with_guard(program(lambda m, x: m.layer(x).exp()), rows(), "linear_0")
    assert [op.name for op in graph.effects] == ["guard_0"]
    assert [op.name for op in graph.dgraph] == ["linear_0", "guard_0", "exp_0"]
    assert bodies(graph) == [["linear"], ["exp"]]


# ---- step by step --------------------------------------------------------------------------------------


def test_the_graph_begins_with_a_node_for_each_operation():
    graph = one_node_per_operation(traced(program(lambda m, x: m.layer(x).view(2, 6).relu_()), rows()))
    assert bodies(graph) == [["linear"], ["view"], ["relu_"]]
    assert [node.data for node in graph] == [["linear_0"], [], []]


@pytest.mark.parametrize("name", CASES)
def test_the_steps_lead_to_the_s_graph_and_leave_their_arguments_alone(name):
    dgraph = examined(name).graphs.D_graph
    graph = one_node_per_operation(dgraph)
    for step in STEPS:
        before = str(graph)
        following = step(graph)
        assert str(graph) == before
        assert operations(following) == operations(graph)
        graph = following
    assert str(graph) == str(d_to_s(dgraph)) == str(examined(name).graphs.S_graph)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("name", CASES)
def test_each_step_can_be_applied_alone_and_a_second_time_changes_nothing(name, step):
    graph = one_node_per_operation(examined(name).graphs.D_graph)
    once = step(graph)
    assert operations(once) == operations(graph)
    assert str(step(once)) == str(once)


def operations(graph):
    """Names of all operations, wherever they are."""
    return sorted([op.name for node in graph for op in node.ops] + [op.name for op in graph.leaf_views + graph.effects])


def test_nodes_that_need_each_other_are_refused_by_sorting_and_merged_before_it():
    """x.add_(f(x)): f needs what fills x, and the write to x needs f."""
    dgraph = traced(program(lambda m, x: (h := m.layer(x)).add_(h.exp()).tanh()), rows())
    graph = join_storages(one_node_per_operation(dgraph))
    assert bodies(graph) == [["linear", "add_"], ["exp"], ["tanh"]]
    with pytest.raises(GraphError, match="S node linear_0 needs what needs itself"):
        sort_nodes(graph)
    assert bodies(sort_nodes(merge_cycles(graph))) == [["linear", "exp", "add_"], ["tanh"]]


def test_a_printed_graph_tells_what_each_node_runs_reads_and_fills():
    module = program(lambda m, x: (m.layer(x) * m.w.view(4)).view(2, 6), w=nn.Parameter(rows(4, 1)))
    graph = simplified(module, rows())
    assert str(graph).splitlines() == [
        "S graph: 2 nodes",
        "  %linear_0 = linear; reads nothing; fills linear_0",
        "  %mul_0 = mul view; reads linear_0; fills mul_0",
        "views of leaves:",
        "  %view_0 = view",
    ]


# ---- the finished graph ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_nodes_come_after_what_they_need_and_before_their_users(name):
    graph = examined(name).graphs.S_graph
    place = {node: index for index, node in enumerate(graph)}
    for node in graph:
        assert all(place[dep] < place[node] for dep in node.deps)
        assert all(place[user] > place[node] for user in node.users)
        assert all(node in dep.users for dep in node.deps)
        assert all(node in user.deps for user in node.users)


@pytest.mark.parametrize("name", CASES)
def test_every_operation_and_every_storage_has_one_place(name):
    graph = examined(name).graphs.S_graph
    placed = [op for node in graph for op in node.ops] + graph.leaf_views + graph.effects
    assert sorted(placed, key=id) == sorted(graph.dgraph, key=id)
    data = [owner for node in graph for owner in node.data]
    fresh = {graph.dgraph.owner(name) for op in graph.dgraph for name in op.output_names} - set(graph.dgraph.leaves)
    assert sorted(data) == sorted(fresh)
    producer = graph.producer_of()
    assert all(producer[owner] is node for node in graph for owner in node.data)


@pytest.mark.parametrize("name", CASES)
def test_a_node_depends_on_exactly_the_nodes_whose_values_it_reads(name):
    graph = examined(name).graphs.S_graph
    producer = graph.producer_of()
    # A view of a leaf, or a write into one, may read other values: whoever uses what it gives reads them, too.
    through = {op: set(op.call.inputs) for op in (*graph.leaf_views, *graph.effects)}
    beside = {name: op for op in through for name in op.output_names}
    for op in graph.dgraph:
        if op in through:
            through[op].update(*(through[beside[name]] for name in op.call.inputs if name in beside))
    for node in graph:
        names = {name for op in node.ops for name in op.call.inputs}
        names.update(*(through[beside[name]] for name in names if name in beside))
        assert set(node.deps) == {producer[name] for name in names if name in producer} - {node}


@pytest.mark.parametrize("name", CASES)
def test_repeating_a_node_after_the_forward_fills_its_storages_again(name):
    case = examined(name)
    assert not_filled_again(case.graphs, case.module, make_sample(case.module, case.sample)) == []


@pytest.mark.parametrize(("name", "op_name", "reason"), RUNS_ONCE_CASES, ids=[case[0] for case in RUNS_ONCE_CASES])
def test_nodes_that_must_run_once_say_why(name, op_name, reason):
    graph = examined(name).graphs.S_graph
    nodes = [node for node in graph if any(op.call.op_name == op_name for op in node.ops)]
    assert any(reason in node.keep_reason for node in nodes)
    assert not any(node.recomputable for node in nodes if node.keep_reason)


def test_other_nodes_may_run_again():
    graph = simplified(nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True)), rows())
    assert all(node.recomputable for node in graph)


def test_a_random_node_is_known():
    graph = simplified(program(lambda m, x: F.dropout(m.layer(x), 0.5).view(-1) * 2), rows())
    assert [node.is_random for node in graph] == [False, True, False]


def test_a_node_requires_a_gradient_when_any_of_its_values_does():
    graph = simplified(program(lambda m, x, y: (m.layer(x) * y.exp(), Square.apply(y).detach())), (rows(), rows()))
    needs = {node.name: graph.requires_grad(node) for node in graph}
    assert needs == {"linear_0": True, "exp_0": False, "mul_0": True, "square_0": False}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda graph: graph.nodes.reverse(), "S node exp_0 comes before linear_0, which it needs"),
        (lambda graph: graph.nodes.pop(), "an operation of D has no place in S, or two"),
        (lambda graph: graph.leaf_views.append(graph.nodes[0].ops[0]), "an operation of D has no place in S, or two"),
        (lambda graph: graph.nodes[0].data.clear(), "S node linear_0 fills no storage"),
        (lambda graph: graph.nodes[0].ops.clear(), "S node linear_0 fills no storage"),
    ],
    ids=["order", "missing", "twice", "no data", "no operation"],
)
def test_broken_graphs_are_refused(spoil, message):
    graph = simplified(program(lambda m, x: m.layer(x).exp()), rows())
    graph.verify()
    spoil(graph)
    with pytest.raises(GraphError, match=message):
        graph.verify()
