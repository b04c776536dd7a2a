"""What a region is compiled to: its two halves, what they hand on, and gradients of any kind that come back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.ir.compiled import CompiledCall
from rkgb.ir.values import info_of
from rkgb.replay.step_record import bitwise_equal
from rockmate.regions.build import kernels_of

aten = torch.ops.aten


def normalised(x: Tensor, r: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    total = x * mask + r
    return [total, aten.native_layer_norm(total, [total.shape[-1]], weight, bias, 1e-5)[0]]


def root_mean_square(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight]


def gate(a: Tensor, b: Tensor) -> list[Tensor]:
    return [F.silu(a) * b]


def attention(x: Tensor, hidden: Tensor) -> list[Tensor]:
    return [torch.softmax((x / 8).masked_fill(hidden, float("-inf")), -1)]


def several(x: Tensor, y: Tensor) -> list[Tensor]:
    positive = x > 0
    return [torch.where(positive, x, y), positive, (x * y).sum(-1)]


def batch_normalised(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Two of them, and the statistics of the batch, which are the last four of its outputs."""
    made = [aten.native_batch_norm(one, weight, bias, None, None, True, 0.1, 1e-5)[0] for one in (x, y)]
    with torch.no_grad():
        found = [torch.var_mean(one, dim=[0, 2, 3], correction=0, keepdim=True) for one in (x, y)]
    return [torch.relu(made[0] + made[1]), *(one.reshape(-1) for pair in found for one in pair[::-1])]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_()


CASES = {
    "normalised": (normalised, lambda: [numbers(3, 5, 8), numbers(3, 5, 8), (numbers(3, 5, 8) > 0).double().detach(),
                                        numbers(8), numbers(8)]),
    "root mean square": (root_mean_square, lambda: [numbers(3, 5, 8), numbers(8)]),
    "gate": (gate, lambda: [numbers(3, 16), numbers(3, 16, seed=1)]),
    "attention": (attention, lambda: [numbers(2, 6, 6), (numbers(6, 6) > 1).detach()]),
    "several": (several, lambda: [numbers(4, 6), numbers(4, 6, seed=1)]),
    "without gradient": (several, lambda: [numbers(4, 6).detach(), numbers(4, 6, seed=1).detach()]),
    "one without gradient": (gate, lambda: [numbers(3, 16), numbers(3, 16, seed=1).detach()]),
    "batch normalised": (batch_normalised, lambda: [numbers(4, 3, 5, 6), numbers(4, 3, 5, 6, seed=1), numbers(3),
                                                    numbers(3, seed=1)]),
}  # fmt: skip
STATISTICS = {"batch normalised": 4}


def call_of(function, inputs, statistics: int = 0) -> CompiledCall:
    outputs = function(*inputs)
    infos = [info_of(one, f"value_{place}") for place, one in enumerate(inputs)]
    call = CompiledCall("compiled", "", function, len(outputs), statistics=statistics)
    call.build(kernels_of(function, infos, [one.requires_grad for one in outputs], statistics))
    return call


def as_list(made: Tensor | list[Tensor]) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def assert_right(function, inputs, statistics: int) -> None:
    call = call_of(function, inputs, statistics)
    assert len(call.parts) == (2 if statistics else 0)
    expected, found = function(*inputs), as_list(call(*inputs))
    roots = [place for place, one in enumerate(expected) if one.requires_grad]
    assert [one.requires_grad for one in found] == [one.requires_grad for one in expected]
    wanted = [one for one in inputs if one.requires_grad]
    gradients = [torch.rand_like(expected[place]) for place in roots]
    theirs = torch.autograd.grad([expected[place] for place in roots], wanted, gradients) if roots else ()
    ours = torch.autograd.grad([found[place] for place in roots], wanted, gradients) if roots else ()
    for one, other in zip([*expected, *theirs], [*found, *ours], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)  # sums in another order


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_halves_give_what_the_operations_give(name):
    function, make = CASES[name]
    assert_right(function, make(), STATISTICS.get(name, 0))


