"""What measuring finds is what eager PyTorch does: saved tensors, bytes, stages; and it leaves no trace."""

import contextlib
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkgb import AllGraphs, cut, d_to_s, make_sample, s_to_k
from rkgb.devices.allocation_log import AllocationLog
from rkgb.ir.profiles import SavedKind
from rkgb.ir.sample import Sample
from rkgb.profile import measure
from rkgb.profile import recompute_cost as repetition
from rkgb.profile.measure import measure_blocks
from rkgb.state.module_state import module_state_kept
from rockmate import zoo
from tests.free_memory import free_is
from tests.graph.cases import CASES, program
from tests.graph.examined import examined
from tests.graph.oracles import layout, saved_in_one_graph, saved_of
from tests.graph.programs import (
    TINY,
    Program,
    graphs_of,
    linear,
    measured_together,
    rows,
    state_of,
    timed_once,
    traced,
    with_gradients,
    zoo_graphs,
)

CPU = torch.device("cpu")
ALL = [*(f"zoo {name}" for name in TINY), *CASES]


def taken(name: str) -> tuple[nn.Module, Sample, AllGraphs]:
    """Module, sample and graphs of a zoo entry ("zoo …") or of a case."""
    if name.startswith("zoo "):
        entry = zoo.get(name.removeprefix("zoo "))
        return entry.model, make_sample(entry.model, entry.sample), zoo_graphs(entry.name)
    case = examined(name)
    return case.module, make_sample(case.module, case.sample), case.graphs


# ---- saved tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_saved_tensors_are_those_that_autograd_packs(name):
    """Blocks were measured on detached copies, one representative for all: it must make no difference."""
    module, sample, graphs = taken(name)
    assert saved_of(graphs) == saved_in_one_graph(graphs, module, sample)


@pytest.mark.parametrize("name", TINY)
def test_saved_tensors_are_in_the_order_in_which_the_module_packs_them(name):
    module, sample, graphs = taken(f"zoo {name}")
    packed: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(layout(tensor)), lambda kept: kept)
    with module_state_kept(module), hooks:
        sample.call(module)
    profiles = graphs.K_graph.op_profiles
    saved = [tensor for op in graphs.D_graph if op.name in profiles for tensor in profiles[op.name].saved]
    assert [(tensor.size, tensor.stride, tensor.offset) for tensor in saved] == packed


@pytest.mark.parametrize("name", ALL)
def test_kinds_of_saved_tensors_tell_who_fills_their_storage(name):
    _, _, graphs = taken(name)
    data = {owner for node in graphs.S_graph for owner in node.data}
    for profile in graphs.K_graph.op_profiles.values():
        for saved in profile.saved:
            kinds = {
                SavedKind.DATA: saved.source in data,
                SavedKind.LEAF: saved.source in graphs.D_graph.leaves,
                SavedKind.PHANTOM: any(
                    saved.source == p.name for q in graphs.K_graph.op_profiles.values() for p in q.phantoms
                ),
            }
            assert [kind for kind, holds in kinds.items() if holds] == [saved.kind]


def phantoms(module, sample):
    graphs = graphs_of(module, sample)
    return {p.name: p.size_bytes for profile in graphs.K_graph.op_profiles.values() for p in profile.phantoms}


def test_a_batch_norm_saves_mean_and_deviation_as_phantoms():
    sizes = phantoms(nn.Sequential(linear(8, 64), nn.BatchNorm1d(64)), rows(16, 8))
    assert sizes == {"batch_norm_0.saved0": 64 * 4, "batch_norm_0.saved1": 64 * 4}


def test_a_layer_norm_returns_mean_and_deviation_as_values():
    graph = graphs_of(nn.Sequential(linear(8, 64), nn.LayerNorm(64)), rows(16, 8)).K_graph
    assert {data.kind for data in graph.data.values()} == {"data", "grad"}
    assert [graph.data[name].size_bytes for name in ("layer_norm_0_1", "layer_norm_0_2")] == [16 * 4, 16 * 4]
    gradients = {name for name, data in graph.data.items() if data.kind == "grad"}
    assert gradients == {"linear_0.grad", "layer_norm_0.grad"}  # none comes to the statistics


