"""What a budget may be: its forms, what is free on the device, and the refusals before any long work."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from rkgb.devices.host_memory import cgroup_free_bytes
from rkgb.devices.registry import device_of
from rockmate import BudgetError, BudgetTooSmall, PeakMemory, Rockmate
from rockmate.memory.budget import RESERVE, resolve_budget
from tests.free_memory import free_is
from tests.module.models import Layers, built, rows
from tests.module.steps import CPU, FEW_ROUNDS, squares

GIB = 1 << 30
PEAK_BYTES = 1_000_000


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        (123_456, 123_456),
        ("8GiB", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("500MB", 500 * 10**6),
        ("600 KiB", 600 * 1024),
        ("0.5 gib", GIB // 2),
        (0.25, PEAK_BYTES // 4),
        (1.0, PEAK_BYTES),
        ("0.5", PEAK_BYTES // 2),
        (" 50 % ", PEAK_BYTES // 2),
        ("100%", PEAK_BYTES),
        ("1", PEAK_BYTES),
        ("1.0", PEAK_BYTES),
        ("2G", 2 * 10**9),
        ("2 GB", 2 * 10**9),
        ("512M", 512 * 10**6),
        ("1.5GiB", 3 * GIB // 2),
        ("1e9", 10**9),
        ("2_000_000_000", 2 * 10**9),
        (np.int32(4096), 4096),
        (np.float32(0.5), PEAK_BYTES // 2),
        (torch.tensor(4096), 4096),
        (torch.tensor(0.5), PEAK_BYTES // 2),
    ],
)
def test_every_form_means_bytes(budget, size_bytes):
    assert resolve_budget(budget, PEAK_BYTES, CPU) == size_bytes
    assert resolve_budget(budget, PEAK_BYTES, CPU, present_bytes=77) == size_bytes


@pytest.mark.parametrize("budget", [None, "auto", " Auto "])
def test_no_budget_is_what_is_free_less_the_reserve(budget):
    low = resolve_budget(budget, PEAK_BYTES, CPU)
    free = device_of(CPU).available_bytes()
    assert low == pytest.approx((1 - RESERVE) * free, rel=0.2)  # other processes take and give meanwhile
    assert low < free


def test_what_is_there_already_is_in_a_budget_of_what_is_free(monkeypatch):
    monkeypatch.setattr("rockmate.memory.budget.device_of", free_is(1000))
    assert resolve_budget(None, PEAK_BYTES, CPU, present_bytes=500) == 1400


def test_a_module_planned_without_a_budget_gets_what_was_free_when_it_was_planned(monkeypatch):
    monkeypatch.setattr("rockmate.memory.budget.device_of", free_is(10 << 20))
    model = Rockmate(built(Layers), rows(), loss=squares)
    assert model.plan.budget_bytes == int((10 << 20) * (1 - RESERVE))
    monkeypatch.setattr("rockmate.memory.budget.device_of", free_is(0))
    squares(model(rows(1))).backward()  # what is free later does not matter


@pytest.mark.parametrize(
    ("budget", "advice"),
    [
        (2.0, 'For GiB, write "2GiB".'),
        (1.0000001, "at most 1"),
        (8e9, "Bytes are whole numbers: int(8000000000.0)."),
        (math.inf, "at most 1"),
        (math.nan, "at most 1"),
        (-0.5, "above 0"),
        ("automatic", "cannot be read"),
        ("-1 GiB", "cannot be read"),
        (-1, "not positive"),
        (True, "no amount of memory"),
        (0, "the budget 0 is not positive"),
        ("0", "the budget '0' is a fraction"),
        ("0 GiB", "the budget '0 GiB' is not positive"),
        ("banana", "'banana' is no size"),
        ("200%", "the budget '200%' is a fraction of the eager peak: it must be above 0 and at most 1"),
        ("-5%", "the budget '-5%' is a fraction"),
        ("nan", "the budget 'nan' is a fraction"),
        ("1.5", "the budget '1.5' is no whole number of bytes. For GiB, write \"1.5GiB\""),
        (1.5, "the budget 1.5 is a float, so a fraction"),
        (np.float64(1.5), "1.5"),
        (np.True_, "is a bool"),
        (torch.tensor(True), "no amount of memory"),
        (torch.ones(2), "is a Tensor"),
        ([1], "is a list"),
    ],
    ids=repr,
)
def test_other_values_are_refused_before_anything_runs(budget, advice):
    with pytest.raises(BudgetError, match=re.escape(advice)):
        Rockmate(nn.Linear(1, 1), object(), budget)  # no sample at all: nothing may look at it


@pytest.mark.cuda
def test_what_is_available_is_within_the_share_of_the_device_that_the_process_may_take():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_per_process_memory_fraction(0.1, device)
    try:
        available = device_of(device).available_bytes()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert 0 < available <= 0.1 * torch.cuda.get_device_properties(device).total_memory
    assert available < device_of(device).available_bytes()


# ---- containers ---------------------------------------------------------------------------------------


def unified_group(folder, limit, usage, cache=0):
    """The files of a control group of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile {cache + 9}\ninactive_file {cache}\n")


