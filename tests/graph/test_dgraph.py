"""The D graph holds what reaches an output, a state or a random stream, with every value's owner."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import BNode, DNode, GraphError, b_to_d, make_sample, trace
from rkgb.ir.bgraph import Source
from rkgb.ir.call import Call, Ref
from rkgb.ir.dgraph import forward_peak_bytes, last_uses, leaf_tensors, run_nodes
from rockmate import PeakMemory, zoo
from tests.graph.cases import CASES, program
from tests.graph.examined import examined
from tests.graph.programs import Program, linear, op_names, rows, scale, traced

aten = torch.ops.aten


def node_of(graph, op_name):
    return next(node for node in graph if node.call.op_name == op_name)


def owners(graph, op_name):
    return [graph.owner(name) for name in node_of(graph, op_name).output_names]


# ---- dead code ---------------------------------------------------------------------------------------


def test_what_reaches_no_output_is_removed():
    graph = traced(program(lambda m, x: ((m.layer(x).exp() * 2).sum(), x.tanh())[1]), rows())
    assert op_names(graph) == ["tanh"]


def test_leaves_that_nothing_reads_are_removed_but_inputs_stay():
    graph = traced(program(lambda m, x, y: (m.layer(x), x.tanh())[1]), (rows(), rows()))
    assert list(graph.leaves) == ["input_0", "input_1"]


def test_a_write_into_what_an_output_reads_is_kept():
    graph = traced(program(lambda m, x: ((h := m.layer(x) * 1)[0].add_(1), h)[1]), rows())
    assert op_names(graph) == ["linear", "mul", "select", "add_"]


def test_a_write_into_what_nothing_reads_is_removed():
    graph = traced(program(lambda m, x: ((x * 1).add_(1), m.layer(x))[1]), rows())
    assert op_names(graph) == ["linear"]


def test_a_write_into_a_buffer_is_kept():
    graph = traced(program(lambda m, x: (m.count.add_(1), m.layer(x))[1], count=torch.zeros(())), rows())
    assert op_names(graph) == ["add_", "linear"]


def test_random_operations_are_kept_though_nothing_reads_them():
    module, sample = linear(), make_sample(linear(), rows())
    basic = trace(module, sample)
    basic.nodes.append(BNode("unused", Call(aten.rand.default, ([2],)), Ref("unused")))
    basic.nodes.append(BNode("zeros", Call(aten.zeros.default, ([2],)), Ref("zeros")))
    assert op_names(b_to_d(basic, module, sample)) == ["linear", "rand"]


# ---- owners ------------------------------------------------------------------------------------------


def test_a_fresh_value_owns_its_storage():
    graph = traced(program(lambda m, x: m.layer(x).exp()), rows())
    assert all(graph.owner(name) == name for node in graph for name in node.output_names)


def test_views_are_owned_by_the_first_value_of_their_storage():
    graph = traced(program(lambda m, x: m.layer(x).view(2, 6).t()[1:].exp()), rows())
    assert [graph.owner(node.output_names[0]) for node in graph] == ["linear_0"] * 4 + ["exp_0"]


def test_parts_of_a_split_share_one_owner():
    graph = traced(program(lambda m, x: sum(m.layer(x).chunk(2, 1))), rows())
    assert owners(graph, "chunk") == ["linear_0", "linear_0"]


def test_in_place_results_are_owned_by_what_they_write():
    graph = traced(program(lambda m, x: m.layer(x).relu_()), rows())
    assert owners(graph, "relu_") == ["linear_0"]


def test_a_contiguous_that_copies_nothing_is_a_view():
    graph = traced(program(lambda m, x: m.layer(x).contiguous().t().contiguous()), rows())
    assert [graph.owner(node.output_names[0]) for node in graph][1:] == ["linear_0", "linear_0", "contiguous_1"]


def test_views_of_parameters_and_inputs_are_owned_by_them():
    graph = traced(Program(lambda m, x: x.t() @ m.w.view(1, 3).t(), w=scale(3)), rows())
    assert owners(graph, "view") == ["w"]
    assert owners(graph, "t") == ["input_0"]


def test_tied_storages_have_one_owner():
    shared = rows(8)
    graph = traced(Program(lambda m, x: x * m.a + m.b, a=shared[:4], b=shared[4:]), rows())
    assert graph.owner("a") == graph.owner("b") in ("a", "b")


# ---- what operations do --------------------------------------------------------------------------------


def test_random_operations_are_those_that_move_the_stream():
    graph = traced(program(lambda m, x: F.dropout(m.layer(x), 0.5) + torch.randn_like(x)), rows())
    assert [node.call.op_name for node in graph if node.is_random] == ["dropout", "randn_like"]


@pytest.mark.parametrize("dropout", [nn.Dropout(0.0), nn.Dropout(0.5).eval()])
def test_a_dropout_that_drops_nothing_is_not_random(dropout):
    assert not any(node.is_random for node in traced(nn.Sequential(linear(), dropout), rows()))


def test_written_values_are_those_of_the_schema():
    graph = traced(program(lambda m, x: m.layer(x).add_(x).view(-1).mul_(2)), rows())
    assert [node.written for node in graph] == [[], ["linear_0"], [], ["view_0"]]


def test_batch_norm_writes_its_statistics_in_training_only():
    def written(norm):
        return node_of(traced(nn.Sequential(linear(), norm), rows()), "batch_norm").written

    assert written(nn.BatchNorm1d(4)) == ["1_running_mean", "1_running_var"]
    assert written(nn.BatchNorm1d(4).eval()) == []
    assert written(nn.BatchNorm1d(4, track_running_stats=False)) == []


def test_what_a_write_makes_differentiable_is_described_so():
    graph = traced(program(lambda m, x: ((o := torch.zeros(3, 4))[:2].copy_(m.layer(x)[:2]), o * 2)[1]), rows())
    assert graph.values["zeros_0"].requires_grad


def test_values_are_described_for_people():
    graph = traced(linear(), rows())
    assert graph.values["linear_0"].describe() == "float32[3, 4] grad"
    assert graph.values["input_0"].describe() == "float32[3, 4]"


# ---- running -------------------------------------------------------------------------------------------


def chain():
    """a → b = exp(a) → c = a·b → d = c + a."""
    calls = {
        "b": Call(aten.exp.default, (Ref("a"),)),
        "c": Call(aten.mul.Tensor, (Ref("a"), Ref("b"))),
        "d": Call(aten.add.Tensor, (Ref("c"), Ref("a"))),
    }
    return [DNode(name, call, Ref(name), True, Source()) for name, call in calls.items()]


def test_values_are_dropped_after_their_last_use():
    assert last_uses(chain(), ["d"]) == [[], ["b"], ["c", "a"]]
    assert last_uses(chain(), ["a", "b", "d"]) == [[], [], ["c"]]
    assert last_uses(chain(), []) == [[], ["b"], ["c", "a", "d"]]


def test_running_keeps_what_was_given_and_what_is_asked_for():
    values = {"a": torch.ones(2)}
    held = []
    run_nodes(chain(), values, ["d"], lambda node, now: held.append(sorted(now)))
    assert sorted(values) == ["a", "d"]
    assert values["d"].tolist() == pytest.approx([1 + torch.e] * 2)
    assert held == [["a", "b"], ["a", "b", "c"], ["a", "c", "d"]]


def test_running_follows_the_gradient_mode_of_each_node():
    nodes = chain()
    nodes[1].grad_enabled = False
    values = {"a": torch.ones(2, requires_grad=True)}
    seen = {}
    run_nodes(nodes, values, [], lambda node, now: seen.update({node.name: now[node.name].requires_grad}))
    assert seen == {"b": True, "c": False, "d": True}
    with torch.no_grad():
        run_nodes(nodes, values, [], lambda node, now: seen.update({node.name: now[node.name].requires_grad}))
    assert seen == {"b": False, "c": False, "d": False}


def test_leaves_get_the_tensors_of_the_module():
    module, x = Program(lambda m, x: x * m.w + m.b + torch.tensor([1.0]), w=scale(), b=rows(4)), rows()
    graph = traced(module, x)
    tensors = leaf_tensors(graph.leaves, module, [x])
    assert tensors["input_0"] is x
    assert tensors["w"] is module.w
    assert tensors["b"] is module.b
    assert tensors["constant_0"].tolist() == [1.0]


# ---- verification ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_case_verifies(name):
    examined(name).graph.verify()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda graph: graph.nodes.reverse(), r"%exp_0 reads %linear_0, which nothing before it defines"),
        (lambda graph: graph.nodes.pop(0), r"%exp_0 reads %linear_0.*keep nodes in traced order"),
        (lambda graph: graph.leaves.pop("weight"), r"%linear_0 reads %weight, which nothing"),
        (lambda graph: graph.nodes.append(graph.nodes[0]), r"%linear_0 defines %linear_0 a second time"),
        (lambda graph: graph.nodes.pop(), r"the output reads %exp_0, which nothing defines"),
        (lambda graph: setattr(graph.nodes[1], "outputs", Ref("input_0")), r"%exp_0 defines %input_0 a second time"),
    ],
    ids=["order", "producer", "leaf", "twice", "output", "over a leaf"],
)
def test_broken_graphs_are_refused(spoil, message):
    module = linear()
    graph = traced(Program(lambda m, x: F.linear(x, m.weight).exp(), weight=module.weight), rows())
    graph.verify()
    spoil(graph)
    with pytest.raises(GraphError, match=message):
        graph.verify()


def test_inspecting_keeps_no_activations():
    """Only facts remain: the values themselves are gone, and no autograd graph holds them."""
    alive = []

    class Watched(nn.Module):
        def forward(self, x):
            hidden = x * 1.0
            with torch._C.DisableTorchFunction():  # a module that takes a raw storage is refused
                alive.append(weakref.ref(hidden.untyped_storage()))
            return hidden.exp()

    traced(Watched(), rows(3, 4, requires_grad=True))
    gc.collect()
    assert all(reference() is None for reference in alive)


# ---- what a forward takes ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny", "unet-tiny", "llama-tiny"])
def test_a_forward_that_saves_nothing_takes_what_is_told(name):
    entry = zoo.get(name)
    sample = make_sample(entry.model, entry.sample)
    graph = b_to_d(trace(entry.model, sample), entry.model, sample)
    values = dict(leaf_tensors(graph.leaves, entry.model, sample.tensors))
    with PeakMemory() as memory, torch.no_grad():
        run_nodes(graph.nodes, values, graph.output_names)
    inside = memory.peak_bytes - forward_peak_bytes(graph)
    assert 0 <= inside <= 0.35 * memory.peak_bytes  # what operations compute with and do not return
