"""Bytes of operations and backward stages, from logs written by hand."""

import torch

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.caching_allocator import AllocationEvent
from rkgb.profile.timeline import StageWindow, forward_peaks, join_windows, measure_windows

MARK = "mark"


def merge_stages(log, windows, known):
    measure_windows(log, windows, known)
    return join_windows(windows)


def log_of(*steps) -> AllocationLog:
    """A log of marks and of pairs (address letter, bytes), a release being negative."""
    log = AllocationLog(torch.device("cpu"))
    for step in steps:
        if step == MARK:
            log.marks.append(len(log.events))
        else:
            address, size_bytes = step
            log.events.append(AllocationEvent(ord(address), size_bytes))
    return log


def windows_of(*ops, first=0, needs=None):
    """A window for each operation, from consecutive marks."""
    return [
        StageWindow(op, first + place, dict.fromkeys((needs or {}).get(op, ())), nodes=[op])
        for place, op in enumerate(ops)
    ]


def summary(windows):
    return [(window.op, window.resident_bytes, window.peak_bytes) for window in windows]


def known(*pairs):
    """Storages told by address letter and by a mark that follows their allocation."""
    return [(ord(address), mark) for address, mark in pairs]


# ---- forward -------------------------------------------------------------------------------------------


def test_an_operation_peaks_above_what_was_there_when_it_started():
    log = log_of(("z", 100), MARK, ("a", 10), ("t", 5), ("t", -5), MARK, ("b", 20), ("a", -10), ("c", 3))
    assert forward_peaks(log, [0, 1]) == [15, 20]


def test_an_operation_without_events_peaks_at_zero():
    assert forward_peaks(log_of(MARK, MARK, ("a", 10), MARK), [0, 1]) == [0, 10]


def test_the_window_of_an_operation_ends_at_the_next_mark():
    log = log_of(MARK, ("a", 10), MARK, ("a", -10), ("b", 4), MARK, ("c", 7), MARK)
    assert forward_peaks(log, [0, 2]) == [10, 7]


# ---- backward ------------------------------------------------------------------------------------------


def test_no_window_makes_no_stage():
    assert merge_stages(log_of(("a", 10)), [], []) == []


def test_saved_storages_are_not_counted():
    """a (10) is kept by the forward; the backward makes gradient g (4), then frees a, then makes h (2)."""
    log = log_of(("a", 10), MARK, MARK, ("g", 4), MARK, ("a", -10), ("h", 2))
    stages = merge_stages(log, windows_of("f", "e", first=1, needs={"e": "a"}), known(("a", 0)))
    assert summary(stages) == [("f", 0, 4), ("e", 4, 4)]


def test_room_made_by_saved_storages_inside_a_window_counts_there_only():
    """Any schedule may have freed them; below the start of a window they are no memory to be had."""
    log = log_of(("a", 10), MARK, MARK, ("a", -10), ("g", 4), MARK, ("h", 20), MARK)
    stages = merge_stages(log, windows_of("f", "e", first=1, needs={"f": "a", "e": "b"}), known(("a", 0)))
    assert summary(stages) == [("f", 0, 0), ("e", 4, 24)]


def test_gradients_alive_at_the_start_of_a_stage_are_resident():
    log = log_of(MARK, ("g", 8), MARK, ("h", 8), ("g", -8), MARK, ("i", 8), ("h", -8))
    stages = merge_stages(log, windows_of("c", "b", "a", needs={"b": "x", "a": "y"}), [])
    assert summary(stages) == [("c", 0, 8), ("b", 8, 16), ("a", 8, 16)]


def test_workspace_raises_the_peak_but_not_what_stays():
    log = log_of(MARK, ("w", 100), ("g", 8), ("w", -100), MARK, ("h", 8))
    stages = merge_stages(log, windows_of("b", "a", needs={"a": "x"}), [])
    assert summary(stages) == [("b", 0, 108), ("a", 8, 16)]


def test_an_address_used_again_is_told_apart_by_its_place():
    """x is freed in the forward, and its address given to gradient g, which must count."""
    log = log_of(("x", 10), MARK, ("x", -10), MARK, ("x", 10), MARK, ("h", 3))
    stages = merge_stages(log, windows_of("b", "a", first=1, needs={"a": "q"}), known(("x", 0)))
    assert summary(stages) == [("b", 0, 10), ("a", 10, 13)]


def test_of_two_allocations_at_one_address_the_one_before_the_mark_is_meant():
    """The second is saved: it is not counted. The first was a temporary."""
    log = log_of(("x", 10), ("x", -10), ("x", 6), MARK, MARK, ("g", 4), MARK, ("x", -6), ("h", 1))
    stages = merge_stages(log, windows_of("b", "a", first=1, needs={"a": "q"}), known(("x", 0)))
    assert summary(stages) == [("b", 0, 4), ("a", 4, 4)]


def test_a_saved_address_used_again_by_a_gradient_counts_from_then_on():
    """a is freed in the first stage; the second stage's gradient takes its address."""
    log = log_of(("a", 10), MARK, MARK, ("g", 4), ("a", -10), MARK, ("a", 10), MARK, ("a", -10), ("h", 2))
    windows = windows_of("c", "b", "a", first=1, needs={"b": "q", "a": "r"})
    assert summary(merge_stages(log, windows, known(("a", 0)))) == [("c", 0, 4), ("b", 4, 14), ("a", 14, 14)]


def test_temporaries_of_the_forward_that_are_alive_at_the_backward_count():
    """What is neither a value nor saved is memory all the same."""
    log = log_of(("v", 10), ("t", 7), MARK, MARK, ("g", 4))
    assert summary(merge_stages(log, windows_of("a", first=1), known(("v", 0)))) == [("a", 7, 11)]


def test_windows_of_one_operation_are_one_stage():
    log = log_of(MARK, ("g", 8), MARK, ("h", 20), ("g", -8), MARK, ("i", 1))
    windows = windows_of("a", "a", "b", needs={"a": "x", "b": "y"})
    windows[1].needs["z"] = None
    stages = merge_stages(log, windows, [])
    assert summary(stages) == [("a", 8, 28), ("b", 20, 21)]  # z, read in the second window, may come back there
    assert list(stages[0].needs) == ["x", "z"]
    assert stages[0].nodes == ["a", "a"]


def test_an_operation_that_comes_back_later_is_another_stage():
    log = log_of(MARK, ("g", 8), MARK, ("h", 8), MARK, ("i", 8))
    stages = merge_stages(log, windows_of("a", "b", "a", needs={"a": "x", "b": "y"}), [])
    assert [stage.op for stage in stages] == ["a", "b", "a"]


def test_a_stage_that_reads_nothing_and_peaks_no_higher_joins_the_one_before():
    log = log_of(MARK, ("w", 50), ("w", -50), ("g", 8), MARK, ("h", 8), ("g", -8), MARK, ("i", 50))
    windows = windows_of("a", "b", "c", needs={"a": "x"})
    stages = merge_stages(log, windows, [])
    assert summary(stages) == [("a", 0, 50), ("c", 8, 58)]


def test_the_first_stage_stays_though_it_reads_nothing():
    assert summary(merge_stages(log_of(MARK, ("g", 8)), windows_of("a"), [])) == [("a", 0, 8)]
