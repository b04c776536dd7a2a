"""What convolutions of the CPU allocate for themselves, beside what is measured of each."""

from dataclasses import dataclass

import pytest
import torch

from rkgb.shapes.convolutions import convolution_backward_scratch, convolution_scratch
from rockmate import PeakMemory

aten = torch.ops.aten
IS_BROAD = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
pytestmark = pytest.mark.skipif(
    not IS_BROAD and torch.backends.cpu.get_cpu_capability() != "AVX2",
    reason="oneDNN has other kernels for processors that have neither AVX2 nor AVX-512",
)
WANTED = {"both": [True, True, False], "weights": [False, True, False], "images": [True, False, False]}


@dataclass
class Case:
    """`count` images of `channels` in each, `size` across, into `made` channels."""

    channels: int
    made: int
    size: tuple[int, ...] = (20, 20)
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    dilation: int = 1
    groups: int = 1
    count: int = 4
    is_transposed: bool = False
    dtype: torch.dtype = torch.float32
    form: torch.memory_format = torch.contiguous_format

    def args(self):
        """The images, the weights, and what `aten.convolution` is told beside them."""
        dims = len(self.size)
        padding = self.dilation * (self.kernel // 2) if self.padding is None else self.padding
        channels = (self.channels, self.made) if self.is_transposed else (self.made, self.channels)
        images = torch.randn(self.count, self.channels, *self.size, dtype=self.dtype).to(memory_format=self.form)
        weights = torch.randn(channels[0], channels[1] // self.groups, *[self.kernel] * dims, dtype=self.dtype)
        told = [[number] * dims for number in (self.stride, padding, self.dilation)]
        return images, weights.to(memory_format=self.form), (*told, self.is_transposed, [0] * dims, self.groups)


CASES = {
    "blocks of channels": Case(16, 32),
    "no whole blocks": Case(12, 20),
    "one channel": Case(1, 16),
    "colours": Case(3, 16),
    "colours in a row": Case(3, 10, (400,)),
    "few channels": Case(5, 16),
    "strides": Case(16, 32, stride=2),
    "strides that divide no image": Case(16, 32, (21, 21), stride=2),
    "strides over little": Case(24, 32, (4, 4), stride=2, count=2),
    "gathered": Case(16, 32, kernel=1, stride=2, padding=0),
    "higher than images": Case(64, 64, (2, 2)),
    "higher than images, alone": Case(32, 32, (2, 20), kernel=5, groups=32),
    "wide": Case(16, 16, (100,), kernel=15),
    "wider": Case(16, 16, (60,), kernel=17, padding=0),
    "each channel": Case(32, 32, groups=32),
    "each channel, no whole blocks": Case(10, 10, groups=10),
    "each channel, wide": Case(32, 32, kernel=5, groups=32),
    "each channel, wider": Case(32, 32, kernel=7, groups=32),
    "groups of blocks": Case(64, 64, groups=4),
    "groups of blocks, strides": Case(64, 64, stride=2, groups=4),
    "groups of no blocks": Case(24, 48, groups=2),
    "dilated": Case(16, 32, dilation=2),
    "dilated far": Case(16, 32, dilation=6),
    "volumes": Case(16, 32, (8, 8, 8)),
    "volumes, strides": Case(16, 32, (8, 8, 8), stride=2),
    "colours of volumes": Case(3, 16, (16, 16, 16)),
    "one small image": Case(16, 16, count=1),
    "one small image, large kernel": Case(16, 16, kernel=5, count=1),
    "one large image": Case(16, 16, (40, 40), count=1),
    "one place": Case(16, 32, kernel=1),
    "one place of many images": Case(16, 32, kernel=1, count=20),
    "one place, apart": Case(64, 128, (100,), kernel=1, groups=4),
    "double precision": Case(16, 32, dtype=torch.float64),
    "double precision, strides": Case(16, 32, stride=2, dtype=torch.float64),
    "half precision": Case(16, 32, dtype=torch.bfloat16),
    "half precision, one place": Case(16, 32, kernel=1, dtype=torch.bfloat16),
    "half precision, groups": Case(32, 32, groups=4, dtype=torch.float16),
    "half precision, each channel": Case(32, 32, groups=32, dtype=torch.bfloat16),
    "transposed": Case(32, 32, is_transposed=True),
    "transposed, strides": Case(32, 16, kernel=4, stride=2, padding=1, is_transposed=True),
    "transposed, apart": Case(16, 32, kernel=2, stride=2, padding=0, is_transposed=True),
    "channels last": Case(16, 32, form=torch.channels_last),
    "channels last, each": Case(32, 32, groups=32, form=torch.channels_last),
    "channels last, each, wide": Case(32, 32, kernel=7, groups=32, form=torch.channels_last),
    "channels last, strides": Case(16, 32, stride=2, form=torch.channels_last),
    "few blocks, gathered": Case(8, 16, (16, 16), kernel=1, stride=2, padding=0),
    "few channels of many": Case(16, 8, (16, 16)),
    "half a block": Case(8, 16, (16, 16)),
    "groups of half a block": Case(16, 16, (16, 16), groups=2),
    "channels last, each, higher than images": Case(128, 128, (2, 2), groups=128, form=torch.channels_last),
    "channels last, little": Case(16, 32, (2, 2), form=torch.channels_last),
}
LITTLE_BYTES = 700  # beside what is counted


def measured(function, args):
    """Bytes beside what is made, and that. The first call is another's: libraries keep what they prepare."""
    function(*args)
    with PeakMemory() as memory:
        made = function(*args)
    tensors = [tensor for tensor in (made if isinstance(made, tuple) else (made,)) if tensor is not None]
    return memory.peak_bytes - sum(tensor.untyped_storage().nbytes() for tensor in tensors), tensors


# With AVX-512: products of short numbers are of the processor's own, if it has them, and groups are another kernel's.
OTHERWISE = {"groups of no blocks", "half precision", "half precision, one place", "half precision, each channel"}
if torch.ops.mkldnn._is_mkldnn_fp16_supported():  # else PyTorch unfolds these itself
    OTHERWISE.add("half precision, groups")


def check(name, wanted=None):
    if IS_BROAD and name in OTHERWISE:
        pytest.skip("what oneDNN's kernel for AVX-512 works with is not known")
    case = CASES[name]
    images, weights, told = case.args()
    args = (images, weights, None, *told)
    took_bytes, made = measured(aten.convolution.default, args)
    if wanted is None:
        assert convolution_scratch(args, made) == pytest.approx(took_bytes, abs=LITTLE_BYTES)
        return
    args = (torch.randn_like(made[0]), images, weights, None, *told, wanted)
    took_bytes, made = measured(aten.convolution_backward.default, args)
    assert convolution_backward_scratch(args, made) == pytest.approx(took_bytes, abs=LITTLE_BYTES)


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_takes_what_is_told(name):
    check(name)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("name", CASES)
def test_its_backward_takes_what_is_told(name, wanted):
    check(name, WANTED[wanted])


@pytest.mark.parametrize("name", ["one place", "gathered", "groups of no blocks"])
def test_each_thread_takes_its_part(name):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        check(name)
    finally:
        torch.set_num_threads(threads)