def test_a_max_pooling_saves_its_indices_as_a_phantom():
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2))
    sizes = phantoms(module, rows(1, 1, 8, 8))
    assert list(sizes.values()) == [16 * 8] or sizes == {}  # or it was taken apart, and they are a value


def test_operations_that_save_inputs_and_outputs_alone_have_no_phantoms():
    assert phantoms(nn.Sequential(linear(), nn.Tanh(), linear(), nn.Sigmoid()), rows()) == {}


def test_an_operation_under_no_grad_saves_nothing():
    graphs = examined("gradient_modes-layer_without_gradient").graphs
    (op,) = [op for op in graphs.D_graph if not op.grad_enabled]
    assert graphs.K_graph.saved_by(op) == ()


def test_what_a_write_made_differentiable_has_its_backward():
    """A fresh tensor needs no gradient until something differentiable is written into it."""
    graphs = examined("in_place-filling_a_fresh_tensor").graphs
    assert any(comp.name.startswith("mul") for comp in graphs.K_graph.backward)


# ---- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_the_graphs_account_for_every_byte_that_a_forward_leaves(name):
    """What is alive after an eager forward is its outputs and what autograd saved: data and phantoms of K.

    Only Python numbers that took part in differentiable operations are beside them, of eight bytes each.
    """
    module, sample, graphs = taken(f"zoo {name}")
    kgraph = graphs.K_graph
    with module_state_kept(module), AllocationLog(CPU) as log:
        output = sample.call(module)
    alive = sum(event.size_bytes for event in log.events)
    saved = {s.source for profile in kgraph.op_profiles.values() for s in profile.saved if s.kind is not SavedKind.LEAF}
    owners = {graphs.D_graph.owner(value) for value in graphs.D_graph.output_names}
    predicted = sum(kgraph.data[owner].size_bytes for owner in saved | owners)
    assert output.requires_grad
    assert 0 <= alive - predicted <= 8 * len(graphs.D_graph.nodes)
    assert (alive - predicted) % 8 == 0


def test_an_operation_peaks_at_its_output_and_its_workspace():
    """Softmax of float32 allocates its result; the sum of float32 in float64 a copy, which it frees, and its result."""
    module = Program(lambda m, x: m.layer(x).softmax(1).sum(1, dtype=torch.float64), layer=linear(4, 32))
    graphs = graphs_of(module, rows(64, 4))
    peaks = {name: profile.peak_bytes for name, profile in graphs.K_graph.op_profiles.items()}
    assert peaks == {"linear_0": 64 * 32 * 4, "softmax_0": 64 * 32 * 4, "sum_0": 64 * 32 * 8 + 64 * 8}
    workspace = {comp.name: comp.workspace_bytes for comp in graphs.K_graph.forward}
    assert workspace == {"linear_0": 0, "softmax_0": 0, "sum_0": 64 * 32 * 8}


def test_gradients_of_parameters_are_counted_at_the_end_of_a_block():
    graphs = graphs_of(nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 2).requires_grad_(False)), rows())
    profiles = measured_together(graphs, nn.Sequential(linear(4, 8), nn.Tanh(), linear(8, 2)), rows())
    assert profiles[0].parameter_gradient_bytes == {"0_weight": 4 * 8 * 4, "0_bias": 8 * 4}


def test_stages_are_in_the_order_of_the_backward():
    graphs = graphs_of(program(lambda m, x: m.layer(x).sin().exp().tanh()), rows())
    assert [comp.name for comp in graphs.K_graph.backward] == [
        "tanh_0.backward",
        "exp_0.backward",
        "sin_0.backward",
        "linear_0.backward",
    ]