def controller_group(folder, limit, usage, cache=0):
    """The files of a control group of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_the_tightest_of_a_groups_ancestors_limits(tmp_path):
    unified_group(tmp_path / "outer", 1000, 700)
    unified_group(tmp_path / "outer" / "inner", "max", 100)
    assert cgroup_free_bytes("0::/outer/inner\n", tmp_path) == 300
    unified_group(tmp_path / "outer" / "inner", 250, 100)
    assert cgroup_free_bytes("0::/outer/inner\n", tmp_path) == 150


def test_cached_files_of_a_group_can_be_had(tmp_path):
    unified_group(tmp_path / "job", 1000, 900, cache=400)
    assert cgroup_free_bytes("0::/job\n", tmp_path) == 500


def test_a_container_that_does_not_see_its_own_path_has_its_limit_at_the_root(tmp_path):
    controller_group(tmp_path / "memory", 1000, 600, cache=50)
    membership = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n"
    assert cgroup_free_bytes(membership, tmp_path) == 450


def test_a_group_above_its_limit_has_nothing_left(tmp_path):
    unified_group(tmp_path / "job", 1000, 1100)
    assert cgroup_free_bytes("0::/job\n", tmp_path) == 0


@pytest.mark.parametrize("membership", ["", "0::/\n", "7:cpu:/job\n", "no such line"])
def test_without_a_limit_nothing_is_limited(tmp_path, membership):
    assert cgroup_free_bytes(membership, tmp_path) > 1 << 60


def test_what_is_available_is_within_a_groups_limit(tmp_path, monkeypatch):
    unified_group(tmp_path / "job", 5000, 1000)
    (tmp_path / "membership").write_text("0::/job\n")
    monkeypatch.setattr("rkgb.devices.host_memory._CGROUP_ROOT", tmp_path)
    monkeypatch.setattr("rkgb.devices.host_memory._CGROUP_MEMBERSHIP", tmp_path / "membership")
    assert device_of(CPU).available_bytes() == 4000


@pytest.mark.ci
def test_a_budget_one_byte_too_small_is_told_in_bytes():
    network, sample = built(Layers), rows()
    with pytest.raises(BudgetTooSmall) as refused:
        Rockmate(network, sample, 1000, loss=squares, limits=FEW_ROUNDS)
    with pytest.raises(BudgetTooSmall, match=r"^budget \d+ bytes < \d+ bytes, the smallest"):
        Rockmate(network, sample, refused.value.smallest_budget_bytes - 1, loss=squares, limits=FEW_ROUNDS)


def test_a_fraction_under_autocast_is_of_a_step_whose_backward_is_outside():
    """As PyTorch's documentation says: the end of the context lets go of the weights that were cast."""
    network, sample = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        plan = Rockmate(network, sample, 1.0, loss=half_squares, limits=FEW_ROUNDS).plan
    with PeakMemory() as memory:
        with torch.autocast("cpu", torch.bfloat16):
            output = network(sample)
            loss = half_squares(output)
        loss.backward()
    assert plan.baseline_peak_bytes == plan.budget_bytes == memory.peak_bytes


def half_squares(output):
    return output.float().square().mean()


# ---- workspaces that differ from run to run ------------------------------------------------------------------


class Varying(torch.autograd.Function):
    """Takes another workspace in each run, as some libraries' transforms do."""

    sizes = itertools.cycle([10_000, 30_000, 20_000, 40_000, 10_000])

    @staticmethod
    def forward(ctx, value):
        torch.empty(next(Varying.sizes), dtype=torch.uint8)
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(next(Varying.sizes), dtype=torch.uint8)
        return gradient * 2


class Transforms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(Varying.apply(nn.functional.gelu(layer(hidden))))
        return hidden


@pytest.mark.parametrize("make", [Transforms, Layers, lambda: nn.Sequential(nn.Linear(32, 8), nn.Tanh())])
@pytest.mark.ci
def test_the_smallest_budget_that_is_named_works_when_asked_for(make):
    network = built(make)
    sample = rows() if make is Layers else torch.randn(64, 32)
    for budget in (1000, 4000):
        with pytest.raises(BudgetTooSmall) as refused:
            Rockmate(network, sample, budget, loss=squares, limits=FEW_ROUNDS)
        named = refused.value.smallest_budget_bytes
        for _ in range(3):
            plan = Rockmate(network, sample, named, loss=squares, limits=FEW_ROUNDS).plan
            assert plan.measured_peak_bytes <= plan.budget_bytes == named


@pytest.mark.parametrize("scope", ["step", "total"])
@pytest.mark.ci
def test_the_whole_step_is_never_refused(scope):
    network, sample = built(Transforms), torch.randn(64, 32)
    for budget in (1.0, "100%", 1.0, 1.0):
        plan = Rockmate(network, sample, budget, loss=squares, limits=FEW_ROUNDS, scope=scope).plan
        assert plan.measured_peak_bytes <= plan.budget_bytes
        assert plan.whole_budget_bytes >= plan.budget_bytes
