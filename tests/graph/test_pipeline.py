"""One call makes every graph, in training mode, telling how far it is."""

import pytest
import torch
from torch import nn

import rkgb.pipeline
from rkgb import AllGraphs, ReplayMismatch, make_all_graphs
from tests.graph.cases import CASES, program
from tests.graph.examined import examined
from tests.graph.programs import graphs_of, linear, op_names, rows, timed_once


def test_all_graphs_are_of_one_trace():
    graphs = graphs_of(nn.Sequential(linear(), nn.Tanh(), linear()), rows())
    assert isinstance(graphs, AllGraphs)
    assert op_names(graphs.B_graph) == op_names(graphs.D_graph) == ["linear", "tanh", "linear"]
    assert graphs.S_graph.dgraph is graphs.D_graph
    assert graphs.K_graph.sgraph is graphs.S_graph
    assert graphs.K_graph.blocks is graphs.blocks
    assert graphs.equivalent_classes == [[0], [1], [2]]


def test_the_module_is_traced_in_training_mode():
    module = nn.Sequential(linear(), nn.Dropout(0.5)).eval()
    graphs = graphs_of(module, rows())
    assert any(op.is_random for op in graphs.D_graph)
    assert not module.training
    assert not module[1].training


def test_parts_that_are_frozen_in_evaluation_mode_stay_so():
    module = nn.Sequential(linear(), nn.Dropout(0.5).eval())
    assert not any(op.is_random for op in graphs_of(module, rows()).D_graph)


def test_keyword_arguments_are_given_beside_the_sample():
    module = program(lambda m, x, other, factor=1.0: m.layer(x) * factor + other)
    with timed_once():
        graphs = make_all_graphs(module, rows(), {"other": rows(), "factor": 3.0})
    assert op_names(graphs.D_graph) == ["linear", "mul", "add"]
    assert graphs.D_graph.nodes[1].call.args[1] == 3.0


def test_gradient_mode_outside_does_not_matter():
    with torch.no_grad():
        graphs = graphs_of(linear(), rows())
    assert len(graphs.K_graph.backward) == 1
    assert torch.is_grad_enabled()


def test_progress_is_told_in_order():
    told = []
    with timed_once():
        make_all_graphs(
            nn.Sequential(linear(), nn.Tanh()),
            rows(),
            verbose=lambda name, done, total: told.append((name, done, total)),
        )
    assert [name for name, _, _ in told] == sorted((name for name, _, _ in told), key=["trace", "measure"].index)
    for stage in ("trace", "measure"):
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps[0][0] == 0
        assert steps[-1][0] == steps[-1][1]
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_statistics_are_known_where_a_normalisation_was_taken_apart():
    """For a small batch it is; the schema of the operation inside does not say that it writes them."""
    graphs = graphs_of(nn.Sequential(linear(), nn.BatchNorm1d(4)), rows())
    (norm,) = [op for op in graphs.D_graph if "batch_norm" in op.call.op_name]
    assert norm.written == ["1_running_mean", "1_running_var"]


@pytest.mark.parametrize("name", CASES)
def test_a_finer_trace_has_the_outputs_of_the_coarse_one(name):
    case = examined(name)
    fine, coarse = case.graphs.D_graph, case.graph
    assert fine.output_names == coarse.output_names
    for output in fine.output_names:
        one, other = fine.values[output], coarse.values[output]
        assert (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)


def test_what_is_exact_whole_but_not_apart_stays_whole(monkeypatch):
    """A finer trace that the replay check refuses gives way to the coarse one."""
    checked = []
    replay_check = rkgb.pipeline.replay_check

    def refuse_the_finer(graph, module, sample, *how):
        checked.append(len(graph.nodes))
        if len(checked) == 1:
            raise ReplayMismatch("the finer one")
        replay_check(graph, module, sample, *how)

    monkeypatch.setattr(rkgb.pipeline, "replay_check", refuse_the_finer)
    graphs = graphs_of(nn.Sequential(linear(), nn.Dropout(0.5)), rows())
    assert op_names(graphs.D_graph) == ["linear", "dropout"]
    assert checked[0] > checked[1] == 2


def test_a_coarse_trace_that_is_refused_is_an_error(monkeypatch):
    def refuse(*_):
        raise ReplayMismatch("nothing is exact")

    monkeypatch.setattr(rkgb.pipeline, "replay_check", refuse)
    with pytest.raises(ReplayMismatch, match="nothing is exact"):
        graphs_of(nn.Sequential(linear(), nn.Dropout(0.5)), rows())
