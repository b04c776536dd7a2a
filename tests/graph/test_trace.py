"""Small modules are traced exactly, and come back as they were."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import LeafKind, make_sample, trace
from rkgb.ir.call import Ref
from rkgb.ir.dgraph import leaf_tensors, run_nodes
from rkgb.replay.replay import replay_check
from tests.graph.cases import CASES, Answer, Pair, Square
from tests.graph.examined import examined
from tests.graph.programs import Program, linear, op_names, rows, scale, state_of, traced

ALL_CASES = pytest.mark.parametrize("name", CASES)


@ALL_CASES
def test_the_trace_gives_what_the_module_gives_on_fresh_data(name):
    case = examined(name)
    replay_check(case.graph, case.module, make_sample(case.module, case.sample))


@ALL_CASES
def test_tracing_leaves_module_and_sample_as_they_were(name):
    case = examined(name)
    assert case.after_tracing == case.before


@ALL_CASES
def test_every_value_is_as_it_was_described(name):
    case = examined(name)
    graph, module = case.graph, case.module
    values = dict(leaf_tensors(graph.leaves, module, make_sample(module, case.sample).tensors))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    seen = {}

    def look(node, values):
        seen.update((name, values[name]) for name in node.output_names)

    with torch.random.fork_rng(devices=[]):
        run_nodes(graph.nodes, values, [], look)
    module.load_state_dict(buffers, strict=False)
    for value_name, tensor in seen.items():
        info = graph.values[value_name]
        assert (info.shape, info.stride) == (tuple(tensor.shape), tensor.stride()), value_name
        assert (info.dtype, info.requires_grad) == (tensor.dtype, tensor.requires_grad), value_name
        assert (info.offset, info.device) == (tensor.storage_offset(), tensor.device), value_name
        assert info.storage_bytes == tensor.untyped_storage().nbytes(), value_name
        same_storage = seen.get(info.owner, values.get(info.owner))
        assert same_storage.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), value_name


def leaf_kinds(graph):
    return [(leaf.kind, leaf.path) for leaf in graph.leaves.values()]


def test_operations_stay_composite():
    graph = examined("layers-encoder_layer").graph
    assert op_names(graph).count("layer_norm") == 2
    assert op_names(graph).count("scaled_dot_product_attention") == 1
    assert "native_dropout" not in op_names(graph)


def test_shape_arithmetic_leaves_no_operations():
    graph = examined("shapes-half_of_the_columns").graph
    assert set(op_names(graph)) == {"linear", "flatten", "slice", "div"}
    (division,) = [node for node in graph if node.call.op_name == "div"]
    assert division.call.args[1] == pytest.approx(2.0)


def test_python_numbers_stay_python_numbers():
    graph = traced(Program(lambda m, x: (x * 2.5 + 3) * True, w=scale()), rows())
    assert [node.call.args[1] for node in graph] == [2.5, 3, True]
    assert [type(node.call.args[1]) for node in graph] == [float, int, bool]


def test_zero_dim_tensors_of_the_module_stay_tensors():
    graph = examined("numbers-zero_dim_buffer_of_double").graph
    product = graph.nodes[-1]
    assert isinstance(product.call.args[1], Ref)
    assert graph.values[product.call.args[1].name].dtype == torch.float64


def test_tied_weights_are_one_leaf():
    graph = examined("layers-tied_weights").graph
    assert leaf_kinds(graph) == [(LeafKind.INPUT, ""), (LeafKind.PARAMETER, "e.weight")]


def test_tied_weights_of_two_modules_are_one_leaf():
    module = nn.Sequential(linear(), nn.Tanh(), linear())
    module[2].weight = module[0].weight
    parameters = [path for kind, path in leaf_kinds(traced(module, rows())) if kind is LeafKind.PARAMETER]
    assert sorted(parameters) == ["0.bias", "0.weight", "2.bias"]


def test_leaves_tell_where_they_come_from():
    module = Program(lambda m, x, y: (x * m.weight + m.buffer) * torch.tensor([1.0, 2, 3, 4]) + y)
    module.weight, module.buffer = scale(), nn.Buffer(rows(4))
    graph = trace(module, make_sample(module, (rows(), rows())))
    found = {leaf.kind: leaf for leaf in graph.leaves.values() if leaf.index != 0}
    assert found[LeafKind.PARAMETER].path == "weight"
    assert found[LeafKind.BUFFER].path == "buffer"
    assert found[LeafKind.INPUT].index == 1
    assert found[LeafKind.CONSTANT].constant.tolist() == [1, 2, 3, 4]


def test_names_are_unique_though_parameters_are_called_like_operations():
    for name in ("parameter_called_like_an_operation", "parameter_called_like_an_input", "paths_that_differ_in_a_dot"):
        graph = examined(f"structures-{name}").graph
        defined = [*graph.leaves, *(output for node in graph for output in node.output_names)]
        assert len(set(defined)) == len(defined)


def test_the_source_names_the_submodule_and_the_line():
    module = nn.Sequential(collections.OrderedDict(first=linear(), second=nn.Sequential(nn.Tanh())))
    graph = traced(Program(lambda m, x: m.inner(x) + 1, inner=module), rows())
    assert [node.source.module_path for node in graph] == ["inner.first", "inner.second.0", ""]
    assert graph.nodes[-1].source.location.startswith("test_trace.py:")
    assert str(graph.nodes[-1].source).startswith("(root) test_trace.py:")


def test_regions_without_gradient_are_marked():
    graph = examined("gradient_modes-region_without_gradient").graph
    assert [(node.call.op_name, node.grad_enabled) for node in graph] == [
        ("linear", True),
        ("linear", False),
        ("abs", True),  # of what needs no gradient: it makes no difference
        ("div", True),
    ]


def test_custom_functions_are_one_operation():
    graph = examined("layers-custom_function").graph
    assert op_names(graph) == ["linear", "apply", "linear"]
    assert graph.nodes[1].call.function.__self__ is Square


@torch.jit.script
def shifted(x, shift: float):
    return torch.tanh(x + shift)


def test_a_function_of_jit_without_control_flow_is_its_operations():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return shifted(self.inner(x), 2.0)

    assert op_names(traced(Calls(), rows())) == ["linear", "add", "tanh"]


def test_a_submodule_that_is_not_the_caller_s_child_is_called_as_any_other():
    class Head(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.elsewhere = [body]  # and so not registered here

        def forward(self, x):
            hidden, total = self.elsewhere[0](x)
            return hidden * total, x

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return self.inner(x).relu(), x.sum()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Body()
            self.head = Head(self.body)

        def forward(self, x):
            hidden, _ = self.body(x)
            first, second = self.head(hidden)
            return self.body.inner(first) + second

    module = Both()
    graph = traced(module, rows())
    replay_check(graph, module, make_sample(module, rows()))
    assert sorted(path for _, path in leaf_kinds(graph)[1:]) == ["body.inner.bias", "body.inner.weight"]
    assert [node.source.module_path for node in graph if node.call.op_name == "linear"] == ["body.inner"] * 3


def test_outputs_keep_their_structure():
    assert isinstance(examined("structures-named_tuple").graph.output, Pair)
    answer = examined("structures-dataclass").graph.output
    assert isinstance(answer, Answer)
    assert isinstance(answer.hidden[0], Ref)
    assert answer.label == "answer"
    dictionary = examined("structures-dictionary").graph.output
    assert isinstance(dictionary["a"], Ref)
    assert dictionary["b"][1:] == [3, None]


def test_an_output_that_is_an_input_is_that_leaf():
    graph = examined("structures-output_is_an_input").graph
    assert graph.output_names[1] == "input_0"


def test_batch_norm_counts_its_batches_once_a_step():
    """The trace, the inspection and the check ran the module many times; one run of the graph counts one batch."""
    case = examined("normalisation-batch_norm_1d")
    norm = case.module[1]
    assert norm.num_batches_tracked == 0
    counters = [node for node in case.graph if "num_batches_tracked" in str(node.call.inputs)]
    assert [node.call.op_name for node in counters] == ["add_"]


def test_what_depends_on_python_values_is_told_in_the_warnings():
    module = Program(lambda m, x: m.layer(x) if x.shape[0] > 1 else x, layer=linear())
    graph = trace(module, make_sample(module, rows()))
    assert any("Python boolean" in warning for warning in graph.warnings)
    clean = linear()
    assert trace(clean, make_sample(clean, rows())).warnings == []


def test_modules_called_with_functions_of_the_library_are_left_as_they_were():
    """torch.jit.trace looks at every attribute of a module, functions among them."""
    module, sample = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=F.gelu), rows(2, 3, 8)
    before = state_of(module)
    traced(module, sample)
    assert state_of(module) == before
    assert module.activation is F.gelu
