"""Code of regions that differ in sizes alone: patterns of their numbers, and what one compilation holds for."""

import itertools

import pytest
import torch

from rkgb.ir.compiled import CompiledCall
from rkgb.ir.values import info_of
from rockmate.regions.build import kernels_for
from rockmate.regions.sizes import Pattern, RegionSizes


def layout(*sizes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return sizes, torch.empty(sizes, device="meta").stride()


def test_a_pattern_has_symbols_for_what_varies_and_strides_that_follow_sizes():
    pairs = ((4, 9), (4, 7))
    one, other = (RegionSizes((layout(batch, length, 8), layout(8)), (batch, length, 4)) for batch, length in pairs)
    pattern = Pattern.of([one, other])
    assert pattern.symbols == (7,)
    assert pattern.numbers_at(RegionSizes((layout(4, 100, 8), layout(8)), (4, 100, 4))) == (100,)
    assert pattern.region_at((100,)) == RegionSizes((layout(4, 100, 8), layout(8)), (4, 100, 4))
    assert pattern.numbers_at(RegionSizes((layout(5, 100, 8), layout(8)), (5, 100, 4))) is None
    assert pattern.numbers_at(RegionSizes((layout(4, 100, 8), layout(8)), (4, 50, 4))) is None
    assert Pattern.of([one, other, RegionSizes((layout(5, 7, 8), layout(8)), (5, 7, 4))]).symbols == (5, 7)


def test_tensors_that_lie_otherwise_are_of_no_pattern():
    images = [torch.empty(2, 3, side, side, device="meta", memory_format=torch.channels_last) for side in (8, 16, 20)]
    regions = [RegionSizes(((tuple(one.shape), one.stride()),), ()) for one in images]
    pattern = Pattern.of(regions[:2])
    assert pattern.numbers_at(regions[2]) == (20,)
    assert pattern.numbers_at(RegionSizes((layout(2, 3, 20, 20),), ())) is None


def rotated(x, weight, batch, length):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return [y.view(batch, length, 2, -1).transpose(1, 2).contiguous(), y.sum(0)]


def given(batch: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch * length, 8), (8,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def sizes(batch: int, length: int) -> RegionSizes:
    return RegionSizes((layout(batch * length, 8), layout(8)), (batch, length))


def call_for(pattern: Pattern) -> CompiledCall:
    inputs = [info_of(one, f"value_{place}") for place, one in enumerate(given(3, 5))]
    kernels = kernels_for(
        pattern, lambda arguments: lambda x, weight: rotated(x, weight, *arguments), inputs, [True, True]
    )
    return CompiledCall("compiled", "", rotated, 2, kernels)


def assert_right_for_all_sizes():
    call = call_for(Pattern.of([sizes(4, 7), sizes(3, 5)]))
    (kernels,) = call.kernels
    for batch, length in itertools.product((2, 3, 6), (2, 5, 9)):
        numbers = kernels.any_size.numbers_at(sizes(batch, length))
        inputs = given(batch, length)
        assert numbers is not None
        assert kernels.any_size.holds([(tuple(one.shape), one.stride()) for one in inputs], numbers)
        made, expected = call.at(numbers, inputs), rotated(*inputs, batch, length)
        gradients = [torch.rand_like(one) for one in expected]
        ours, theirs = (torch.autograd.grad(one, inputs, gradients) for one in (made, expected))
        torch.testing.assert_close([*made, *ours], [*expected, *theirs], rtol=1e-10, atol=1e-12)
    assert not kernels.any_size.holds([layout(2 * 5 + 1, 8), layout(8)], (2 * 5 + 1, 2, 5))


@pytest.mark.usefixtures("interpreted")
def test_one_graph_holds_for_all_sizes():
    assert_right_for_all_sizes()


@pytest.mark.ci  # seconds
@pytest.mark.usefixtures("fresh")
def test_one_compilation_holds_for_all_sizes():
    assert_right_for_all_sizes()