def test_stages_need_what_their_derivative_reads():
    graphs = graphs_of(program(lambda m, x: m.layer(x).sin().exp().tanh() * 2), rows())
    needs = {comp.name: [d.name for d in comp.deps if d.kind != "grad"] for comp in graphs.K_graph.backward}
    assert needs["tanh_0.backward"] == ["tanh_0"]  # of the result
    assert needs["exp_0.backward"] == ["exp_0"]
    assert needs["sin_0.backward"] == ["linear_0"]  # of the argument
    assert needs["linear_0.backward"] == []  # of leaves alone


def test_times_are_positive_and_finite():
    graphs = zoo_graphs("gpt2-tiny")
    assert all(0 < comp.time_ms < 10_000 for comp in graphs.K_graph.forward if comp.node.ops)
    assert all(0 <= comp.time_ms < 10_000 for comp in graphs.K_graph.backward)


@pytest.mark.parametrize(("free_bytes", "most_written"), [(0, 0), (1 << 20, 1 << 19)])
def test_where_memory_is_short_less_of_it_is_written_to_empty_the_caches(monkeypatch, free_bytes, most_written):
    entry, written = zoo.get("gpt2-tiny"), []
    clock = repetition.ColdClock
    monkeypatch.setattr(repetition, "host", lambda: free_is(free_bytes)(CPU))
    monkeypatch.setattr(repetition, "ColdClock", lambda size, *others: written.append(size) or clock(size, *others))
    held, times = [], measure.repetition_times

    def timed(graph, block, values, ops, others):
        try:
            return times(graph, block, values, ops, others)
        finally:
            held.append(others.held_bytes)

    monkeypatch.setattr(measure, "repetition_times", timed)
    graphs = graphs_of(entry.model, entry.sample)
    assert written
    assert max(written) <= most_written
    assert not any(held), "the next block's run needs this memory"
    assert any(comp.repeat_ms for comp in graphs.K_graph.forward)


def test_a_stage_takes_as_long_as_its_autograd_nodes():
    graphs = zoo_graphs("gpt2-tiny")
    for profile in graphs.profiles:
        nodes = [1 << number for number in range(sum(len(stage.nodes) for stage in profile.stages))]
        stages = profile.with_times(dict.fromkeys(profile.ops, 1.0), nodes).stages
        assert sum(stage.time_ms for stage in stages) == sum(nodes)
        assert [int(stage.time_ms).bit_count() for stage in stages] == [len(stage.nodes) for stage in stages]


@pytest.mark.both_walks
def test_what_slows_the_machine_for_a_while_is_in_no_time(monkeypatch):
    """Of each time the least counts, of those of equivalent blocks and of both walks."""
    module, sample = nn.Sequential(*(layer for _ in range(4) for layer in (linear(), nn.Tanh()))), rows()
    graph = d_to_s(traced(module, sample))
    blocks, taken = cut(graph), []
    moments = [(9.0, 8.0, 7.0), (6.0, 9.0, 2.0), (4.0, 3.0, 5.0), (5.0, 4.0, 4.0)]

    def timed(graph, block, values, profile, others):
        taken.append(block.ops[0].name)
        number = sum(name.startswith("tanh") for name in taken) - 1
        op_ms, node_ms, repeat_ms = moments[number] if taken[-1].startswith("tanh") else (1.0, 1.0, 1.0)
        profile = profile.with_times({block.ops[0].name: op_ms}, [node_ms])
        return replace(profile, repeat_ms={block.nodes[0].name: repeat_ms}, restore_ms={})

    monkeypatch.setattr(measure, "_timed", timed)
    profiles = measure_blocks(graph, blocks, module, make_sample(module, sample))
    assert [name for name in taken if name.startswith("tanh")] == ["tanh_0", "tanh_2"] * 2
    for profile, block in zip(profiles[1::2], blocks[1::2], strict=True):
        assert [op.time_ms for op in profile.ops.values()] == [4.0]
        assert [stage.time_ms for stage in profile.stages] == [3.0]
        assert profile.repeat_ms == {block.nodes[0].name: 2.0}


# ---- nothing is changed ------------------------------------------------------------------------------------------


