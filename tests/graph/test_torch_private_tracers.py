"""What is relied on of private names of tracers and compilers, and of operators: see `test_torch_private.py`."""

import gc
import subprocess
import sys
import warnings
from typing import Optional

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.torch_private import autograd, tracers


class Asks(torch.nn.Module):
    """Notes what `ask` tells while it is called."""

    def __init__(self, ask):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.ask = ask
        self.told = []

    def forward(self, x):
        self.told.append(self.ask())
        return self.inner(x)


def by_jit(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(module, torch.ones(1, 2), check_trace=False)


def test_jit_is_told_and_so_is_who_stands_in_for_it():
    assert not tracers.is_tracing()
    module = Asks(tracers.is_tracing)
    by_jit(module)
    assert module.told == [True]
    holder, name = tracers.IS_TRACING
    before = getattr(holder, name)
    setattr(holder, name, lambda: True)
    try:
        assert tracers.is_tracing()
        assert torch.jit.is_tracing()
        with tracers.plain_is_tracing():
            assert not tracers.is_tracing()
        assert tracers.is_tracing()
    finally:
        setattr(holder, name, before)
    assert not tracers.is_tracing()


def test_jit_does_not_see_what_is_hidden_from_it():
    def hidden():
        with tracers.unseen_by_jit():
            torch.ones(3).sin()
            return tracers.is_tracing()

    def seen():
        torch.ones(3).sin()

    kinds = []
    for ask in (hidden, seen):
        module = Asks(ask)
        kinds.append({node.kind() for node in by_jit(module).graph.nodes()})
    assert module.told == [None]
    assert "aten::sin" not in kinds[0]
    assert kinds[0] < kinds[1] | {"aten::sin"}


def names_by_jit(module):
    return {value.debugName() for node in by_jit(module).graph.nodes() for value in node.outputs()}


def test_jit_looks_for_no_names_where_nobody_wants_them():
    class Named(torch.nn.Module):
        def forward(self, x):
            squared = x * x
            return squared.sin()

    assert any("squared" in name for name in names_by_jit(Named()))
    with tracers.unnamed_by_jit():
        assert not any("squared" in name for name in names_by_jit(Named()))
    assert any("squared" in name for name in names_by_jit(Named()))


@torch.jit.script
def scaled(x, scale: float, bias: Optional[torch.Tensor] = None):  # noqa: UP045 - torch.jit reads no other form
    if bias is None:
        return x * scale
    return x * scale + bias


@torch.jit.script
def doubled(x):
    return scaled(x, 2.0)


class Calls(torch.nn.Module):
    """Calls a submodule twice, a function of torch.jit, and uses a tensor that nothing else knows."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.table = torch.ones(3, 2)

    def forward(self, x):
        return doubled(self.inner(self.inner(x))) + self.table[:1]


def kinds_in(graph):
    return [node.kind() for node in graph.nodes()]


def test_jit_has_a_graph_of_each_call_of_a_submodule():
    traced = by_jit(Calls())
    calls = [node for node in tracers.graph_of_method(traced).nodes() if node.kind() == "prim::CallMethod"]
    assert [node.s("name") for node in calls] == ["forward", "forward1"]
    for node in calls:
        assert "aten::linear" in kinds_in(tracers.graph_of_method(traced.inner, node.s("name")))


def test_functions_of_jit_are_told_without_what_constants_decide():
    (call,) = [node for node in by_jit(Calls()).graph.nodes() if node.kind() == "prim::CallFunction"]
    assert "prim::If" in kinds_in(scaled.graph)
    kinds = kinds_in(tracers.graph_of_function(call))
    assert "aten::mul" in kinds
    assert "prim::If" not in kinds
    assert "prim::CallFunction" not in kinds


def test_jit_s_graphs_hold_constants_until_they_are_let_go():
    def table_of(forget):
        module = Calls()
        module.scripted = torch.jit.script(torch.nn.Tanh())
        traced = by_jit(module)
        if forget:
            tracers.let_go_of_graphs(traced, module)
            assert not kinds_in(tracers.graph_of_method(traced))
            assert not kinds_in(tracers.graph_of_method(traced.inner))
        assert torch.equal(module.scripted(torch.ones(2)), torch.ones(2).tanh())  # the caller's, and as it was
        return StorageWeakRef(module.table.untyped_storage())  # the memory: Python's object may go before

    kept, let_go = table_of(forget=False), table_of(forget=True)
    gc.collect()
    assert not kept.expired()  # or nothing would have to be let go of
    assert let_go.expired()


def test_warnings_of_jit_have_a_class():
    module = Asks(lambda: bool(torch.ones(1) > 0) and None)
    with pytest.warns(tracers.TracerWarning):
        by_jit(module)


def test_export_is_told_and_records_nothing_of_a_constant():
    called = []

    def note():
        called.append(tracers.is_exporting())

    tracers.as_constant(note)
    assert not tracers.is_exporting()
    module = Asks(note)
    module.told = type("Nothing", (), {"append": staticmethod(lambda value: None)})()
    exported = torch.export.export(module, (torch.ones(1, 2),), strict=True)
    assert True in called
    assert torch.equal(exported.module()(torch.ones(1, 2)), module.inner(torch.ones(1, 2)))


def compiled(function):
    """`function` compiled by a backend that counts its graphs."""
    counter = pytest.importorskip("torch._dynamo.testing").CompileCounter()
    torch.compiler.reset()
    return torch.compile(function, backend=counter), counter


def test_skipped_code_is_not_compiled_nor_what_it_calls():
    def inner(x):
        return x.cos()

    def skipped(x):
        return inner(x).sin()

    assert tracers.skip_code(skipped)
    function, counter = compiled(skipped)
    assert torch.equal(function(torch.ones(2)), torch.ones(2).cos().sin())
    assert counter.frame_count == 0


def test_a_function_is_kept_from_the_compiler_by_code_around_it():
    function, counter = compiled(tracers.disable_compiler(lambda x: x.sin()))
    assert torch.equal(function(torch.ones(2)), torch.ones(2).sin())
    assert counter.frame_count == 0


def test_compiled_code_ends_its_graph_where_it_calls_a_marked_function():
    def marked(x):
        return x.sin()

    tracers.mark_uncompiled(marked, "for this reason")
    assert tracers.skip_code(marked)  # or it is a graph of its own
    function, counter = compiled(lambda x: marked(x.cos()).exp())
    assert torch.equal(function(torch.ones(2)), torch.ones(2).cos().sin().exp())
    assert counter.op_count == 2  # the cosine and the exponential
    whole = torch.compile(lambda x: marked(x), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="for this reason"):
        whole(torch.ones(2))


def test_compiled_modules_have_a_class_once_the_compiler_is_there():
    wrapper = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert tracers.compiler_is_imported()
    assert isinstance(wrapper, tracers.compiled_wrappers())
    assert not isinstance(torch.nn.Linear(1, 1), tracers.compiled_wrappers())
    code = "from rkgb.torch_private import tracers; print(tracers.compiler_is_imported(), tracers.compiled_wrappers())"
    alone = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert alone.stdout.split() == ["False", "()"]


def test_versions_may_be_put_back():
    tensor = torch.ones(2)
    made = tensor * torch.ones(2, requires_grad=True)  # which saves it
    before = tensor._version
    tensor.add_(1).sub_(1)
    autograd.set_versions((tensor,), (before,))
    made.sum().backward()
    assert tensor._version == before


def test_derivatives_of_operators_are_told_from_other_functions():
    applied = []

    @torch.library.custom_op("rockmate_private::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    twice.register_autograd(lambda ctx, gradient: 2 * gradient)
    for made in (twice(torch.ones(1, requires_grad=True)), Other.apply(torch.ones(1, requires_grad=True))):
        applied.append(autograd.is_of_an_operator(made.grad_fn._forward_cls))
    assert applied == [True, False]
