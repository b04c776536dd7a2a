"""`PeakMemory` gives the numbers that a person gets with a pencil."""

import os
import time

import pytest
import torch
from torch import nn

from rockmate.memory.peak import PeakMemory

KIB = 1024


def tensor_of(size_bytes: int, device: str = "cpu") -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def test_peak_is_the_highest_sum_of_live_tensors():
    with PeakMemory("cpu") as memory:
        first, second = tensor_of(3 * KIB), tensor_of(5 * KIB)  # 8 KiB live
        del first
        third = tensor_of(2 * KIB)  # 7 KiB live
        del second
    assert memory.peak_bytes == 8 * KIB
    assert memory.net_bytes == third.nbytes == 2 * KIB
    assert [level for _, level in memory.timeline] == [3 * KIB, 8 * KIB, 5 * KIB, 7 * KIB, 2 * KIB]
    assert memory.reserved_bytes == 0


def test_times_rise_from_the_entry():
    with PeakMemory():
        time.sleep(0.5)  # of an earlier measurement, must not count
    start_ms = 1000 * time.perf_counter()
    with PeakMemory() as memory:
        tensor_of(KIB)
        time.sleep(0.05)
        tensor_of(KIB)
    times_ms = [time_ms for time_ms, _ in memory.timeline]
    assert times_ms == sorted(times_ms)
    assert times_ms[0] >= 0
    assert 45 <= times_ms[-1] - times_ms[0] <= 1000 * time.perf_counter() - start_ms
    assert times_ms[0] < 400


def test_what_was_there_at_entry_does_not_count():
    resident = tensor_of(100 * KIB)
    with PeakMemory("cpu") as memory:
        resident.add_(1)
        tensor_of(KIB)
    assert memory.peak_bytes == KIB
    assert memory.net_bytes == 0


def test_a_free_of_what_was_there_at_entry_is_not_seen():
    resident = tensor_of(100 * KIB)
    with PeakMemory("cpu") as memory:
        del resident
        kept = tensor_of(KIB)
    assert memory.peak_bytes == memory.net_bytes == kept.nbytes


def test_nothing_allocated_is_zero():
    with PeakMemory("cpu") as memory:
        pass
    assert (memory.peak_bytes, memory.net_bytes, memory.timeline) == (0, 0, ())


def test_a_linear_layer_allocates_its_output_and_the_gradient_of_its_weight():
    """float32, batch 64, 32 → 16, no bias; the gradient of the output is given."""
    layer, inputs, gradient = nn.Linear(32, 16, bias=False), torch.randn(64, 32), torch.ones(64, 16)
    with PeakMemory("cpu") as memory:
        output = layer(inputs)
        output.backward(gradient)
    output_bytes, weight_bytes = 64 * 16 * 4, 16 * 32 * 4
    assert memory.peak_bytes == memory.net_bytes == output_bytes + weight_bytes


def test_a_chain_of_two_elementwise_operations_peaks_in_its_backward():
    """y = relu(x), z = 2y: y and z live, then ∂y, then ∂x beside the three, where relu's backward reads y."""
    size_bytes = 40_000
    inputs, gradient = torch.randn(10_000, requires_grad=True), torch.ones(10_000)
    with PeakMemory("cpu") as memory:
        result = torch.relu(inputs) * 2
        result.backward(gradient)
    assert memory.peak_bytes == 4 * size_bytes
    assert memory.net_bytes == 2 * size_bytes  # z and ∂x


def test_an_error_inside_passes_and_leaves_a_result():
    def allocate_and_fail() -> None:
        tensor_of(KIB)
        raise ZeroDivisionError

    memory = PeakMemory("cpu")
    with pytest.raises(ZeroDivisionError), memory:
        allocate_and_fail()
    assert memory.peak_bytes == KIB
    with memory:  # and nothing is left running
        pass
    assert memory.peak_bytes == 0


def test_results_wait_for_the_exit():
    with PeakMemory("cpu") as memory, pytest.raises(RuntimeError, match="after the end of its `with` block"):
        _ = memory.peak_bytes


def test_nesting_is_refused():
    with (
        PeakMemory("cpu") as outer,
        pytest.raises(RuntimeError, match="does not nest"),
        PeakMemory("cpu"),
    ):
        pass
    assert outer.peak_bytes == 0


def test_another_profiler_outside_is_refused():
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match="stop the other profile first"),
        PeakMemory("cpu"),
    ):
        pass


def test_another_profiler_inside_is_noticed():
    with (
        pytest.raises(RuntimeError, match="another profiler was started"),
        PeakMemory("cpu"),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        pass
    with PeakMemory("cpu") as memory:
        tensor_of(KIB)
    assert memory.peak_bytes == KIB


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="'meta'"):
        PeakMemory("meta")


def test_the_environment_is_left_as_it_was():
    before = dict(os.environ)
    with PeakMemory("cpu"):
        pass
    assert dict(os.environ) == before


@pytest.mark.cuda
def test_cuda_peak_is_that_of_the_allocator():
    with PeakMemory("cuda") as memory:
        first, second = tensor_of(3 << 20, "cuda"), tensor_of(5 << 20, "cuda")
        del first
        third = tensor_of(1 << 20, "cuda")
        del second
    assert memory.peak_bytes == 8 << 20
    assert memory.net_bytes == third.nbytes
    assert memory.reserved_bytes >= memory.peak_bytes
    assert max(level for _, level in memory.timeline) == memory.peak_bytes
