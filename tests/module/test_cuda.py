"""The same promises on a GPU: exact where eager is, measured peak at or under the budget, and few gaps above it."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.cuda import Cuda, _allocator_settings, _set_allocator_settings, segments_are_expandable
from rkgb.ir.sample import make_sample
from rkgb.replay.replay import record_step
from rockmate import PeakMemory, PlanOptions, Rockmate, reduce_fragmentation, verify, zoo
from rockmate.memory.allocators import end_peak, start_peak
from tests.module.steps import planned_if_it_may

pytestmark = pytest.mark.cuda

# Kernels that add with atomics (embedding and pooling gradients) differ from run to run by rounding.
RELATIVE_TOLERANCE = 1e-4
STEPS = 50
MOST_RESERVED = 1.4  # of a budget. Measured on an H100: 1.26 of a ResNet-50's, 1.2 of a GPT-2's, gaps included
MIB = 1 << 20


@pytest.fixture
def expandable() -> Iterator[None]:
    """Expandable segments, in a cache without older ones."""
    before = _allocator_settings()
    if not reduce_fragmentation().expandable_segments:
        pytest.skip("no expandable segments on this system")
    yield
    _set_allocator_settings(before or "expandable_segments:False")
    torch.cuda.empty_cache()


def cuda_entry(name: str) -> zoo.ZooEntry:
    return zoo.get(name, device=torch.device("cuda", torch.cuda.current_device()))


def planned_entry(entry: zoo.ZooEntry, budget: float) -> Rockmate:
    """Workspaces of convolutions may be most of a tiny network."""
    return planned_if_it_may(entry.model, entry.sample, budget, loss=entry.loss)


def test_peak_memory_counts_blocks_of_512_bytes():
    with PeakMemory("cuda") as memory:
        kept = torch.empty(100, dtype=torch.uint8, device="cuda")
    assert memory.peak_bytes == memory.net_bytes == 512
    del kept


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny", "unet-tiny"])
@pytest.mark.parametrize("budget", [1.0, 0.7, 0.5])
def test_a_step_is_eager_s_and_stays_under_its_budget(name, budget):
    entry = zoo.get(name, device=torch.device("cuda"))
    model = planned_entry(entry, budget)
    sample = make_sample(entry.model, entry.sample)
    eager = record_step(entry.model, sample, lambda fresh: fresh.call(entry.model))
    again = record_step(entry.model, sample, lambda fresh: fresh.call(entry.model))
    ours = record_step(entry.model, sample, lambda fresh: fresh.call(model))
    if eager.first_difference(again) is None:
        assert eager.first_difference(ours) is None
    else:
        for key, tensor in eager.tensors.items():
            if tensor is not None:
                scale = tensor.double().abs().max().clamp_min(1e-6)
                assert (tensor.double() - ours.tensors[key].double()).abs().max() <= RELATIVE_TOLERANCE * scale, key
    with PeakMemory("cuda") as memory:
        output = model(*sample.args, **sample.kwargs)
        entry.loss(output).backward()
    assert memory.peak_bytes <= model.plan.budget_bytes
    assert memory.reserved_bytes > 0


@pytest.mark.usefixtures("expandable")
@pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-demo", "resnet50-demo"])
def test_many_steps_stay_within_the_budget_and_leave_few_gaps(name):
    """Gradients are None in every other step and zeros in the rest; momentum comes with the first update."""
    entry = cuda_entry(name)
    model = Rockmate(entry.model, entry.sample, 0.5, loss=entry.loss)
    plan, device = model.plan, entry.sample[0].device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    # Without recorder and without giving the cache back: as users train.
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.cuda.reset_peak_memory_stats(device)
        before_bytes, plans = torch.cuda.memory_allocated(device), len(model.plans)
        entry.loss(model(*entry.sample)).backward()
        peak = end_peak(device, before_bytes, 0)
        optimizer.step()
        if len(model.plans) > plans:  # planned once more, for steps that find gradients: not counted in its budget
            continue
        assert peak.allocated_bytes <= plan.budget_bytes, step
        assert peak.reserved_bytes <= MOST_RESERVED * plan.budget_bytes, step
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes <= plan.measured_reserved_bytes <= MOST_RESERVED * plan.budget_bytes


@pytest.mark.usefixtures("expandable")
@pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-demo", "resnet50-demo"])
@pytest.mark.parametrize("budget", [1.0, 0.7, 0.5])
def test_peaks_are_predicted_in_blocks_of_the_allocator(name, budget):
    entry = cuda_entry(name)
    plan = Rockmate(entry.model, entry.sample, budget, loss=entry.loss).plan
    assert abs(plan.peak_bytes - plan.measured_peak_bytes) <= max(0.01 * plan.measured_peak_bytes, MIB)


@pytest.mark.usefixtures("expandable")
@pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")
@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny"])
def test_what_the_plan_s_step_reserved_is_measured_and_given_back(name):
    entry = cuda_entry(name)
    plan = planned_entry(entry, 0.7).plan
    assert plan.measured_reserved_bytes >= plan.measured_peak_bytes
    gaps = plan.measured_reserved_bytes - plan.budget_bytes
    assert gaps <= max((MOST_RESERVED - 1) * plan.budget_bytes, Cuda.smallest_segments_bytes)
    assert " reserved," in str(plan)
    reserved_bytes = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved_bytes


@pytest.mark.usefixtures("expandable")
def test_the_log_and_the_allocator_s_statistics_agree_on_expandable_segments():
    """There, blocks are as large as what was asked for, rounded up to 512 bytes, whatever was freed before."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert segments_are_expandable()
    before_bytes = start_peak(device)
    with AllocationLog(device) as log:
        kept = []
        for size_bytes in (100, 3 * MIB + 1, 11 * MIB, 12 * MIB - 700, 30 * MIB):
            kept.append(torch.empty(size_bytes, dtype=torch.uint8, device=device))
            torch.empty(size_bytes // 2, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_allocated(device) - before_bytes == sum(event.size_bytes for event in log.events)
    assert end_peak(device, before_bytes, 0).allocated_bytes == log.peak_bytes
    del kept


@pytest.mark.usefixtures("expandable")
def test_scratch_buffers_of_libraries_are_in_no_measured_step():
    """The first matrix product of a thread takes cuBLAS's buffer: planning's warm-up does, and no later step."""
    torch._C._cuda_clearCublasWorkspaces()
    entry = cuda_entry("gpt2-tiny")
    model = Rockmate(entry.model, entry.sample, 1.0, loss=entry.loss)
    peaks = []
    for _ in range(3):
        model.zero_grad()
        with PeakMemory("cuda") as memory:
            entry.loss(model(*entry.sample)).backward()
        peaks.append(memory.peak_bytes)
    assert max(peaks) <= model.plan.budget_bytes
    assert peaks == [peaks[0]] * 3
    assert abs(model.plan.peak_bytes - peaks[0]) <= MIB


@pytest.mark.parametrize("benchmark", [False, True])
def test_trying_out_algorithms_is_in_no_measured_step(benchmark, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    entry = cuda_entry("resnet18-tiny")
    model = planned_entry(entry, 0.7)
    model.zero_grad()
    with PeakMemory("cuda") as memory:
        entry.loss(model(*entry.sample)).backward()
    assert memory.peak_bytes <= model.plan.budget_bytes


class Masked(nn.Module):
    """Blocks of attention with a mask that is added: PyTorch pads it to rows of whole multiples of 8 elements."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(64, 192), "out": nn.Linear(64, 64), "norm": nn.LayerNorm(64)})
            for _ in range(4)
        )

    def forward(self, x, mask):
        batch, length, _ = x.shape
        bias = torch.zeros(batch, 1, length, length, device=x.device).masked_fill(~mask[:, None, None, :], -1e9)
        for layer in self.layers:
            heads = (
                part.view(batch, length, 4, 16).transpose(1, 2) for part in layer["qkv"](layer["norm"](x)).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(*heads, attn_mask=bias, dropout_p=0.1)
            x = x + layer["out"](mixed.transpose(1, 2).reshape(batch, length, 64))
        return x


@pytest.mark.filterwarnings("ignore::rockmate.errors.ReplanWarning")
@pytest.mark.parametrize(
    ("lengths", "others"), [((61, 98, 163), (77, 130, 90)), ((64, 96, 168), (80, 128))], ids=["padded", "whole rows"]
)
def test_other_lengths_are_planned_by_their_sizes(lengths, others):
    torch.manual_seed(0)
    model = Masked().cuda().train()

    def call(length):
        mask = torch.arange(length, device="cuda") < torch.tensor([[length], [length // 2]] * 4, device="cuda")
        return torch.randn(8, length, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(length)), mask

    longest = call(max(lengths))
    with PeakMemory("cuda") as memory:
        model(*longest).square().mean().backward()
    model.zero_grad()
    planned = Rockmate(model, budget=int(0.8 * memory.peak_bytes), loss=lambda output: output.square().mean())
    for length in (*lengths, *others):
        sample = call(length)
        grads = []
        for way in (model, planned):
            torch.manual_seed(length)
            model.zero_grad()
            way(*sample).square().mean().backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
        with PeakMemory("cuda") as memory:
            planned(*sample).square().mean().backward()
        assert memory.peak_bytes <= planned.plan.budget_bytes, length
        for one, other in zip(*grads, strict=True):
            assert (one - other).abs().max() <= RELATIVE_TOLERANCE * one.abs().max(), length
    assert len(list(planned._family._by_size)) == len(others)


class Causal(nn.Module):
    """Blocks of causal attention without dropout, in half precision, for which a GPU has several kernels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 768) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            heads = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x


def test_attention_by_the_fastest_kernel_is_within_the_budget():
    torch.manual_seed(0)
    model, x = Causal().cuda().bfloat16(), torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16)
    options = PlanOptions(loss=lambda output: output.float().square().mean(), kernels="auto")
    planned = planned_if_it_may(model, (x,), 0.8, options=options)
    tried = {one.kernel for one in planned.plan.kernels.trials}
    assert {"attentions by memory-efficient kernels", "attentions by products and a softmax"} <= tried
    with PeakMemory("cuda") as memory:
        options.loss(planned(x)).backward()
    assert memory.peak_bytes <= planned.plan.budget_bytes
    planned.zero_grad()
    assert verify(planned, (x,), loss=options.loss).exact
