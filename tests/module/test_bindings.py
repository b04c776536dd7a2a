"""PyTorch's Python functions that generated code calls are the very overloads that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.ir.call import Call, Ref
from rkgb.tree import leaves
from rockmate.runtime.bindings import BINDINGS, binding

aten = torch.ops.aten
GENERATOR = torch.Generator()


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def fresh(*shape: int) -> torch.Tensor:
    """A tensor that may be written in place, and takes part in the graph."""
    return x(*shape).clone()


# Calls as traces have them: arguments by place, those behind the star by name.
CALLS: dict[Any, Callable[[], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    aten.expand.default: lambda: [((x(1, 3), [2, 3]), {}), ((x(3), [2, -1]), {"implicit": False})],
    aten.flatten.using_ints: lambda: [((x(2, 3, 4), 1), {}), ((x(2, 3, 4), 1, -1), {})],
    aten.permute.default: lambda: [((x(2, 3, 4), [2, 0, 1]), {})],
    aten.reshape.default: lambda: [((x(2, 3, 4), [6, -1]), {}), ((x(2, 3).transpose(0, 1), [6]), {})],
    aten.select.int: lambda: [((x(2, 3), 1, 0), {})],
    aten.squeeze.dim: lambda: [((x(2, 1, 3), 1), {})],
    aten.t.default: lambda: [((x(2, 3),), {})],
    aten.transpose.int: lambda: [((x(2, 3), 0, -1), {})],
    aten.unsqueeze.default: lambda: [((x(2, 3), -1), {})],
    aten.view.default: lambda: [((x(2, 6), [3, -1]), {})],
    aten.add.Tensor: lambda: [((x(2, 3), x(3)), {}), ((x(2, 3), x(2, 3)), {"alpha": 2})],
    aten.add_.Tensor: lambda: [((fresh(2, 3), x(3)), {}), ((fresh(2, 3), x(2, 3)), {"alpha": 1})],
    aten.bernoulli_.float: lambda: [
        ((torch.empty(5), 0.5), {}),
        ((torch.empty(5), 0.5), {"generator": GENERATOR}),
    ],
    aten.cos.default: lambda: [((x(3),), {})],
    aten.exp.default: lambda: [((x(3),), {})],
    aten.gelu.default: lambda: [((x(3),), {}), ((x(3),), {"approximate": "tanh"})],
    aten.hardtanh.default: lambda: [((x(3),), {}), ((x(3), 0.0, 6.0), {})],
    aten.hardtanh_.default: lambda: [((fresh(3),), {}), ((fresh(3), 0.0, 6.0), {})],
    aten.mul.Tensor: lambda: [((x(2, 3), x(3)), {})],
    aten.mul_.Tensor: lambda: [((fresh(2, 3), x(3)), {})],
    aten.neg.default: lambda: [((x(3),), {})],
    aten.relu.default: lambda: [((x(3),), {})],
    aten.relu_.default: lambda: [((fresh(3),), {})],
    aten.rsqrt.default: lambda: [((x(3).abs(),), {})],
    aten.sigmoid.default: lambda: [((x(3),), {})],
    aten.silu.default: lambda: [((x(3),), {})],
    aten.sin.default: lambda: [((x(3),), {})],
    aten.sub.Tensor: lambda: [((x(2, 3), x(3)), {}), ((x(2, 3), x(3)), {"alpha": 1})],
    aten.tanh.default: lambda: [((x(3),), {})],
    aten.where.self: lambda: [((x(3) > 0, x(3), x(1)), {})],
    aten.cat.default: lambda: [(([x(2, 3), x(1, 3)],), {}), (([x(2, 3), x(2, 1)], 1), {})],
    aten.clone.default: lambda: [((x(2, 3),), {}), ((x(2, 3).t(),), {"memory_format": torch.contiguous_format})],
    aten.contiguous.default: lambda: [
        ((x(2, 3).t(),), {}),
        ((x(2, 3).t(),), {"memory_format": torch.contiguous_format}),
    ],
    aten.empty_strided.default: lambda: [
        (([2, 3], [3, 1]), {"dtype": torch.float32, "device": torch.device("cpu")}),
        (([2], [1]), {"dtype": torch.int64, "layout": torch.strided, "device": "cpu", "pin_memory": False}),
    ],
    aten.adaptive_avg_pool2d.default: lambda: [((x(1, 2, 4, 4), [1, 1]), {}), ((x(1, 2, 5, 5), [2, 2]), {})],
    aten.addmm.default: lambda: [((x(3), x(2, 4), x(4, 3)), {}), ((x(3), x(2, 4), x(4, 3)), {"beta": 1, "alpha": 2})],
    aten.avg_pool2d.default: lambda: [((x(1, 2, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None), {})],
    aten.baddbmm.default: lambda: [((x(2, 3, 3), x(2, 3, 4), x(2, 4, 3)), {"beta": 0, "alpha": 0.5})],
    aten.batch_norm.default: lambda: [
        ((x(4, 3), x(3), x(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5, True), {}),
        ((x(4, 3), None, None, torch.zeros(3), torch.ones(3), False, 0.1, 1e-5, False), {}),
    ],
    aten.bmm.default: lambda: [((x(2, 3, 4), x(2, 4, 3)), {})],
    aten.conv2d.default: lambda: [
        ((x(1, 2, 5, 5), x(3, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 1), {}),
        ((x(1, 2, 5, 5), x(2, 1, 3, 3), x(2), [2, 2], [0, 0], [1, 1], 2), {}),
        ((x(1, 2, 5, 5), x(3, 2, 3, 3), x(3)), {}),
    ],
    aten.embedding.default: lambda: [
        ((x(5, 3), torch.tensor([1, 4])), {}),
        ((x(5, 3), torch.tensor([1, 4]), -1, False, False), {}),
        ((x(5, 3), torch.tensor([1, 4]), 1, True), {}),
    ],
    aten.linear.default: lambda: [((x(2, 4), x(3, 4)), {}), ((x(2, 2, 4), x(3, 4), x(3)), {})],
    aten.max_pool2d_with_indices.default: lambda: [((x(1, 2, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False), {})],
    aten.mean.dim: lambda: [
        ((x(2, 3, 4), [1, 2]), {}),
        ((x(2, 3), [-1], True), {"dtype": torch.float64}),
        ((x(2, 3), None), {}),
    ],
    aten.mm.default: lambda: [((x(2, 3), x(3, 2)), {})],
    aten.native_batch_norm.default: lambda: [
        ((x(4, 3), x(3), x(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5), {})
    ],
    aten.native_group_norm.default: lambda: [((x(2, 4, 3), x(4), x(4), 2, 4, 3, 2, 1e-5), {})],
    aten.native_layer_norm.default: lambda: [
        ((x(2, 4), [4], x(4), x(4), 1e-5), {}),
        ((x(2, 4), [4], None, None, 1e-5), {}),
    ],
    aten.softmax.int: lambda: [((x(2, 3), -1), {}), ((x(2, 3), 1, torch.float64), {}), ((x(2, 3), 1, None), {})],
}


def told(argument: Any) -> Any:
    """What there is to compare of an argument."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return type(argument) if isinstance(argument, torch.Generator) else repr(argument)


