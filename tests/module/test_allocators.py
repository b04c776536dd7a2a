"""What a step makes CUDA's allocator reserve, when that is told, and what can be set against gaps."""

import ctypes
import mmap
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rockmate.planning.trying.tried
from rkgb.devices.cpu import Cpu
from rkgb.devices.cuda import Cuda, with_expandable_segments
from rkgb.devices.registry import device_of
from rkgb.ir.sample import make_sample
from rkgb.state.module_state import module_state_kept
from rockmate import AllocatorSettings, FragmentationWarning, Rockmate, reduce_fragmentation
from rockmate.memory.allocators import (
    StepPeak,
    allowed_reserved_bytes,
    end_peak,
    fragmentation_text,
    start_peak,
)
from rockmate.planning.trying.real_step import warm_step
from tests.module.steps import squares

MIB, GIB = 1 << 20, 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class CachingAllocator:
    """Levels of CUDA's allocator, as its statistics tell them: blocks in use, and segments. Stands in torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.most_allocated = self.reserved = self.most_reserved = 0
        self.gaps = 0  # in segments that are in use, so that they cannot be given back
        for name, function in {
            "synchronize": lambda device: None,
            "empty_cache": self.empty_cache,
            "reset_peak_memory_stats": self.reset,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.most_allocated,
            "max_memory_reserved": lambda device: self.most_reserved,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def take(self, block_bytes: int, from_device_bytes: int) -> None:
        self.allocated += block_bytes
        self.reserved += from_device_bytes
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def free(self, block_bytes: int) -> None:
        self.allocated -= block_bytes

    def empty_cache(self) -> None:
        self.reserved = self.allocated + self.gaps

    def reset(self, device: torch.device) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> CachingAllocator:
    return CachingAllocator(monkeypatch)


# ---- what a step takes ---------------------------------------------------------------------------------------


def test_what_planning_left_in_the_cache_counts_for_no_step(allocator):
    allocator.take(10 * MIB, 20 * MIB)
    allocator.gaps = 2 * MIB
    allocator.take(300 * MIB, 300 * MIB)  # of planning
    allocator.free(300 * MIB)
    before = start_peak(CUDA)
    allocator.take(100 * MIB, 110 * MIB)
    allocator.free(100 * MIB)
    assert end_peak(CUDA, before, 99 * MIB) == StepPeak(100 * MIB, 112 * MIB, before)  # and the gaps that were there


def test_the_log_counts_where_the_allocator_s_own_peak_is_lower(allocator):
    allocator.take(50 * MIB, 50 * MIB)
    before = start_peak(CUDA)
    allocator.free(50 * MIB)  # of what was there before: the log does not see it
    allocator.take(60 * MIB, 10 * MIB)
    assert end_peak(CUDA, before, 60 * MIB) == StepPeak(60 * MIB, 10 * MIB, before)


def test_the_cache_is_given_back_after_planning(allocator):
    allocator.take(10 * MIB, 40 * MIB)
    device_of(CUDA).empty_cache()
    assert allocator.reserved == 10 * MIB


def test_on_the_cpu_nothing_of_cuda_is_touched(monkeypatch):
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, None)
    assert end_peak(CPU, start_peak(CPU), 7) == StepPeak(7, None)
    device_of(CPU).empty_cache()


def test_gradients_that_are_there_count_in_neither_peak():
    without, with_gradients = StepPeak(100, 130), StepPeak(85, 120)
    assert without.above(20) == StepPeak(80, 110)
    assert without.above(20).or_higher(with_gradients) == StepPeak(85, 120)
    assert StepPeak(9).above(4).or_higher(StepPeak(3)) == StepPeak(5)
    assert StepPeak(90, 10).above(20).reserved_bytes == 0


# ---- the warm-up ---------------------------------------------------------------------------------------------


def test_a_warm_up_leaves_no_gradients_and_no_statistics(allocator, monkeypatch):
    monkeypatch.setattr(Cuda, "available_bytes", lambda self: GIB)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    sample = make_sample(model, (torch.randn(8, 4, requires_grad=True),))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls: list[bool] = []
    model.register_forward_hook(lambda *_: calls.append(model[0].weight.grad is None))
    warm_step(model, sample, squares, CUDA, partial(module_state_kept, model, {CPU}))
    assert calls == [True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sample.args[0].grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("budget", "solver"), [(1.0, "auto"), (0.8, "keep-none")])  # none goes by measured times
def test_planning_with_warm_ups_comes_to_the_same(monkeypatch, budget, solver):
    """As on CUDA, but on the CPU, where nothing needs them: bytes, buffers and random numbers are what they were."""

    def planned() -> tuple[Rockmate, torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(True)]
        network = nn.Sequential(*layers, nn.Linear(64, 1))
        model = Rockmate(network, torch.randn(64, 64), budget, loss=torch.mean, solver=solver)
        return model, torch.get_rng_state()

    cold, cold_state = planned()
    runs: list[torch.device] = []
    monkeypatch.setattr(Cpu, "warm_up", lambda self, run: (runs.append(self.device), run()))
    warm, warm_state = planned()
    assert len(runs) >= 4  # blocks, all of them together, the eager step, and the plan's
    for name in ("peak_bytes", "measured_peak_bytes", "baseline_peak_bytes", "budget_bytes"):
        assert getattr(warm.plan, name) == getattr(cold.plan, name), name
    assert torch.equal(cold_state, warm_state)
    for ours, theirs in zip(warm.state_dict().values(), cold.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(parameter.grad is None for parameter in warm.parameters())


def test_the_cpu_needs_no_warm_up():
    def refuse(*_):
        raise AssertionError("this step was to be left out")

    model = nn.Linear(2, 2)
    warm_step(refuse, make_sample(model, (torch.ones(2),)), None, CPU, nullcontext)


def test_a_warm_up_that_does_not_fit_says_where(allocator, monkeypatch):
    class Fails(nn.Module):
        def forward(self, _):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Cuda, "available_bytes", lambda self: GIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        warm_step(Fails(), make_sample(nn.Linear(2, 2), (torch.ones(2),)), None, CUDA, nullcontext)
    assert "in a real step of the plan" in caught.value.__notes__[0]
    assert "1.00 GiB were free on cuda:0" in caught.value.__notes__[0]


# ---- when gaps are told --------------------------------------------------------------------------------------


def expandable_segments(monkeypatch: pytest.MonkeyPatch, are_on: bool) -> None:
    snapshot = {"allocator_settings": {"expandable_segments": are_on}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)


def test_a_tenth_above_the_budget_is_allowed_and_no_more(monkeypatch):
    assert allowed_reserved_bytes(10 * GIB, CUDA) == 11 * GIB
    assert fragmentation_text(StepPeak(9 * GIB, 11 * GIB), 10 * GIB, CUDA) is None
    expandable_segments(monkeypatch, are_on=False)
    told = fragmentation_text(StepPeak(9 * GIB, 12 * GIB), 10 * GIB, CUDA)
    for part in ("9.00 GiB", "10.0 GiB", "12.0 GiB", "+20%", "PYTORCH_ALLOC_CONF=expandable_segments:True"):
        assert part in told
    assert "rockmate.reduce_fragmentation()" in told


def test_who_has_expandable_segments_is_not_told_to_switch_them_on(monkeypatch):
    expandable_segments(monkeypatch, are_on=True)
    told = fragmentation_text(StepPeak(9 * GIB, 12 * GIB), 10 * GIB, CUDA)
    assert "expandable already" in told
    assert "reduce_fragmentation()" not in told


def test_the_smallest_segments_are_no_gaps_worth_telling(monkeypatch):
    expandable_segments(monkeypatch, are_on=False)
    assert fragmentation_text(StepPeak(MIB, MIB + Cuda.smallest_segments_bytes), MIB, CUDA) is None
    assert fragmentation_text(StepPeak(MIB, MIB + Cuda.smallest_segments_bytes + 1), MIB, CUDA) is not None


def test_nothing_is_told_on_the_cpu():
    assert fragmentation_text(StepPeak(2 * GIB), GIB, CPU) is None


@pytest.fixture
def network() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)), torch.randn(8, 16)


def test_a_plan_on_the_cpu_knows_no_reserved_bytes(network):
    plan = Rockmate(*network, 1.0, loss=torch.mean).plan
    assert plan.measured_reserved_bytes is None
    assert "reserved" not in str(plan)
    assert "3.00 GiB reserved" in str(replace(plan, measured_reserved_bytes=3 * GIB))


@pytest.mark.parametrize("expandable", [False, True])
def test_gaps_are_told_to_who_asked_for_the_plan(network, monkeypatch, expandable):
    monkeypatch.setattr(rockmate.planning.trying.tried, "real_peak_bytes", lambda *_: StepPeak(GIB, 3 * GIB))
    expandable_segments(monkeypatch, expandable)
    monkeypatch.setattr(Cpu, "gaps_advice", Cuda.gaps_advice)
    with pytest.warns(FragmentationWarning) as told:
        plan = Rockmate(*network, 2 * GIB, loss=torch.mean).plan
    assert [warning.filename for warning in told] == [__file__]
    assert ("expandable already" in str(told[0].message)) == expandable
    assert (plan.measured_peak_bytes, plan.measured_reserved_bytes) == (GIB, 3 * GIB)


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:100", "max_split_size_mb:100,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:True"),
        (" expandable_segments : False , backend:native,", " backend:native,expandable_segments:True"),
        ("roundup_power2_divisions:[256:1,>:4]", "roundup_power2_divisions:[256:1,>:4],expandable_segments:True"),
    ],
)
def test_other_settings_stay(settings, wanted):
    assert with_expandable_segments(settings) == wanted


@given(
    st.lists(
        st.sampled_from(
            [
                "max_split_size_mb:64",
                "expandable_segments:False",
                "roundup_power2_divisions:[1:2,>:8]",
                "backend:native",
            ]
        )
    )
)
def test_settings_are_told_once_however_often_they_are_made(parts):
    once = with_expandable_segments(",".join(parts))
    assert with_expandable_segments(once) == once
    assert once.count("expandable_segments") == 1
    assert all(once.count(part) >= parts.count(part) for part in parts if not part.startswith("expandable"))


class Settings:
    """CUDA's allocator, of which only the settings are there. Stands in torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text = "max_split_size_mb:64"
        self.backend = "native"
        self.initialized = self.supported = True
        self.emptied = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: self.backend)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: self.text, raising=False)
        monkeypatch.setattr(
            torch._C, "_accelerator_setAllocatorSettings", lambda text: setattr(self, "text", text), raising=False
        )
        monkeypatch.setattr(ctypes, "CDLL", lambda name: None)  # the test's own process stays as it is

    def empty_cache(self) -> None:
        self.emptied += 1

    def snapshot(self) -> dict[str, dict[str, bool]]:
        assert self.initialized
        return {"allocator_settings": {"expandable_segments": self.supported and "segments:True" in self.text}}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    return Settings(monkeypatch)