class EveryState(nn.Module):
    """Buffers, statistics, dropout, a part in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.still = linear(), nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return F.dropout(self.still(self.norm(self.layer(x))), 0.5) * self.count


def test_measuring_leaves_module_gradients_and_random_stream_as_they_were():
    module, sample = with_gradients(EveryState()), rows()
    before = state_of(module)
    made = make_sample(module, sample)
    graph = d_to_s(traced(module, sample))
    assert state_of(module) == before
    with timed_once():
        measure_blocks(graph, cut(graph), module, made)
    assert state_of(module) == before


@pytest.mark.parametrize("name", CASES)
def test_making_all_graphs_leaves_module_and_sample_as_they_were(name):
    case = examined(name)
    assert case.after_all == case.before


@pytest.mark.parametrize("name", TINY)
def test_making_all_graphs_of_a_model_leaves_it_as_it_was(name):
    entry = zoo.get(name)
    before = state_of(with_gradients(entry.model))
    graphs_of(entry.model, entry.sample)
    assert state_of(entry.model) == before


def test_an_interrupted_measurement_leaves_the_module_as_it_was():
    module, sample = with_gradients(EveryState()), rows()
    graph = d_to_s(traced(module, sample))
    before = state_of(module)

    def interrupt(stage, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_blocks(graph, cut(graph), module, make_sample(module, sample), interrupt)
    assert state_of(module) == before


def test_progress_is_told_block_by_block():
    module, sample = nn.Sequential(linear(), nn.Tanh(), linear()), rows()
    graph = d_to_s(traced(module, sample))
    told = []
    blocks = cut(graph)
    with timed_once():
        profiles = measure_blocks(graph, blocks, module, make_sample(module, sample), lambda *step: told.append(step))
    assert told == [("measure", done, 3) for done in range(4)]
    s_to_k(graph, blocks, profiles).verify()


@pytest.mark.ci
@pytest.mark.slow
def test_measuring_holds_the_input_of_a_block_and_no_earlier_values():
    module = nn.Sequential(*(layer for _ in range(6) for layer in (linear(), nn.GELU())))
    sample = rows(7, 4)
    graph = d_to_s(traced(module, sample))
    held = []
    with collector_off(), timed_once():
        before = storages_of(sample.shape)
        made = make_sample(module, sample)
        measure_blocks(graph, cut(graph), module, made, lambda *_: held.append(storages_of(sample.shape)))
    assert [count - before for count in held] == [0] + [1] * 11 + [0]


def test_tracing_holds_no_activations_afterwards():
    module, sample = nn.Sequential(*(layer for _ in range(6) for layer in (linear(), nn.GELU()))), rows(11, 4)
    with collector_off():
        before = storages_of(sample.shape)
        traced(module, sample)
        assert storages_of(sample.shape) == before


@pytest.mark.slow
def test_making_graphs_again_and_again_leaks_nothing():
    entry = zoo.get("gpt2-tiny")
    graphs_of(entry.model, entry.sample)
    gc.collect()
    before = storage_bytes()
    for _ in range(2):
        graphs_of(entry.model, entry.sample)
    gc.collect()
    assert storage_bytes() - before < 1024


@contextlib.contextmanager
def collector_off():
    """What is freed inside is freed by itself, not by the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def living_tensors():
    for thing in gc.get_objects():
        # Not those of a compiler that ran in another test, which have no storages.
        if type(thing) in (Tensor, torch.nn.Parameter) and thing.layout is torch.strided:
            if torch._is_functional_tensor(thing) or not has_storage(thing):
                continue
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def has_storage(tensor):
    """False for what PyTorch 2.9 leaves of some tensors that the collector has cleared: objects that hold nothing."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def storages_of(shape):
    """How many storages of tensors of that shape are alive."""
    return len({tensor.untyped_storage().data_ptr() for tensor in living_tensors() if tensor.shape == shape})


def storage_bytes():
    """Bytes of the storages of all living tensors."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in living_tensors()}
    return sum(sizes.values())
