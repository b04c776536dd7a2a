"""Convolutions: how images lie that they make, and what those of the CPU allocate for themselves and free again.

oneDNN copies images and weights into blocks of channels, but images in channels_last; what its own kernels do not take,
it unfolds and multiplies. Which kernel computes a convolution was read from `ONEDNN_VERBOSE=1`, and what each takes is
fitted to what was measured, with processors that have AVX2; those with AVX-512 have other blocks, and a few kernels of
which less is known. What threads sum up beside each other is not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from rkgb.torch_private.operations import HALF_OF_ONEDNN, suggested_format

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_BLOCKS = 8, 16  # channels: without AVX-512, and with it
_COLOURS = 3
_VOLUMES = 5  # dimensions
_FEW_NUMBERS = 20480  # in one image, which PyTorch unfolds itself
_LARGE_KERNEL = 3  # more is oneDNN's, however small the image
_MANY_IMAGES = 16
# What oneDNN's own kernels do not take, along rows: padding beyond, places beside what is padded, places covered.
_PADDING, _BESIDE_PADDING = 3, 7
_WIDTH, _DEPTHWISE_WIDTH = 13, 3
_ROUNDED_BYTES = 128
_UNFOLDED_BYTES = 414720  # by one thread of a forward, at most
# Of the kernel for gradients of what strides pass over, and by each thread: by whether they divide the images.
_STRIDED_BYTES = {True: (12288, 24600), False: (16384, 40984)}
_LAST_BYTES, _LAST_THREAD_BYTES = 4096, 4120  # of those in channels_last


def format_of_images(
    given: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], groups: int, is_accelerator: bool
) -> torch.memory_format:
    """How a convolution has its images, and what it multiplies them with: as it is given either, in channels_last.

    That is the choice of oneDNN and of cuDNN. What the CPU's own kernels compute, they have so in two dimensions alone.
    """
    is_own = given.dtype == torch.float64
    if not is_accelerator:
        is_own = not _has_blocks(given.dtype) or (groups == 1 and _is_product(given, weight, stride))
    if is_own and (is_accelerator or given.dim() != 4):
        return torch.contiguous_format
    wanted = CHANNELS_LAST.get(given.dim(), torch.contiguous_format)
    return wanted if wanted in (suggested_format(given), suggested_format(weight)) else torch.contiguous_format


def convolution_scratch(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Bytes beside what a convolution of the CPU makes."""
    given, weight, _, *told = args[:9]
    images, convolved = _convolved(given, weight, made[0], *told)
    needed_bytes = convolved.of_images_bytes() if convolved.is_transposed else convolved.forward_bytes()
    return brought_into_bytes(images, given) + needed_bytes


def convolution_backward_scratch(args: Sequence[Any], made: Sequence[torch.Tensor]) -> int:
    """Bytes beside the gradients that the backward of a convolution of the CPU makes."""
    gradient, given, weight, _, *told, wanted = args[:11]
    images, convolved = _convolved(given, weight, gradient, *told)
    copied_bytes = brought_into_bytes(images, given) + brought_into_bytes(images, gradient)
    return copied_bytes + convolved.backward_bytes(*wanted)


@dataclass(frozen=True)
class _Convolution:
    """What oneDNN computes: bytes beside what is made. A transposed one makes images of what it is given."""

    images: torch.Tensor
    out: torch.Tensor  # or its gradient
    weight: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    is_transposed: bool

    def forward_bytes(self) -> int:
        raise NotImplementedError

    def of_images_bytes(self) -> int:
        raise NotImplementedError

    def of_weights_bytes(self) -> int:
        raise NotImplementedError

    def backward_bytes(self, of_given: bool, of_weight: bool, of_bias: bool) -> int:
        """For those gradients that are wanted, of which that of what is given is made first."""
        for_given = for_weight = 0
        if of_given:
            for_given = self.forward_bytes() if self.is_transposed else self.of_images_bytes()
            for_given -= self.weight.nbytes if of_weight else 0
        if of_weight:
            for_weight = self.of_weights_bytes()
        return max(for_given, for_weight)

    @property
    def kernel(self) -> torch.Size:
        return self.weight.shape[2:]

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.images.shape[1] == self.out.shape[1]

    @property
    def has_strides(self) -> bool:
        return any(step > 1 for step in self.stride)

    @property
    def is_strided(self) -> bool:
        """There is a kernel for the gradient of what strides pass over, but not for groups of few channels."""
        is_wide = self.groups == 1 or self.images.shape[1] // self.groups > _block()
        return is_wide and self.has_strides

    @property
    def strided_bytes(self) -> int:
        divides = all(size % step == 0 for size, step in zip(self.images.shape[2:], self.stride, strict=True))
        kernel_bytes, thread_bytes = _STRIDED_BYTES[divides]
        return kernel_bytes + torch.get_num_threads() * thread_bytes

    @property
    def unfolded_bytes(self) -> int:
        """Of one image, or layer of a volume, and one group: beside each other what the kernel covers at each place."""
        covered_bytes = self.weight[0].numel() * self.weight.itemsize
        return covered_bytes * self.out.shape[2 if self.images.dim() < _VOLUMES else 3 :].numel()

    @property
    def multiplies_for_weights(self) -> bool:
        """Whether the gradient of the weights is a product with what is unfolded."""
        return self.kernel[-1] > _WIDTH or (self.is_high and not _is_broad())

    @property
    def is_high(self) -> bool:
        """Whether kernels cover more than there is in images, across rows or layers."""
        return any(covered > size for covered, size in zip(self.kernel[:-1], self.images.shape[2:-1], strict=True))

    @property
    def multiplied_bytes(self) -> int:
        """For the gradient of the weights, which each thread has four times."""
        return torch.get_num_threads() * (4 * self.weight.nbytes + self.unfolded_bytes) + 2 * _ROUNDED_BYTES