def test_segments_become_expandable_and_stay_so(settings):
    for _ in range(2):
        assert reduce_fragmentation() == AllocatorSettings(expandable_segments=True, freed_memory_returned=False)
        assert settings.text == "max_split_size_mb:64,expandable_segments:True"
    assert settings.emptied == 2


def test_segments_can_be_made_expandable_before_cuda_starts(settings):
    settings.initialized = False
    assert reduce_fragmentation().expandable_segments
    assert settings.emptied == 0


def test_a_system_without_expandable_segments_is_told(settings):
    settings.supported = False
    assert not reduce_fragmentation().expandable_segments


def test_another_allocator_is_left_as_it_is(settings):
    settings.backend = "cudaMallocAsync"
    assert not reduce_fragmentation().expandable_segments
    assert settings.text == "max_split_size_mb:64"


def test_a_refused_setting_says_what_to_do_instead(settings, monkeypatch):
    def refuse(text: str) -> None:
        raise ValueError("Unrecognized key")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    with pytest.raises(ValueError, match="Unrecognized key") as caught:
        reduce_fragmentation()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment" in caught.value.__notes__[0]


def test_pytorch_takes_the_settings_that_are_made():
    """PyTorch's own functions, in a process of its own: what the environment says, and then what was set."""
    program = (
        "import torch; from rkgb.devices.cuda import _allocator_settings, _set_allocator_settings\n"
        "from rkgb.devices.cuda import with_expandable_segments as more\n"
        "_set_allocator_settings(more(_allocator_settings())); print(_allocator_settings())"
    )
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4]"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    # PyTorch 2.9 takes them, and cannot be asked: what the environment says is all that is known there.
    told = ",expandable_segments:True" if hasattr(torch._C, "_accelerator_getAllocatorSettings") else ""
    assert done.stdout.strip() == environment["PYTORCH_ALLOC_CONF"] + told