class Recorded(TorchDispatchMode):
    """Notes all operations that are dispatched, with the layouts and other values of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if (name, value) != ("pin_memory", False)}
        self.calls.append((function, [told(one) for one in args], {name: told(one) for name, one in named.items()}))
        return function(*args, **(kwargs or {}))


def told_of(node: Any) -> Any:
    """An autograd node, with what it has of its own, and those before it."""
    if node is None:
        return None
    own = {name: repr(getattr(node, name)) for name in dir(node) if name.startswith("_saved")}
    return node.name(), own, [told_of(before) for before, _ in node.next_functions]


def run(function: Any, make: Any, variant: int) -> tuple[list[Any], list[torch.Tensor], Any, torch.Tensor]:
    """Operations dispatched, results, the graph behind them, and the random stream after it."""
    torch.manual_seed(0)
    GENERATOR.manual_seed(0)
    args, kwargs = make()[variant]
    with Recorded() as recorded:
        result = function(*args, **kwargs)
    found = leaves(result)
    return recorded.calls, found, [told_of(one.grad_fn) for one in found], torch.get_rng_state()


VARIANTS = [(op, variant) for op, make in CALLS.items() for variant in range(len(make()))]


@pytest.mark.parametrize(("op", "variant"), VARIANTS, ids=[f"{op}-{variant}" for op, variant in VARIANTS])
def test_the_same_operations_results_and_graph(op, variant):
    expected = run(op, CALLS[op], variant)
    found = run(BINDINGS[op], CALLS[op], variant)
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    assert torch.equal(found[3], expected[3])
    for one, other in zip(found[1], expected[1], strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert op is aten.empty_strided.default or torch.equal(one, other)


def test_every_binding_is_tested():
    assert CALLS.keys() == BINDINGS.keys()


def test_a_number_in_a_tensors_place_has_no_binding():
    assert binding(Call(aten.mul.Tensor, (Ref("a"), Ref("b")))) is BINDINGS[aten.mul.Tensor]
    assert binding(Call(aten.mul.Tensor, (Ref("a"), 2.0))) is None
    assert binding(Call(aten.batch_norm.default, (Ref("a"), None, None, None, None, True, 0.1, 1e-5, True))) is not None
    assert binding(Call(aten.mul.Scalar, (Ref("a"), 2.0))) is None
    assert binding(Call(torch.mul, (Ref("a"), Ref("b")))) is None
