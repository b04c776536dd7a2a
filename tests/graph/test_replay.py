"""The replay check believes only what is bitwise equal, on data that the trace has not seen."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import DNode, ReplayMismatch, b_to_d, make_sample, trace
from rkgb.ir.call import Call, Ref
from rkgb.replay.fresh import fresh_sample
from rkgb.replay.replay import record_step, replay_check, run_graph
from rkgb.replay.step_record import StepRecord, bitwise_equal, largest_difference
from tests.graph.cases import program
from tests.graph.programs import linear, rows, state_of, traced, with_gradients


class Everything(nn.Module):
    """Dropout, normalisation with statistics, a constant, a region without gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = linear(), nn.BatchNorm1d(4)

    def forward(self, x):
        with torch.no_grad():
            scale = self.layer(x).abs() + 1
        return F.dropout(self.norm(self.layer(x)) * 2.0 / scale, 0.5)


def everything():
    module, sample = Everything(), rows()
    return module, sample, traced(module, sample)


def node_of(graph, op_name, grad_enabled=True):
    return next(node for node in graph if (node.call.op_name, node.grad_enabled) == (op_name, grad_enabled))


def with_argument(graph, op_name, place, value):
    node = node_of(graph, op_name)
    args = list(node.call.args)
    args[place] = value
    node.call = Call(node.call.function, tuple(args), node.call.kwargs)


def test_an_exact_graph_is_accepted():
    module, sample, graph = everything()
    replay_check(graph, module, make_sample(module, sample))


@pytest.mark.parametrize(
    ("spoil", "difference"),
    [
        (lambda graph: with_argument(graph, "mul", 1, 2.000001), "output 0 differs by up to"),
        (lambda graph: with_argument(graph, "dropout", 1, 0.4), "output 0 differs"),
        (lambda graph: with_argument(graph, "dropout", 2, False), "output 0 differs"),
        (lambda graph: with_argument(graph, "batch_norm", 6, 0.2), "buffer norm.running_mean differs"),
        (lambda graph: graph.nodes.remove(node_of(graph, "add_")), "buffer norm.num_batches_tracked differs"),
        (
            lambda graph: setattr(node_of(graph, "linear", False), "grad_enabled", True),
            "gradient of layer.weight differs",
        ),
        (
            lambda graph: setattr(node_of(graph, "linear"), "grad_enabled", False),
            "gradient of layer.weight exists on one",
        ),
    ],
    ids=["number", "probability", "no dropout", "momentum", "counter", "more gradient", "less gradient"],
)
def test_small_changes_are_seen(spoil, difference):
    module, sample, graph = everything()
    spoil(graph)
    with pytest.raises(ReplayMismatch, match=difference):
        replay_check(graph, module, make_sample(module, sample))


def test_drawing_more_random_numbers_is_seen():
    module, sample = program(lambda m, x: F.dropout(m.layer(x), 0.5)), rows()
    graph = traced(module, sample)
    dropout = node_of(graph, "dropout")
    graph.nodes.append(DNode("once_more", dropout.call, Ref("once_more"), True, dropout.source))
    with pytest.raises(ReplayMismatch, match="random stream 0"):
        replay_check(graph, module, make_sample(module, sample))


def test_the_message_names_the_module_and_what_to_do():
    module, sample, graph = everything()
    with_argument(graph, "mul", 1, 3.0)
    with pytest.raises(ReplayMismatch, match=r"the trace of Everything is not exact.*Rewrite that part"):
        replay_check(graph, module, make_sample(module, sample))


def test_the_check_leaves_the_module_as_it_was_also_when_it_refuses():
    module, sample, graph = everything()
    with_gradients(module)
    with_argument(graph, "mul", 1, 3.0)
    before = state_of(module)
    with pytest.raises(ReplayMismatch):
        replay_check(graph, module, make_sample(module, sample))
    assert state_of(module) == before


def test_gradients_of_inputs_are_compared():
    module, sample = program(lambda m, x: m.layer(x.exp().detach() + x)), rows(3, 4, requires_grad=True)
    graph = traced(module, sample)
    detach = next(node for node in graph if node.call.op_name == "detach")
    detach.call, detach.grad_enabled = Call(torch.ops.aten.alias.default, detach.call.args), True
    with pytest.raises(ReplayMismatch, match="gradient of input 0 differs"):
        replay_check(graph, module, make_sample(module, sample))
    assert sample.grad is None


