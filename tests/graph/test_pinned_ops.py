"""Operations that must not be repeated say why; which they are depends on the device."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkgb import SGraph, d_to_s, make_B, make_sample, to_networkx
from rkgb.ir.call import Call, Ref
from rkgb.ir.dgraph import DGraph, DNode
from rkgb.passes.b_to_d import b_to_d
from rkgb.passes.d_to_s import run_once
from rkgb.passes.nondeterminism import reason_against_repetition
from tests.graph.cases import program
from tests.graph.programs import Program, linear, rows, simplified, traced

ZEROS = torch.zeros(3, 4)


def positions(x: Tensor) -> Tensor:
    """Whole numbers from 0 to 2 in the shape of `x`."""
    return (x.abs() * 10).long() % 3


# Forwards on a [3, 4] sample, and the operation in question.
ARBITRARY_ON_CUDA = {
    "topk": lambda m, x: m.layer(x).topk(2).values,
    "sort": lambda m, x: m.layer(x).sort().values,
    "argsort": lambda m, x: m.layer(x).gather(1, m.layer(x).argsort()),
    "kthvalue": lambda m, x: m.layer(x).kthvalue(2).values,
    "mode": lambda m, x: m.layer(x).mode().values,
    "median": lambda m, x: m.layer(x).median(1).values,
    "scatter": lambda m, x: ZEROS.scatter(0, positions(x), m.layer(x)),
    "scatter_add": lambda m, x: ZEROS.scatter_add(0, positions(x), m.layer(x)),
    "scatter_reduce": lambda m, x: ZEROS.scatter_reduce(0, positions(x), m.layer(x), "mean"),
    "index_add": lambda m, x: ZEROS.index_add(0, positions(x[:, 0]), m.layer(x)),
    "index_add_": lambda m, x: torch.zeros(3, 4).index_add_(0, positions(x[:, 0]), m.layer(x)),
    "index_copy": lambda m, x: ZEROS.index_copy(0, positions(x[:, 0]), m.layer(x)),
    "cumsum": lambda m, x: m.layer(x).cumsum(0),
    "cumprod": lambda m, x: m.layer(x).cumprod(0),
}
ARBITRARY_EVERYWHERE = {
    "index_put": lambda m, x: ZEROS.index_put((positions(x[:, 0]),), m.layer(x)),
    "index_put_": lambda m, x: torch.zeros(3, 4).index_put_((positions(x[:, 0]),), m.layer(x), accumulate=True),
    "put": lambda m, x: ZEROS.put(positions(x), m.layer(x), accumulate=True),
}
FIXED_EVERYWHERE = {
    "linear": lambda m, x: m.layer(x),
    "_convolution": lambda m, x: F.conv1d(m.layer(x)[None], torch.ones(3, 3, 1)),
    "dropout": lambda m, x: F.dropout(m.layer(x), 0.5, training=True),
    "max": lambda m, x: m.layer(x).max(1).values,
    "median": lambda m, x: m.layer(x).median(),  # the value alone
    "sort": lambda m, x: m.layer(x).sort(stable=True, dim=1).values,
    "scatter": lambda m, x: m.layer(x) * ZEROS.scatter(0, positions(x), 1.0),
    "cumsum": lambda m, x: m.layer(x) * positions(x).cumsum(0),
    "gather": lambda m, x: m.layer(x).gather(0, positions(x)),
    "index_put_": lambda m, x: (m.layer(x) * 2).index_put_((x > 0,), torch.tensor(0.0)),
}


def moved(graph: DGraph, kind: str) -> DGraph:
    """The same graph, as if its values were on a device of that kind."""
    return replace(graph, values={n: replace(i, device=torch.device(kind)) for n, i in graph.values.items()})


def kept(forward, op_name: str, kind: str) -> bool:
    """Whether the nodes that hold this operation run once, on that kind of device."""
    graph = d_to_s(moved(traced(program(forward), rows()), kind))
    nodes = [node for node in graph if any(op.call.op_name == op_name for op in node.ops)]
    assert nodes, f"{op_name} is not in {graph}"
    (answer,) = {not node.recomputable for node in nodes}
    return answer


@pytest.mark.parametrize("name", ARBITRARY_ON_CUDA)
def test_what_may_differ_on_a_gpu_runs_once_there_and_again_on_the_cpu(name):
    assert kept(ARBITRARY_ON_CUDA[name], name, "cuda")
    assert not kept(ARBITRARY_ON_CUDA[name], name, "cpu")


@pytest.mark.parametrize("name", ARBITRARY_EVERYWHERE)
def test_parallel_writes_that_may_meet_run_once_on_any_device(name):
    assert kept(ARBITRARY_EVERYWHERE[name], name, "cuda")
    assert kept(ARBITRARY_EVERYWHERE[name], name, "cpu")


@pytest.mark.parametrize("name", FIXED_EVERYWHERE)
def test_what_repeats_itself_may_run_again_on_any_device(name):
    assert not kept(FIXED_EVERYWHERE[name], name, "cuda")
    assert not kept(FIXED_EVERYWHERE[name], name, "cpu")


def test_the_reason_names_the_operation_and_the_device():
    graph = d_to_s(moved(traced(program(ARBITRARY_ON_CUDA["topk"]), rows()), "cuda"))
    (node,) = [node for node in graph if node.keep_reason]
    assert node.keep_reason == "topk_0 may order equal elements in another way each time on cuda"
    assert f"runs once: {node.keep_reason}" in str(graph)
    assert to_networkx(graph).nodes["topk_0"]["notes"] == (f"never repeated: {node.keep_reason}",)


def test_collectives_run_once_whatever_they_are_given():
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this build of PyTorch has no torch.distributed")
    for function in (torch.ops.c10d.allreduce_.default, torch.ops._c10d_functional.all_reduce.default):
        op = DNode("all_reduce_0", Call(function, (Ref("x"), "sum", "0")), Ref("y"), True, None)
        assert "collective" in reason_against_repetition(op, {})


def test_operations_given_with_a_reason_run_once_besides_the_others():
    graph = simplified(program(lambda m, x: m.layer(x).exp().relu_().sin()), rows())
    once = run_once(graph, {"relu_0": "relu_0 is precious"})
    assert [node.keep_reason for node in once] == ["", "relu_0 is precious", ""]
    assert all(node.recomputable for node in graph)  # the graph that was given is as it was
    again = run_once(once, {"exp_0": "exp_0 is precious, too"})
    assert [node.keep_reason for node in again] == ["", "relu_0 is precious", ""]


# ---- where operations ran -----------------------------------------------------------------------------------


class Calls(nn.Module):
    """Modules called twice, held twice, called by another than their holder, and not held at all."""

    def __init__(self) -> None:
        super().__init__()
        shared = linear()
        self.first = Program(lambda m, x: m.layer(x).tanh(), layer=shared)
        self.second = Program(lambda m, x: m.layer(m.inner(x)).sin(), layer=shared, inner=nn.Sequential(nn.GELU()))
        self.caller = Program(lambda m, x: self.first(x).cos())
        self.outside = [nn.Softplus()]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.second(self.first(x)))
        return self.outside[0](self.caller(x)).exp()


@pytest.mark.parametrize("tracer", ["jit", "record"])
def test_both_front_ends_know_all_modules_in_whose_calls_an_operation_ran(tracer):
    model, sample = Calls(), rows()
    graph = b_to_d(make_B(model, sample, tracer=tracer), model, make_sample(model, sample))
    found = [
        (op.call.op_name, [model.get_submodule(path) for path in op.source.modules])
        for op in graph
        if op.call.op_name not in ("linear", "addmm", "t")
    ]
    first, second, caller = model.first, model.second, model.caller
    assert found == [
        ("tanh", [first]),
        ("gelu", [second, second.inner, second.inner[0]]),
        ("sin", [second]),
        ("tanh", [first]),
        ("tanh", [caller, first]),
        ("cos", [caller]),
        ("softplus", []),
        ("exp", []),
    ]
    layers = [op for op in graph if op.call.op_name in ("linear", "addmm")]
    called = [[model.get_submodule(path) for path in op.source.modules] for op in layers]
    shared = first.layer
    assert called == [[first, shared], [second, shared], [first, shared], [caller, first, shared]]


def test_the_calls_that_an_operation_ran_in_survive_json():
    from rkgb.export import json_form

    graph: SGraph = simplified(Calls(), rows())
    again = json_form.loads(json_form.dumps(graph))
    assert [op.source for op in again.dgraph] == [op.source for op in graph.dgraph]