def printed_with_glibc(program: str) -> str:
    """What the program prints in a process of its own; the test is skipped where it says that there is no glibc."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    if done.stdout.startswith("no glibc"):
        pytest.skip("of glibc")
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.ci
def test_freed_tensors_go_back_to_the_system():
    """Every second of 1000 tensors of 100 KiB is freed: their pages are returned, though others lie between them."""
    program = (
        "import psutil, rockmate, rockmate.module, torch\n"
        "assert rockmate.reduce_fragmentation() == rockmate.reduce_fragmentation()\n"
        "if not rockmate.reduce_fragmentation().freed_memory_returned: print('no glibc'); raise SystemExit\n"
        "tensors = [torch.ones(100 << 10, dtype=torch.uint8) for _ in range(1000)]\n"
        "before = psutil.Process().memory_info().rss\n"
        "del tensors[::2]\n"
        "print(before - psutil.Process().memory_info().rss)"
    )
    assert int(printed_with_glibc(program)) >= 500 * (100 << 10) * 0.9


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.ci
def test_freed_memory_is_kept_until_it_is_to_be_returned():
    """One tensor of 64 MiB after the other is in the pages of those before, and another setting later is followed, too.

    Tensors are aligned, and small blocks may come to lie where the one before was: the first few find their places.
    """
    program = (
        "import psutil, resource, rockmate, torch\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(64 << 20, dtype=torch.uint8)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "if not rockmate.keep_freed_memory(): print('no glibc'); raise SystemExit\n"
        "first = faults()\n"
        "torch.ones(160 << 20, dtype=torch.uint8)\n"
        "print(first, sum([faults() for _ in range(30)][-15:]))\n"
        "rockmate.reduce_fragmentation()\n"
        "before = psutil.Process().memory_info().rss\n"
        "tensor = torch.ones(256 << 20, dtype=torch.uint8)\n"
        "del tensor\n"
        "print(psutil.Process().memory_info().rss - before)"
    )
    first, later, left_bytes = map(int, printed_with_glibc(program).split())
    assert first >= (64 << 20) / mmap.PAGESIZE * 0.9
    assert later < first / 100
    assert left_bytes < 8 << 20
