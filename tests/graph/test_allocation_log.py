"""The log holds every allocation and release, to the byte and in order."""

from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

import rkgb.devices.allocation_log
from rkgb.devices.allocation_log import AllocationLog, highest_level
from rkgb.devices.caching_allocator import AllocationEvent
from rkgb.devices.registry import device_of

CPU = torch.device("cpu")
KIB = 1024


def take(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def sizes(log: AllocationLog) -> list[int]:
    return [event.size_bytes for event in log.events]


def test_allocations_and_releases_are_in_order():
    with AllocationLog(CPU) as log:
        first = take(3 * KIB)
        second = take(5 * KIB)
        del first
        third = take(2 * KIB)
        del second, third
    assert sizes(log) == [3 * KIB, 5 * KIB, -3 * KIB, 2 * KIB, -5 * KIB, -2 * KIB]
    assert log.peak_bytes == 8 * KIB


def test_a_release_has_the_address_of_its_allocation():
    with AllocationLog(CPU) as log:
        kept = take(KIB)
        take(2 * KIB)
    allocation, other, release = log.events
    assert other.address == release.address
    assert allocation.address == kept.untyped_storage().data_ptr()


def test_events_have_times_that_rise():
    with AllocationLog(CPU) as log:
        for _ in range(5):
            take(KIB)
    times = [event.time_ns for event in log.events]
    assert len(times) == 10
    assert times == sorted(times)


def test_views_allocate_nothing():
    with AllocationLog(CPU) as log:
        whole = take(KIB)
        parts = [whole.view(2, -1), *whole.chunk(4)]
    assert sizes(log) == [KIB]
    assert len(parts) == 5


def test_a_step_of_a_linear_layer_is_known_to_the_byte():
    """[8, 16] → [8, 4], float32: the output, then the gradient of the weight. The bias is frozen."""
    layer, inputs, gradient = torch.nn.Linear(16, 4), torch.randn(8, 16), torch.ones(8, 4)
    layer.bias.requires_grad_(False)
    with AllocationLog(CPU) as log:
        output = layer(inputs)
        log.mark()
        output.backward(gradient)
        del output
    assert sum(sizes(log)[: log.marks[0]]) == 8 * 4 * 4
    assert sum(sizes(log)) == 16 * 4 * 4
    assert log.peak_bytes == 8 * 4 * 4 + 16 * 4 * 4


def test_marks_count_the_events_before_them():
    with AllocationLog(CPU) as log:
        log.mark()
        first = take(KIB)
        log.mark()
        log.mark()
        del first
        second = take(KIB)
        log.mark()
    assert log.marks == [0, 1, 1, 3]
    assert sizes(log) == [KIB, -KIB, KIB]
    assert second.nbytes == KIB


def test_marks_allocate_nothing_that_counts():
    with AllocationLog(CPU) as log:
        for _ in range(10):
            log.mark()
    assert log.marks == [0] * 10
    assert log.events == []
    assert log.peak_bytes == 0


def test_marks_inside_a_backward_are_in_the_order_of_its_nodes():
    x = torch.ones(256, requires_grad=True)
    with AllocationLog(CPU) as log:
        first = x.neg()
        second = first.neg()
        first.grad_fn.register_prehook(lambda _: log.mark())
        second.grad_fn.register_prehook(lambda _: log.mark())
        second.backward(torch.ones(256))
    before, between = log.marks
    assert sizes(log)[:before] == [KIB, KIB, KIB]  # two values and the gradient given
    assert sizes(log)[before:between] == [KIB]  # the gradient of the first value
    assert x.grad is not None


def test_releases_of_what_was_there_before_are_left_out():
    before = take(64 * KIB)
    with AllocationLog(CPU) as log:
        del before
        after = take(KIB)
    assert sizes(log) == [KIB]
    assert log.peak_bytes == after.nbytes


def test_what_is_allocated_after_the_block_is_left_out():
    with AllocationLog(CPU) as log:
        kept = take(KIB)
    del kept
    take(KIB)
    assert sizes(log) == [KIB]


def test_an_address_used_twice_is_two_allocations():
    with AllocationLog(CPU) as log:
        for _ in range(3):
            take(64 * KIB)
    assert sizes(log) == [64 * KIB, -64 * KIB] * 3
    assert log.peak_bytes == 64 * KIB


def test_empty_tensors_are_no_events():
    with AllocationLog(CPU) as log:
        take(0)
    assert log.events == []


def test_logs_cannot_be_nested():
    with (
        AllocationLog(CPU) as outer,
        pytest.raises(RuntimeError, match="while another profiler runs: stop that profiler first"),
        AllocationLog(CPU),
    ):
        pass
    assert outer.events == []


def test_logs_cannot_run_under_a_profiler():
    with profile(use_cpu=True), pytest.raises(RuntimeError, match="another profiler runs"), AllocationLog(CPU):
        pass


def test_a_profiler_that_ends_the_log_is_noticed():
    with pytest.raises(RuntimeError, match="another profiler was started"), AllocationLog(CPU), profile(use_cpu=True):
        pass


def allocate_and_fail() -> None:
    take(KIB)
    raise ZeroDivisionError


def test_an_error_inside_ends_the_log():
    with pytest.raises(ZeroDivisionError), AllocationLog(CPU):
        allocate_and_fail()
    with AllocationLog(CPU) as log:
        take(KIB)
    assert log.peak_bytes == KIB


def test_nothing_is_written_to_the_terminal(capfd):
    with AllocationLog(CPU):
        take(KIB)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(
    ("changes", "level"),
    [([], 0), ([5], 5), ([5, -5, 3], 5), ([-5, 3], 0), ([-5, 8], 3), ([1, 2, -2, 4, -5], 5)],
)
def test_the_highest_level_counts_from_zero_at_the_start(changes, level):
    assert highest_level([AllocationEvent(0, change) for change in changes]) == level


def test_cuda_rounds_up_to_its_blocks_and_the_cpu_does_not():
    assert device_of(CPU).allocated_bytes(513) == 513
    assert device_of(SECOND).allocated_bytes(513) == 1024
    assert device_of(SECOND).allocated_bytes(512) == 512
    assert device_of(SECOND).allocated_bytes(0) == 0


class WrittenHistory:
    """CUDA's allocators of two devices, of which a test writes down what they did. Stands in torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traces: list[list[dict[str, Any]]] = [[], []]
        self.recording = False
        self.backend = "native"
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: self.backend)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(
            torch.cuda.memory, "_snapshot", lambda device: {"device_traces": self.traces, "segments": []}
        )
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.recording, raising=False)

    def record(self, enabled: str | None, **options: Any) -> None:
        self.recording = enabled is not None

    def did(self, action: str, size_bytes: int, address: int = 1 << 20, device: int = 1) -> None:
        assert self.recording
        time_us = 7 + sum(map(len, self.traces))
        entry = {"action": action, "size": size_bytes, "stream": 0, "frames": [], "time_us": time_us}
        # Of an allocation that failed the allocator tells what was free, instead of an address.
        self.traces[device].append(entry | ({"device_free": 0} if action == "oom" else {"addr": address}))

    def did_often(self, action: str, times: int) -> None:
        for _ in range(times):
            self.did(action, KIB)

    def did_and_failed(self, action: str, size_bytes: int) -> None:
        self.did(action, size_bytes)
        raise ZeroDivisionError


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> WrittenHistory:
    return WrittenHistory(monkeypatch)


SECOND = torch.device("cuda", 1)


def test_sizes_asked_of_cuda_are_counted_in_blocks(history):
    with AllocationLog(SECOND) as log:
        history.did("alloc", 1000, address=512)
        history.did("alloc", 512, address=4096)
        history.did("free_requested", 1000, address=512)
        history.did("alloc", 1, address=512)
    assert sizes(log) == [1024, 512, -1024, 512]
    assert [event.address for event in log.events] == [512, 4096, 512, 512]
    assert [event.time_ns for event in log.events] == [7000, 8000, 9000, 10000]
    assert log.peak_bytes == 1536


def test_what_cuda_does_besides_handing_out_blocks_is_no_allocation(history):
    with AllocationLog(SECOND) as log:
        for action in ("segment_map", "segment_alloc", "oom", "snapshot", "an action of a later version"):
            history.did(action, 20 << 20)
        history.did("alloc", 1 << 20)
        history.did("free_requested", 1 << 20)
        history.did("free_completed", 1 << 20)
        history.did("segment_unmap", 20 << 20)
        history.did("segment_free", 20 << 20)
    assert sizes(log) == [1 << 20, -(1 << 20)]


def test_a_block_whose_stream_is_still_busy_is_free_once_its_release_is_requested(history):
    with AllocationLog(SECOND) as log:
        history.did("alloc", KIB, address=0)
        history.did("free_requested", KIB, address=0)
        history.did("alloc", KIB, address=KIB)
        history.did("free_completed", KIB, address=0)
    assert log.peak_bytes == KIB


def test_marks_on_cuda_are_told_from_tensors_in_a_block_of_the_same_size(history):
    mark_bytes = rkgb.devices.allocation_log._MARK_BYTES
    block_bytes = device_of(SECOND).allocated_bytes(mark_bytes)
    assert block_bytes != mark_bytes
    with AllocationLog(SECOND) as log:
        history.did("alloc", block_bytes, address=0)
        history.did("alloc", mark_bytes, address=8 << 20)
        history.did("free_requested", mark_bytes, address=8 << 20)
        history.did("free_requested", block_bytes, address=0)
    assert sizes(log) == [block_bytes, -block_bytes]
    assert log.marks == [1]


def test_other_devices_are_not_in_the_log(history, monkeypatch):
    with AllocationLog(SECOND) as log:
        history.did("alloc", KIB, device=0)
        history.did("alloc", 2 * KIB, device=1)
    assert sizes(log) == [2 * KIB]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with AllocationLog(torch.device("cuda")) as log:
        history.did("alloc", 4 * KIB, device=0)
        history.did("alloc", 8 * KIB, device=1)
    assert sizes(log) == [4 * KIB]


def test_what_cuda_did_before_the_block_is_left_out(history):
    history.recording = True
    history.did("alloc", KIB, address=0)
    history.recording = False
    with AllocationLog(SECOND) as log:
        history.did("free_requested", KIB, address=0)
        history.did("alloc", 2 * KIB, address=0)
    assert sizes(log) == [2 * KIB]


def test_a_history_that_lost_events_is_no_measurement(history, monkeypatch):
    monkeypatch.setattr(rkgb.devices.cuda, "_MOST_EVENTS", 3)
    with AllocationLog(SECOND) as log:
        history.did("alloc", KIB)
        history.did("free_requested", KIB)
    assert log.peak_bytes == KIB
    history.traces = [[], []]
    with (
        pytest.raises(RuntimeError, match=r"keeps the last 3 events, and more happened on cuda:1"),
        AllocationLog(SECOND),
    ):
        history.did_often("alloc", 3)
    assert not history.recording


def test_a_device_without_a_history_is_refused(history):
    with (
        pytest.raises(RuntimeError, match="history of 2 devices, and none of cuda:2"),
        AllocationLog(torch.device("cuda", 2)),
    ):
        pass
    assert not history.recording


def test_a_history_that_somebody_else_records_is_left_alone(history):
    with AllocationLog(SECOND) as log:
        with pytest.raises(RuntimeError, match="recorded for somebody else"), AllocationLog(SECOND):
            pass
        history.did("alloc", KIB)
    assert sizes(log) == [KIB]


def test_an_allocator_without_a_history_is_refused(history):
    history.backend = "cudaMallocAsync"
    with (
        pytest.raises(RuntimeError, match="allocator 'cudaMallocAsync' there, which keeps no history"),
        AllocationLog(SECOND),
    ):
        pass
    assert not history.recording


def test_an_error_inside_ends_the_recording_on_cuda(history):
    log = AllocationLog(SECOND)
    with pytest.raises(ZeroDivisionError), log:
        history.did_and_failed("alloc", KIB)
    assert not history.recording
    assert sizes(log) == [KIB]


def test_cuda_is_warmed_up_once_and_the_cpu_is_not(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"wait for {device}"))
    device_of(CPU).warm_up(lambda: done.append("run"))
    assert done == []
    device_of(SECOND).warm_up(lambda: done.append("run"))
    assert done == ["run", "wait for cuda:1"]


@pytest.mark.cuda
def test_the_log_on_cuda_is_in_blocks_of_the_allocator():
    device = torch.device("cuda", 0)
    with AllocationLog(device) as log:
        first = torch.empty(1000, dtype=torch.uint8, device=device)
        log.mark()
        del first
        torch.empty(5 << 20, dtype=torch.uint8, device=device)
    assert sizes(log) == [1024, -1024, 5 << 20, -(5 << 20)]
    assert log.marks == [1]
