"""Who holds the memory of a device: the CPU's tests, by the history of its allocator."""

import pytest
import torch

from rockmate import PeakReport
from tests.accelerator.shared import shared_from
from tests.observing import test_peak_report
from tests.observing.test_peak_report import Net, train

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]
globals().update(
    shared_from(
        test_peak_report,
        but={
            "test_where_memory_runs_out_the_note_says_who_holds_it": "below: a device has its own words for that",
            "test_steps_are_told_apart_where_no_log_can_end_between_them": "of the CPU's profiler",
        },
    )
)


def test_the_accelerator_is_what_is_looked_at(device):
    assert PeakReport().device == torch.device(device.type, 0)


def test_sizes_are_those_of_blocks(device):
    """The peak is the allocator's own."""
    memory = torch.accelerator.memory
    torch.accelerator.synchronize()
    before = memory.memory_allocated()
    memory.reset_peak_memory_stats()
    with PeakReport(device) as report:
        train(Net(), 3)
    assert report.peak_bytes == memory.max_memory_allocated() - before
    assert all(holder.size_bytes % 512 == 0 for holder in report.holders)


def test_what_runs_out_is_told(device, extension):
    memory = torch.accelerator.memory
    memory.empty_cache()
    extension.limit(0, memory.memory_reserved() + (24 << 20))

    def fail():
        with PeakReport(device):
            kept = []
            train(Net(), 200, keep=kept)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fail()
    told = caught.value.__notes__[-1]
    assert "MiB at the highest moment, in step" in told
    assert "native_batch_norm" in told
    assert "growing from step to step" in told