def test_a_step_is_recorded_by_name():
    module = nn.Sequential(linear(4, 2), nn.BatchNorm1d(2))
    sample = make_sample(module, rows(3, 4, requires_grad=True))
    record = record_step(module, sample, lambda data: data.call(module))
    assert list(record.tensors) == [
        "output 0",
        *(f"gradient of {name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")),
        "gradient of input 0",
        *(f"buffer 1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "random stream 0",
    ]
    assert record.first_difference(record) is None


def test_records_differ_by_value_shape_kind_and_presence():
    one = StepRecord({"a": torch.zeros(2), "b": None})
    assert one.first_difference(StepRecord({"a": torch.zeros(2), "b": None})) is None
    assert one.first_difference(StepRecord({"a": torch.tensor([0, 0.5]), "b": None})) == "a differs by up to 0.5"
    assert one.first_difference(StepRecord({"a": None, "b": None})) == "a exists on one side only"
    assert one.first_difference(StepRecord({"a": torch.zeros(2), "b": torch.zeros(1)})) == "b exists on one side only"
    assert "torch.float64[2] instead of" in str(one.first_difference(StepRecord({"a": torch.zeros(2).double()})))
    assert "torch.float32[3] instead of" in str(one.first_difference(StepRecord({"a": torch.zeros(3)})))


def test_nan_equals_nan_and_nothing_else():
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert bitwise_equal(nan, nan)
    assert not bitwise_equal(nan, one)
    assert not bitwise_equal(one, nan)
    assert bitwise_equal(torch.tensor([True, False]), torch.tensor([True, False]))
    assert not bitwise_equal(torch.tensor([1j]), torch.tensor([2j]))


def test_the_largest_difference_is_absolute():
    assert largest_difference(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0])) == 3.0
    assert largest_difference(torch.zeros(0), torch.zeros(0)) == 0.0
    assert largest_difference(torch.tensor([True]), torch.tensor([False])) == 1.0


def fresh(tensor):
    (drawn,) = fresh_sample(make_sample(nn.Identity(), tensor)).tensors
    return drawn


def test_fresh_data_differs_but_has_the_same_layout():
    sample = rows(4, 3).t().requires_grad_()
    drawn = fresh(sample)
    assert not torch.equal(drawn, sample)
    assert (drawn.shape, drawn.stride(), drawn.dtype) == (sample.shape, sample.stride(), sample.dtype)
    assert drawn.requires_grad
    assert drawn.is_leaf


def test_fresh_integers_are_those_of_the_sample_in_another_order():
    sample = torch.arange(100).view(10, 10)
    drawn = fresh(sample)
    assert not torch.equal(drawn, sample)
    assert sorted(drawn.flatten().tolist()) == list(range(100))


def test_fresh_probabilities_stay_probabilities():
    drawn = fresh(torch.rand(1000))
    assert 0 <= drawn.min() < 0.1 < 0.9 < drawn.max() < 1


def test_fresh_data_of_a_constant_is_noise():
    assert fresh(torch.ones(1000)).std() > 0.5
    assert fresh(torch.full((1000,), -math.inf)).isfinite().all()
    assert fresh(torch.zeros(0)).numel() == 0


def test_a_module_that_takes_only_a_range_is_checked_within_it():
    module = program(lambda m, x: m.table((x * 10).long()), table=nn.Embedding(10, 4))
    sample = torch.rand(5)
    replay_check(traced(module, sample), module, make_sample(module, sample))


def test_the_graph_gives_the_output_in_the_structure_of_the_module():
    module, sample = program(lambda m, x: {"a": (m.layer(x), 3)}), rows()
    output = run_graph(traced(module, sample), module, make_sample(module, sample))
    assert output.keys() == {"a"}
    assert torch.equal(output["a"][0], module.layer(sample))
    assert output["a"][1] == 3


def test_where_only_the_sample_s_integers_pass_other_floats_show_what_is_not_exact():
    """The number that the trace holds is right for the sample; no guard reads it."""
    module = program(lambda m, x, words: m.layer(x[: int(words[0])]) * x.sum())
    given = (rows(), torch.tensor([2, 3, 1]))
    sample = make_sample(module, given)
    graph = b_to_d(trace(module, sample, "record"), module, sample)
    assert replay_check(graph, module, sample, may_branch=True) is not None
    with_argument(graph, "mul", 1, float(given[0].sum()))
    assert torch.equal(run_graph(graph, module, sample), module(*given))
    with pytest.raises(ReplayMismatch, match="not exact on fresh data: output 0 differs"):
        replay_check(graph, module, sample, may_branch=True)
