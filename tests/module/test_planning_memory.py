"""What planning itself takes is a figure of the plan, of its file and of its reports."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import nn

from rockmate import Rockmate
from rockmate.memory.resident import ResidentRise

PAGES = 64 << 20


def test_a_rise_is_told_that_is_over_by_the_end():
    seen = threading.Event()
    with ResidentRise() as resident:
        taken = mmap.mmap(-1, PAGES)
        for place in range(0, PAGES, mmap.PAGESIZE):
            taken[place] = 1
        resident.rise_bytes()
        taken.close()
        seen.set()
    assert seen.is_set()
    assert PAGES <= resident.rise_bytes() < 4 * PAGES
    assert not any(thread.name == "rockmate-resident" for thread in threading.enumerate())


def test_a_plan_tells_what_planning_took_and_so_does_its_file(tmp_path):
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    planned = Rockmate(model, torch.randn(64, 16), 1.0)
    taken_bytes = planned.plan.planning_peak_bytes
    assert taken_bytes is not None
    assert 0 <= taken_bytes < 2 << 30
    planned.save_plan(tmp_path / "plan.json")
    again = Rockmate(model, torch.randn(64, 16), plan=tmp_path / "plan.json")
    assert again.plan.planning_peak_bytes == taken_bytes
