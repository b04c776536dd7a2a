"""`torch.ops.rkgb.attention`: each kernel gives what PyTorch gives when told to use that one alone."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rkgb.devices.cuda import Cuda
from rkgb.devices.registry import device_of
from rkgb.kernels.attention import IS_ON

attention = torch.ops.rkgb.attention.default
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash of the CPU": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "written out": SDPBackend.MATH,
}
OF_THE_CPU = ("flash of the CPU", "written out")


def heads(count: int, length: int, seed: int, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, count, size, generator=generator).transpose(1, 2).requires_grad_()


def a_mask(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    truths = torch.rand(2, 1, 12, 20, generator=torch.Generator().manual_seed(3)) < 0.7
    return truths if kind == "truths" else torch.zeros(truths.shape).masked_fill(~truths, -3.0)


def assert_same(kernel: str, given: tuple[Tensor, ...], mask: Tensor | None, causal: bool, scale: float | None) -> None:
    shares = given[0].shape[1] != given[1].shape[1]
    found = attention(*given, mask, causal, scale, shares, kernel)
    with sdpa_kernel(BACKENDS[kernel]):
        expected = scaled_dot_product_attention(*given, mask, 0.0, causal, scale=scale, enable_gqa=shares)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)).to(expected)
    assert torch.equal(found, expected)
    if not torch.is_grad_enabled():
        assert found.grad_fn is None
        return
    mine, theirs = (torch.autograd.grad(one, given, gradient) for one in (found, expected))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("kernel", OF_THE_CPU)
@pytest.mark.parametrize("mask", ["none", "truths", "numbers"])
@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_values_and_gradients_are_those_of_the_kernel(kernel, mask, keys, scale):
    assert_same(kernel, (heads(4, 12, 0), heads(keys, 20, 1), heads(keys, 20, 2)), a_mask(mask), False, scale)


@pytest.mark.parametrize("kernel", OF_THE_CPU)
def test_what_comes_later_is_not_seen_and_nothing_is_saved_without_gradients(kernel):
    given = (heads(4, 12, 0), heads(4, 12, 1), heads(4, 12, 2))
    assert_same(kernel, given, None, True, None)
    with torch.no_grad():
        assert_same(kernel, given, None, True, None)


@pytest.mark.parametrize("kernel", OF_THE_CPU)
def test_the_heads_of_a_row_are_beside_each_other(kernel):
    given = (heads(4, 12, 0), heads(4, 12, 1), heads(4, 12, 2))
    assert attention(*given, None, False, None, False, kernel).stride() == (12 * 4 * 8, 8, 4 * 8, 1)


@pytest.mark.parametrize("kernel", Cuda.attentions)
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_of_accelerators_take_what_they_are_given(kernel, masked):
    """Without data, and so on any machine; below, a GPU has the numbers."""
    query, key, value = (torch.randn(2, 4, 16, 32, device="meta", dtype=torch.float16) for _ in range(3))
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="meta") if masked else None
    if masked and kernel == "flash":
        with pytest.raises(ValueError, match="takes no mask"):
            attention(query, key, value, mask, False, None, False, kernel)
        return
    made = attention(query.requires_grad_(), key, value, mask, False, None, False, kernel)
    assert made.shape == query.shape
    assert made.dtype is query.dtype
    (gradient,) = torch.autograd.grad(made, query, torch.empty_like(made))
    assert gradient.shape == query.shape


def test_a_kernel_that_is_none_is_told():
    query = heads(2, 4, 0)
    with pytest.raises(ValueError, match="no kernel of attention is named 'quick'; there are flash, "):
        attention(query, query, query, None, False, None, False, "quick")


def test_devices_have_kernels_that_there_are_and_flags_tell_of_each():
    assert set(IS_ON) == {*Cuda.attentions, *device_of(torch.device("cpu")).attentions} == set(BACKENDS)
    for kernel, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            assert IS_ON[kernel]()
            others = {name for name, other in BACKENDS.items() if other is not backend}
            assert not any(IS_ON[name]() for name in others)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", Cuda.attentions)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_numbers_on_a_gpu_are_those_of_the_kernel(kernel, dtype, causal):
    given = tuple(heads(4, 64, seed, 32).detach().to("cuda", dtype).requires_grad_() for seed in range(3))
    try:
        with sdpa_kernel(BACKENDS[kernel]):
            expected = scaled_dot_product_attention(*given, None, 0.0, causal)
    except RuntimeError:
        pytest.skip("this GPU has no such kernel for such numbers")
    found = attention(*given, None, causal, None, False, kernel)
    assert torch.equal(found, expected)
    gradient = torch.ones_like(expected)
    mine, theirs = (torch.autograd.grad(one, given, gradient) for one in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # kernels that add with atomics, in few digits
