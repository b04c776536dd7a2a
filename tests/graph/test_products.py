"""`torch.ops.rkgb.product`: products by oneDNN are those of the BLAS library but for rounding."""

import pytest
import torch
from torch import Tensor

import rkgb.kernels
from rkgb.kernels.products import is_there
from rkgb.replay.step_record import bitwise_equal
from tests.kernels.conftest import onednn_off

product = torch.ops.rkgb.product.default
pytestmark = pytest.mark.skipif(not is_there(), reason="this PyTorch has no oneDNN")
assert rkgb.kernels is not None

SHAPES = [
    ((5, 8), 6), ((3, 7, 8), 6), ((2, 3, 4, 8), 1), ((1, 8), 6), ((40, 8), 64), ((40, 64), 8), ((7, 1), 3), ((0, 8), 6),
]  # fmt: skip


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(shape: tuple[int, ...], outputs: int, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    inner = shape[-1]
    other = numbers(*((outputs, inner) if transposed else (inner, outputs)), seed=1)
    return numbers(*shape, seed=0), other, numbers(outputs, seed=2)


def by_blas(input: Tensor, other: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if transposed:
        return torch.nn.functional.linear(input, other, bias)
    made = input @ other
    return made if bias is None else made + bias


def strides(tensor: Tensor) -> list[int]:
    """Those that matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def assert_near(found: Tensor, expected: Tensor, inner: int) -> None:
    # Sums of so many numbers of float32, in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(inner, 1) ** 0.5)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_values_gradients_and_strides_are_those_of_the_usual_product(shape, outputs, has_bias, transposed):
    found, expected = [], []
    for function, results in ((product, found), (by_blas, expected)):
        input, other, bias = (one.requires_grad_() for one in operands(shape, outputs, transposed))
        made = function(input, other, bias if has_bias else None, transposed)
        given = [input, other, bias] if has_bias else [input, other]
        gradients = torch.autograd.grad(made, given, numbers(*made.shape, seed=3))
        results += [made.detach(), *gradients]
    for one, theirs in zip(found, expected, strict=True):
        assert one.shape == theirs.shape
        assert strides(one) == strides(theirs)
        assert_near(one, theirs, max(shape))


def test_bits_are_equal_each_time_and_without_gradients():
    input, other, bias = operands((33, 65), 17, transposed=True)
    first = product(input, other, bias, True)
    with torch.no_grad():
        assert bitwise_equal(product(input, other, bias, True), first)
    assert bitwise_equal(product(input.requires_grad_(), other, bias, True).detach(), first)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_nobody_wants_are_not_made(wanted):
    given = [one.requires_grad_(wants) for one, wants in zip(operands((5, 8), 6, transposed=True), wanted, strict=True)]
    product(*given, True).sum().backward()  # whose gradient is one number, expanded
    assert [one.grad is not None for one in given] == list(wanted)


@pytest.mark.parametrize("transposed", [True, False])
def test_operands_may_lie_in_any_way(transposed):
    input, other, bias = operands((6, 8), 6, transposed)
    expected = by_blas(input, other, bias, transposed)
    ways = [lambda one: one.t().contiguous().t(), lambda one: torch.stack([one, one], dim=-1)[..., 0]]
    for way in ways:
        assert_near(product(way(input), other, bias, transposed), expected, 8)
        assert_near(product(input, way(other), bias, transposed), expected, 8)
    wide = torch.ones(1, 1).expand(8, 8)
    assert_near(product(wide, wide, None, transposed), torch.full((8, 8), 8.0), 8)


@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_have_gradients(transposed):
    found = []
    for function in (product, by_blas):
        input, other, bias = (one.requires_grad_() for one in operands((5, 8), 6, transposed))
        made = function(input, other, bias, transposed).square().sum()
        gradients = torch.autograd.grad(made, [input, other], create_graph=True)
        penalty = sum(one.square().sum() for one in gradients)
        found.append(torch.autograd.grad(penalty, [input, other, bias]))
    for one, theirs in zip(*found, strict=True):
        torch.testing.assert_close(one, theirs, rtol=1e-4, atol=1e-2)  # of numbers of a thousand


def test_without_the_operation_the_usual_product_is_taken(monkeypatch):
    monkeypatch.setattr("rkgb.kernels.products.linear_of_onednn", None)
    given = operands((5, 8), 6, transposed=True)
    assert bitwise_equal(product(*given, True), by_blas(*given, True))
    assert not is_there()


def test_it_is_off_where_onednn_is():
    with onednn_off():
        assert not is_there()
    assert is_there()