class _Blocked(_Convolution):
    """With images that lie as they are made, channel after channel."""

    def forward_bytes(self) -> int:
        if self._is_unaligned or (self.padding[-1] > _PADDING and not _is_broad()):
            at_once_bytes = torch.get_num_threads() * min(self.unfolded_bytes, _UNFOLDED_BYTES)
            return max(self.out.nbytes, at_once_bytes + _ROUNDED_BYTES)
        block = self._block
        out_bytes = _blocked_bytes(self.out, block)
        copies_bytes = self._weight_bytes(block) + _blocked_bytes(self.images, block)
        is_read = self.groups == 1 and self.images.shape[1] < block  # as they are
        if is_read and not (_is_broad() and self._gathered_bytes):
            copies_bytes = self._half_blocked_weight_bytes(block)
        return max(copies_bytes + out_bytes - self.out.nbytes, out_bytes) + self._gathered_bytes

    def of_images_bytes(self) -> int:
        if self.is_strided:
            channels = self.images.shape[1]
            weight_bytes = self.weight.nbytes // channels * _rounded(channels) if _is_broad() else self.weight.nbytes
            return max(2 * self.images.nbytes, self.out.nbytes + weight_bytes + self.strided_bytes)
        width = (self.kernel[-1] - 1) * self.dilation[-1]
        if self._is_unaligned or width - self.padding[-1] > _BESIDE_PADDING:
            return max(self.images.nbytes, torch.get_num_threads() * self.unfolded_bytes + _ROUNDED_BYTES)
        block = self._block
        images_bytes = _blocked_bytes(self.images, block)
        copies_bytes = self._weight_bytes(block) + _blocked_bytes(self.out, block)
        return max(copies_bytes + images_bytes - self.images.nbytes, images_bytes)

    def of_weights_bytes(self) -> int:
        if self._is_unaligned or self.multiplies_for_weights:
            return self.multiplied_bytes
        channels, block = self.images.shape[1], self._block
        is_read = self.groups == 1 and (channels == _COLOURS or (channels == 1 and _is_broad()))  # as they are
        if self.groups == 1 and not is_read and channels < block and not self._gathered_bytes:
            block = _BLOCKS[0]  # by the kernel that needs no AVX-512
        if is_read:
            copies_bytes = self._half_blocked_weight_bytes(block)
        else:
            copies_bytes = self._weight_bytes(block) + _blocked_bytes(self.images, block)
        copies_bytes += _blocked_bytes(self.out, block) + self._gathered_bytes
        return max(self._weight_bytes(block), copies_bytes - self.weight.nbytes)

    @property
    def multiplies_for_weights(self) -> bool:
        is_wide = self.is_depthwise and (self.kernel[-1] > _DEPTHWISE_WIDTH or self.is_high)
        is_spread = self.images.dim() == _VOLUMES or any(step > 1 for step in self.dilation)
        return is_wide or (is_spread and not _is_broad()) or super().multiplies_for_weights

    @property
    def _block(self) -> int:
        """Of channels: groups are whole numbers of the smaller ones."""
        return _BLOCKS[0] if self.groups > 1 and not self.is_depthwise else _block()

    @property
    def _is_unaligned(self) -> bool:
        """Groups that are not whole blocks are multiplied one by one."""
        if self.groups == 1 or self.is_depthwise:
            return False
        return any(tensor.shape[1] // self.groups % _BLOCKS[0] != 0 for tensor in (self.images, self.out))

    @property
    def _gathered_bytes(self) -> int:
        """Kernels of one place have no strides: each image is gathered first, where it is a whole number of them."""
        steps = zip(self.images.shape[2:], self.out.shape[2:], self.stride, strict=True)
        if (
            not self.has_strides
            or self.kernel.numel() > 1
            or any(size != places * step for size, places, step in steps)
        ):
            return 0
        channels = self.images.shape[1]
        return torch.get_num_threads() * (self.unfolded_bytes // channels * _rounded(channels)) + _ROUNDED_BYTES

    def _weight_bytes(self, block: int) -> int:
        if self.is_depthwise:
            return self._half_blocked_weight_bytes(block)
        if self.groups > 1:
            return self.weight.nbytes
        channels = self.images.shape[1]
        return self._half_blocked_weight_bytes(block) // channels * _rounded(channels, block)

    def _half_blocked_weight_bytes(self, block: int) -> int:
        """In blocks of channels that are made, but not of those of the images."""
        return self.weight[0].numel() * _rounded(self.out.shape[1], block) * self.weight.itemsize


class _ChannelsLast(_Convolution):
    """With images that are read and written as they are."""

    def forward_bytes(self) -> int:
        kernel_bytes = 0 if self.is_depthwise else _LAST_BYTES + torch.get_num_threads() * _LAST_THREAD_BYTES
        return self._arranged_bytes + kernel_bytes

    def of_images_bytes(self) -> int:
        return self._arranged_bytes + self.strided_bytes if self.is_strided else self.forward_bytes()

    def of_weights_bytes(self) -> int:
        if self.multiplies_for_weights:
            return self._arranged_bytes - self.weight.nbytes + self.multiplied_bytes
        has_own = self.is_depthwise and self.kernel[-1] <= _DEPTHWISE_WIDTH and not self.is_high
        per_group = _rounded(self.weight.shape[0] // self.groups) * _rounded(self.weight.shape[1])
        blocked_bytes = self.groups * per_group * self.kernel.numel() * self.weight.itemsize
        return self._arranged_bytes + (self.weight.nbytes if has_own else blocked_bytes)

    @property
    def _arranged_bytes(self) -> int:
        """Weights are brought into the format of the images, and from there into blocks."""
        return brought_into_bytes(CHANNELS_LAST[self.images.dim()], self.weight) + self.weight.nbytes


class _Unfolded(_Convolution):
    """By PyTorch itself: a product with what is unfolded of all images, but for kernels of one place.

    It has one group after the other, and puts their parts together afterwards.
    """

    def forward_bytes(self) -> int:
        if self.groups == 1:
            return self._columns_bytes
        return max(self.out.nbytes, self._columns_bytes + self.images.nbytes // self.groups)

    def of_images_bytes(self) -> int:
        return 0

    def backward_bytes(self, of_given: bool, of_weight: bool, of_bias: bool) -> int:
        columns_bytes = self._columns_bytes if of_weight else 0
        if self.groups == 1:
            return columns_bytes
        parts_bytes = self.images.nbytes if of_given else 0
        parts_bytes += self.weight.nbytes if of_weight else 0
        parts_bytes += self.out.shape[1] * self.out.itemsize if of_bias else 0
        return max(parts_bytes, columns_bytes + (self.images.nbytes + self.out.nbytes) // self.groups)

    @property
    def _columns_bytes(self) -> int:
        is_one_place = self.kernel.numel() == 1 and not self.has_strides
        return 0 if is_one_place else self.images.shape[0] * self.unfolded_bytes


def _convolved(
    given: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, *told: Any
) -> tuple[torch.memory_format, _Convolution]:
    """Who computes a convolution between what is given and the `other`, and how its images lie."""
    stride, padding, dilation, is_transposed, _, groups = told
    images = format_of_images(given, weight, stride, groups, is_accelerator=False)
    is_plain = not is_transposed and given.dim() < _VOLUMES and all(step == 1 for step in dilation)
    has_large_kernel = given.dim() == 4 and min(weight.shape[2:]) > _LARGE_KERNEL
    is_small = groups == 1 and _is_small(given) and not has_large_kernel
    kind: type[_Convolution] = _Blocked if images == torch.contiguous_format else _ChannelsLast
    if _is_product(given, weight, stride) or (is_plain and (is_small or not _has_blocks(given.dtype))):
        kind = _Unfolded
    read, out = (other, given) if is_transposed else (given, other)
    return images, kind(read, out, weight, stride, padding, dilation, groups, is_transposed)


@functools.cache
def _is_broad() -> bool:
    """Whether the processor has AVX-512, for which oneDNN has other kernels."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _block() -> int:
    return _BLOCKS[_is_broad()]


def _has_blocks(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes with such numbers here."""
    return dtype == torch.float32 or dtype in HALF_OF_ONEDNN


def _is_product(given: torch.Tensor, weight: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether PyTorch has it as a product of matrices: one thread is as fast by itself, with few images."""
    if weight.shape[2:].numel() > 1 or any(step > 1 for step in stride):
        return False
    return _is_small(given) or (torch.get_num_threads() == 1 and given.shape[0] < _MANY_IMAGES)


def _is_small(given: torch.Tensor) -> bool:
    return given.shape[0] == 1 and given.numel() <= _FEW_NUMBERS


def _rounded(channels: int, block: int | None = None) -> int:
    block = block or _block()
    return ceil(channels / block) * block


def _blocked_bytes(images: torch.Tensor, block: int) -> int:
    return images.nbytes // images.shape[1] * _rounded(images.shape[1], block)


def brought_into_bytes(images: torch.memory_format, tensor: torch.Tensor) -> int:
    """Of what does not lie like the images."""
    return 0 if tensor.is_contiguous(memory_format=images) else tensor.nbytes