@pytest.mark.ci  # seconds for each
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", CASES)
def test_compiled_halves_give_what_the_operations_give(name):
    function, make = CASES[name]
    assert_right(function, make(), STATISTICS.get(name, 0))


@pytest.mark.usefixtures("interpreted")
def test_what_is_normalised_comes_back_from_its_statistics_alone():
    function, make = CASES["batch normalised"]
    inputs = make()
    call = call_of(function, inputs, 4)
    first, rest = call.parts
    with Operations() as seen:
        given = first(*inputs[:2])
    assert call.kernels[0].takes == (0, 1)
    assert seen.reduce
    kernels = call.kernels[0]
    handed = given[: len(kernels.hands_on)]
    for one, told in zip(handed, kernels.hands_on, strict=True):
        assert (one.dtype, (tuple(one.shape), one.stride())) == (told.dtype, told.layout(()))
        assert one.numel() == 3
    with Operations() as seen:
        again = rest(*inputs, *handed)
    assert not seen.reduce
    assert bitwise_equal(again.detach(), call(*inputs)[0].detach())


class Operations(TorchDispatchMode):
    """Notes whether any of them takes statistics of a tensor."""

    reduce = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reduce |= func.overloadpacket.__name__ in {"var_mean", "mean", "sum", "var", "native_batch_norm"}
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("interpreted")
def test_statistics_that_are_not_small_are_computed_with_the_rest():
    call = call_of(batch_normalised, [numbers(2, 3, 2, 2), numbers(2, 3, 2, 2), numbers(3), numbers(3)], 4)
    assert len(call.kernels) == 1
    assert not call.parts


@pytest.mark.usefixtures("interpreted")
def test_without_gradients_it_is_the_same_to_the_bit():
    function, make = CASES["normalised"]
    inputs = make()
    call = call_of(function, inputs)
    with torch.no_grad():
        without = call(*inputs)
    for one, other in zip(call(*inputs), without, strict=True):
        assert bitwise_equal(one.detach(), other)
        assert not other.requires_grad


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
def test_gradients_may_be_missing_and_lie_otherwise_where_it_is_compiled():
    assert_any_gradients_will_do()


@pytest.mark.usefixtures("interpreted")
def test_gradients_may_be_missing_and_lie_otherwise():
    assert_any_gradients_will_do()


def assert_any_gradients_will_do():
    function, make = CASES["normalised"]
    inputs = make()
    call = call_of(function, inputs)
    for gradient in (torch.ones(()).double().expand(3, 5, 8), torch.rand(8, 5, 3).double().permute(2, 1, 0)):
        for place in (0, 1):
            theirs = torch.autograd.grad(function(*inputs)[place], inputs[:2], gradient)
            ours = torch.autograd.grad(call(*inputs)[place], inputs[:2], gradient)
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("interpreted")
def test_twice_differentiated_is_refused_and_twice_walked_is_not():
    function, make = CASES["gate"]
    inputs = make()
    made = call_of(function, inputs)(*inputs).sum()
    made.backward(retain_graph=True)
    first = [one.grad.clone() for one in inputs]
    made.backward()
    assert all(torch.equal(one.grad, 2 * before) for one, before in zip(inputs, first, strict=True))
    made = call_of(function, inputs)(*inputs).sum()
    (gradient,) = torch.autograd.grad(made, inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        gradient.sum().backward()


def saved_by(run, inputs) -> int:
    storages = {}
    given = {one.untyped_storage().data_ptr() for one in inputs if one.dim() <= 1}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run(*inputs)
    assert kept is not None
    return sum(size for place, size in storages.items() if place not in given)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", [name for name in CASES if name != "without gradient"])
def test_no_more_is_saved_than_by_the_operations(name):
    function, make = CASES[name]
    inputs = make()
    assert saved_by(call_of(function, inputs, STATISTICS.get(name, 0)), inputs) <= saved_by(function, inputs)


@pytest.mark.usefixtures("interpreted")
def test_it_is_copied_as_itself():
    """A planned module is copied with its code: kernels are no part of a state."""
    function, make = CASES["gate"]
    call = call_of(function, make())
    assert copy.copy(call).kernels is call.kernels
