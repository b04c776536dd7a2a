"""What cannot be traced exactly is refused, saying why; the module is left as it was all the same."""

import itertools
import random

import pytest
import torch
from torch import nn

from rkgb import ReplayMismatch, RockmateError, TraceError, make_all_graphs, make_sample, trace
from rkgb.dgraph import b_to_d
from rkgb.replay import replay_check
from tests.graph.cases import program
from tests.graph.programs import bytes_of, linear, rows, state_of, with_gradients


class DoubledInPlace(torch.autograd.Function):
    """A custom function that writes into its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@torch.jit.script
def doubled_if_positive(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x * 2
    return x


def halved_without_gradient(x):
    with torch.no_grad():
        return x.mul_(0.5)


def with_hook(x):
    x.register_hook(lambda gradient: gradient * 2)
    return x


def replaces_its_buffer(m, x):
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return m.layer(x) * m.mean


def with_backward_hook(layer):
    layer.register_full_backward_hook(lambda module, gradients, of_outputs: None)
    return layer


def silent_convolution(m, x):
    with torch.no_grad():
        features = m.teacher(x)
    return features * m.weight


def grows(counter):
    return program(lambda m, x: m.layer(x) * next(counter))


REFUSED = {
    "item_of_data": (lambda: program(lambda m, x: m.layer(x) * x.sum().item()), "output 0 differs"),
    "number_from_data": (lambda: program(lambda m, x: m.layer(x) * float(x.sum())), "output 0 differs"),
    "size_from_data": (lambda: program(lambda m, x: m.layer(x)[:, : int(x.abs().max()) + 1]), "output 0"),
    "branch_on_data": (lambda: program(lambda m, x: m.layer(x) if x.sum() > 0 else x), "output 0 differs"),
    "through_numpy": (lambda: program(lambda m, x: m.layer(x) + torch.from_numpy(x.numpy() * 2)), "output 0 differs"),
    "write_without_gradient": (lambda: program(lambda m, x: halved_without_gradient(m.layer(x)).tanh()), "gradient of"),
    "hook_on_a_tensor": (lambda: program(lambda m, x: with_hook(m.layer(x)).relu()), "gradient of layer.weight"),
    "another_buffer": (lambda: program(replaces_its_buffer, mean=torch.ones(4)), "buffer mean differs"),
    "number_from_a_buffer": (lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None)), "buffer 0.running_mean differs"),
    "custom_function_that_writes": (lambda: program(lambda m, x: DoubledInPlace.apply(m.layer(x))), "output 0 differs"),
    "unused_random_numbers": (lambda: program(lambda m, x: (torch.rand(2), m.layer(x))[1]), "random stream"),
    "another_result_each_time": (lambda: grows(itertools.count()), "differs from itself between two runs"),
    "python_random_numbers": (lambda: program(lambda m, x: m.layer(x) * random.random()), "it is not deterministic"),
    "scripted_module": (lambda: nn.Sequential(linear(), torch.jit.script(linear())), "submodule '1' is compiled"),
    "scripted_function": (lambda: program(lambda m, x: doubled_if_positive(m.layer(x))), "into a Python number"),
    "backward_hook_on_a_module": (lambda: nn.Sequential(with_backward_hook(linear())), "backward hooks"),
    "forward_that_raises": (lambda: program(lambda m, x: m.layer(x).view(5, 5)), "shape '.5, 5.' is invalid"),
    "no_tensor_returned": (lambda: program(lambda m, x: 3.0), "returned no tensor"),
    "sum_of_a_python_list": (lambda: program(lambda m, x: m.layer(x) * sum(x.flatten().tolist())), "output 0 differs"),
}  # fmt: skip
ALL_REFUSED = pytest.mark.parametrize("name", REFUSED)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def exact_trace(module, sample):
    made = make_sample(module, sample)
    graph = b_to_d(trace(module, made), module, made)
    replay_check(graph, module, made)


@ALL_REFUSED
def test_inexact_traces_are_refused_with_the_reason(name):
    build, reason = REFUSED[name]
    with pytest.raises(TraceError, match=reason):
        exact_trace(build(), torch.ones(3, 4))


@ALL_REFUSED
def test_the_pipeline_refuses_them_and_leaves_the_module_as_it_was(name):
    module, sample = with_gradients(REFUSED[name][0]()), torch.ones(3, 4)
    before = state_of(module)
    with pytest.raises(TraceError):
        make_all_graphs(module, sample)
    assert state_of(module) == before
    assert sample.sum() == 12


def test_the_error_of_the_module_is_the_cause():
    with pytest.raises(TraceError, match="Program cannot be traced: ZeroDivisionError") as caught:
        exact_trace(program(lambda m, x: x / (1 // 0)), rows())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_mismatch_is_a_trace_error_and_ours():
    assert issubclass(ReplayMismatch, TraceError)
    assert issubclass(TraceError, RockmateError)


def test_sparse_gradients_are_refused():
    with pytest.raises(TraceError, match=r"gradient of 0.weight is torch.sparse_coo.*sparse=False"):
        exact_trace(nn.Sequential(nn.Embedding(5, 4, sparse=True), linear()), torch.tensor([1, 3]))


def test_a_convolution_without_gradient_is_refused():
    """The tracer does not tell whether a convolution ran without gradient."""
    module = program(silent_convolution, teacher=nn.Conv2d(3, 3, 3), weight=nn.Parameter(torch.ones(3, 6, 6)))
    with pytest.raises(ReplayMismatch, match=r"gradient of teacher.weight exists on one side only"):
        exact_trace(module, rows(2, 3, 8, 8))


def test_a_zero_dim_double_of_the_forward_is_refused_where_a_number_would_promote_otherwise():
    module = program(lambda m, x: (x * torch.tensor(2.5, dtype=torch.float64), m.layer.weight))
    with pytest.raises(ReplayMismatch, match=r"torch.float32\[3\] instead of torch.float64\[3\]"):
        exact_trace(module, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("write", [torch.relu_, lambda x: x.mul_(2), lambda x: x[0].add_(1)])
def test_a_forward_that_writes_into_its_input_is_refused_before_it_changes_the_sample(write):
    sample = rows()
    kept = bytes_of(sample)
    with pytest.raises(TraceError, match=r"writes into input 0 of Program in place.*Clone the input"):
        make_all_graphs(program(lambda m, x: (write(x), m.layer(x))[1]), sample)
    assert bytes_of(sample) == kept


def test_autocast_in_force_is_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TraceError, match="autocast is on for cpu"):
        make_all_graphs(linear(), rows())


@pytest.mark.xfail(reason="data that is constant in the sample stays so: a branch on it is not seen", strict=True)
@pytest.mark.parametrize(
    "mask", [torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.int64)], ids=["bool", "int"]
)
def test_a_branch_on_a_mask_of_ones_is_refused(mask):
    """As models do that skip the mask where nothing is padded: a padded batch would be treated as a full one."""
    module = program(lambda m, x, k: m.layer(x) if bool(k.all()) else m.layer(x) * k[:, None])
    with pytest.raises(ReplayMismatch):
        exact_trace(module, (rows(), mask))
