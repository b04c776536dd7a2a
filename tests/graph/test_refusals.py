"""What cannot be traced exactly is refused, saying why; the module is left as it was all the same."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import (
    GuardError,
    ReplayMismatch,
    RockmateError,
    TraceError,
    TraceWarning,
    make_all_graphs,
    make_sample,
    pipeline,
    trace,
)
from rkgb.passes.b_to_d import b_to_d
from rkgb.replay.replay import replay_check, run_graph
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


def keeps_its_gradient(tensor):
    tensor.retain_grad()
    return tensor


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


READS = "reads out of its data: .*{}.* at .*test_refusals.py"
OTHER_DATA = "does not hold for other data: at .*test_refusals.py:.* the module reads"
# By name: what builds the module, why torch.jit.trace alone is refused, and why both front ends are ("" where recording
# the operations is exact).
REFUSED = {
    "item_of_data": (
        lambda: program(lambda m, x: m.layer(x) * x.sum().item()),
        READS.format("_local_scalar_dense"),
        OTHER_DATA,
    ),
    "number_from_data": (
        lambda: program(lambda m, x: m.layer(x) * float(x.sum())),
        READS.format("_local_scalar_dense"),
        OTHER_DATA,
    ),
    "size_from_data": (
        lambda: program(lambda m, x: m.layer(x)[:, : int(x.abs().max()) + 1]),
        READS.format("_local_scalar_dense"),
        OTHER_DATA,
    ),
    "branch_on_data": (
        lambda: program(lambda m, x: m.layer(x) if x.sum() > 0 else x),
        READS.format("_local_scalar_dense"),
        OTHER_DATA,
    ),
    "through_numpy": (
        lambda: program(lambda m, x: m.layer(x) + torch.from_numpy(x.numpy() * 2)),
        READS.format("numpy"),
        OTHER_DATA,
    ),
    "sum_of_a_python_list": (
        lambda: program(lambda m, x: m.layer(x) * sum(x.flatten().tolist())),
        READS.format("tolist"),
        OTHER_DATA,
    ),
    "number_from_a_buffer": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None)),
        READS.format("_local_scalar_dense").split(" at ")[0],
        "the module reads 2 out of its data",
    ),
    "write_without_gradient": (
        lambda: program(lambda m, x: halved_without_gradient(m.layer(x)).tanh()),
        "gradient of layer.weight differs .* first operation that differs is %linear_0",
        "",
    ),
    "hook_on_a_tensor": (
        lambda: program(lambda m, x: with_hook(m.layer(x)).relu()),
        "registers a hook on a tensor",
        "test_refusals.py:.* registers a hook on a tensor",
    ),
    "kept_gradient_of_a_tensor": (
        lambda: program(lambda m, x: keeps_its_gradient(m.layer(x)).relu()),
        "has a tensor keep its gradient",
        "test_refusals.py:.* has a tensor keep its gradient",
    ),
    "another_buffer": (
        lambda: program(replaces_its_buffer, mean=torch.ones(4)),
        "buffer mean differs",
        "buffer mean differs",
    ),
    "custom_function_that_writes": (
        lambda: program(lambda m, x: DoubledInPlace.apply(m.layer(x))),
        "output 0 differs",
        "",
    ),
    "unused_random_numbers": (lambda: program(lambda m, x: (torch.rand(2), m.layer(x))[1]), "random stream", ""),
    "another_result_each_time": (
        lambda: grows(itertools.count()),
        "differs from itself between two runs",
        "differs from itself",
    ),
    "python_random_numbers": (
        lambda: program(lambda m, x: m.layer(x) * random.random()),
        "draws from Python's random numbers",
        "draws from Python's random numbers",
    ),
    "scripted_module": (
        lambda: nn.Sequential(linear(), torch.jit.script(linear())),
        "submodule '1' is compiled",
        "submodule '1' is compiled",
    ),
    "scripted_function": (
        lambda: program(lambda m, x: doubled_if_positive(m.layer(x) * 0 + x)),
        READS.format("_local_scalar_dense"),
        "reads False out of its data",
    ),
    "backward_hook_on_a_module": (
        lambda: nn.Sequential(with_backward_hook(linear())),
        "submodule '0' has a backward hook",
        "has a backward hook",
    ),
    "no_tensor_returned": (lambda: program(lambda m, x: 3.0), "returned no tensor", "returned no tensor"),
}
ALL_REFUSED = pytest.mark.parametrize("name", REFUSED)


def exact_trace(module, sample):
    made = make_sample(module, sample)
    graph = b_to_d(trace(module, made), module, made)
    replay_check(graph, module, made)


@ALL_REFUSED
def test_inexact_traces_by_jit_are_refused_with_the_reason(name):
    build, reason, _ = REFUSED[name]
    with pytest.raises(TraceError, match=reason):
        exact_trace(build(), torch.ones(3, 4))


@ALL_REFUSED
def test_what_neither_front_end_traces_is_refused_and_the_module_left_as_it_was(name):
    build, _, reason = REFUSED[name]
    module, sample = with_gradients(build()), torch.ones(3, 4)
    before = state_of(module)
    if reason:
        with pytest.raises(TraceError, match=reason):
            make_all_graphs(module, sample)
    else:
        make_all_graphs(module, sample)
    assert state_of(module) == before
    assert sample.sum() == 12


def test_where_both_front_ends_fail_the_note_tells_of_the_first():
    with pytest.raises(ReplayMismatch) as caught:
        make_all_graphs(REFUSED["item_of_data"][0](), torch.ones(3, 4))
    assert caught.value.__notes__ == [
        "(torch.jit.trace, tried first: Program reads out of its data: guard(_local_scalar_dense == 12.0) at (root) "
        f"test_refusals.py:{caught.value.__notes__[0].rpartition('.py:')[2].partition('.')[0]}. torch.jit.trace takes "
        'what it read for fixed, and nothing would check it: use tracer="record".)'
    ]


def test_the_error_of_a_module_that_does_not_run_on_the_sample_is_its_own():
    with pytest.raises(ZeroDivisionError) as caught:
        make_all_graphs(program(lambda m, x: x / (1 // 0)), rows())
    assert caught.value.__notes__ == ["(raised by Program itself on the sample with which it was to be planned)"]


def test_an_error_that_tracing_alone_meets_is_a_refusal_with_that_cause():
    with pytest.raises(
        TraceError, match="Program cannot be traced: ZeroDivisionError.*The module runs by itself"
    ) as caught:
        exact_trace(program(lambda m, x: m.layer(x) / (1 // (not torch._C._is_tracing()))), rows())
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


def test_autocast_in_force_is_recorded_and_jit_refused():
    module, sample = linear(), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TraceError, match="autocast is on for cpu, whose casts torch.jit.trace does not record"):
            make_all_graphs(module, sample, tracer="jit")
        graph = make_all_graphs(module, sample).D_graph
        expected = module(sample)
    assert [node.call.op_name for node in graph].count("_to_copy") == 3
    assert torch.equal(run_graph(graph, module, make_sample(module, sample)), expected)


@pytest.mark.parametrize(
    "mask", [torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.int64)], ids=["bool", "int"]
)
def test_a_branch_that_the_samples_data_hide_is_guarded(mask):
    """As models do that skip the mask where nothing is padded: a padded batch must not be treated as a full one."""
    module = program(lambda m, x, k: m.layer(x) if bool(k.all()) else m.layer(x) * k[:, None])
    made = make_sample(module, (rows(), mask))
    with pytest.raises(TraceError, match=READS.format("_local_scalar_dense")):
        trace(module, made)
    graph = make_all_graphs(module, made).D_graph
    assert [node.is_guard for node in graph].count(True) == 1
    padded = mask.clone()
    padded[1] = 0
    batch = rows()
    assert torch.equal(run_graph(graph, module, make_sample(module, (batch, mask))), module(batch, mask))
    with pytest.raises(GuardError, match=r"test_refusals.py:\d+ the module reads False .* but read True"):
        run_graph(graph, module, make_sample(module, (batch, padded)))


def test_a_number_read_out_of_integers_that_shuffling_changes_is_guarded():
    """As models do that check the lengths of their sentences, or cut to the longest one."""
    module = program(lambda m, x, words: m.layer(x[: int((words != 0).sum(1).max())]))
    words = torch.tensor([[5, 7, 3, 2], [0, 0, 0, 0], [0, 0, 0, 0]])
    with pytest.warns(TraceWarning, match="reads [123] .* but read 4"):
        _, graph = pipeline.exact_trace(module, make_sample(module, (rows(6, 4), words)), may_branch=True)
    same_longest, shorter = words.flip(0) * 2, words.tril(1)
    batch = rows(6, 4)
    assert torch.equal(run_graph(graph, module, make_sample(module, (batch, same_longest))), module(batch, words))
    with pytest.raises(GuardError, match=r"the module reads 2 .* but read 4"):
        run_graph(graph, module, make_sample(module, (batch, shorter)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "read",
    [
        lambda: torch.rand(()) < 0.5,
        lambda: torch.empty(3).bernoulli_(0.5).sum() > 1,
        lambda: torch.randperm(2)[0] == 0,
    ],
    ids=["rand", "bernoulli_", "randperm"],
)
def test_a_way_drawn_at_random_is_refused_whichever_it_is(read, seed):
    """As models do that drop whole layers: a plan of one way would end at the first step that draws another."""
    torch.manual_seed(seed)
    module = program(lambda m, x: m.layer(x) if read() else x * m.layer.weight[0])
    with pytest.raises(TraceError, match=r"test_refusals.py:\d+ forward reads .* out of random numbers .*layerdrop=0"):
        make_all_graphs(module, rows())


def test_random_numbers_that_stay_in_tensors_are_no_way():
    module = program(lambda m, x: torch.where(torch.rand(3, 1) < 0.5, m.layer(x), x) * F.dropout(x, 0.5).sum().sign())
    assert not any(node.is_guard for node in make_all_graphs(module, rows()).D_graph)
