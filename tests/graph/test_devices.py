"""A kind of device is one class and one registration: nothing else of the library tells kinds apart."""

import sys

import pytest
import torch
from torch import nn

from rkgb import ModelError
from rkgb.devices import registry
from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.caching_allocator import AllocatorLevels
from rkgb.devices.cpu import Cpu
from rkgb.devices.registry import KINDS, device_of, host
from rkgb.ir.sample import make_sample, refuse_devices
from rkgb.state.module_state import main_device, random_states, seed_default_streams
from rockmate import PeakMemory, Rockmate
from rockmate.guards.flags import BackEndFlags
from rockmate.plan_files.record import made_here
from tests.scripts import run_script

CPU, ELSEWHERE = torch.device("cpu"), torch.device("xpu", 1)
PAGE_BYTES = 4096


class Pretended(Cpu):
    """An accelerator that is the CPU underneath: it rounds, waits, keeps statistics, and packs nothing."""

    asked: list[str]

    is_host = overcommits = packs = times_cold = is_orderly = False
    flags = (("pretended", lambda: "on"),)
    smallest_segments_bytes = 8 << 20

    @property
    def name(self) -> str:
        self.asked.append("name")
        return "pretended 9000"

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def allocated_bytes(self, size_bytes: int) -> int:
        return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES

    def warm_up(self, run) -> None:
        self.asked.append("warm_up")
        run()

    def restart_levels(self) -> None:
        self.asked.append("restart_levels")

    def levels(self) -> AllocatorLevels:
        return AllocatorLevels(0, 0, 7 << 20)

    def empty_cache(self) -> None:
        self.asked.append("empty_cache")

    @property
    def generator(self) -> torch.Generator:
        self.asked.append("generator")
        return torch.default_generator

    @classmethod
    def seed(cls, seed: int) -> None:
        cls.asked.append("seed")
        super().seed(seed)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of such a device, which stands in the place of the CPU."""
    monkeypatch.setattr(Pretended, "asked", [], raising=False)
    monkeypatch.setitem(KINDS, "cpu", Pretended)
    return Pretended.asked


def test_a_model_is_planned_and_trained_on_a_kind_that_is_registered(pretended):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 1)).train()
    x = torch.randn(128, 64)
    planned = Rockmate(model, x, 0.95, loss=torch.mean, solver="keep-none")
    assert {"synchronize", "warm_up", "restart_levels", "empty_cache", "generator"} <= set(pretended)
    assert planned.plan.measured_reserved_bytes == 7 << 20
    sizes = {data.size_bytes for data in planned._member.measured.problem.data}
    assert sizes
    assert all(size_bytes % PAGE_BYTES == 0 for size_bytes in sizes)
    assert not any(planned._member.measured.graphs.K_graph.restorations.values())  # it packs nothing
    state = torch.get_rng_state()
    planned(x).mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.set_rng_state(state)
    model(x).mean().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))


def test_what_is_told_of_a_device_is_what_its_kind_tells(pretended):
    made = made_here(CPU)
    assert made.device == "pretended 9000"
    assert "pretended=on" in made.flags
    assert BackEndFlags([CPU]).now()[-1] == "on"
    with AllocationLog(CPU) as log:
        kept = torch.empty(5000, dtype=torch.uint8)
    assert [event.size_bytes for event in log.events] == [2 * PAGE_BYTES]
    with PeakMemory(CPU) as memory:
        del kept
    assert memory.reserved_bytes == 7 << 20
    seed_default_streams(0)
    assert "seed" in pretended


def test_flags_of_a_kind_matter_on_it_alone():
    assert BackEndFlags([CPU]).now() == BackEndFlags([CPU, CPU]).now()
    assert not any(text.startswith("cudnn") for text in BackEndFlags([CPU]).texts())


# ---- kinds without a module ----------------------------------------------------------------------------


class Elsewhere(nn.Parameter):
    """A parameter that says that it is on another device."""

    @property
    def device(self):
        return ELSEWHERE


def on_another_device() -> nn.Module:
    model = nn.Linear(2, 2)
    model.bias = Elsewhere(torch.zeros(2))
    return model


def test_a_kind_that_is_registered_is_no_longer_refused(monkeypatch):
    model = on_another_device()
    sample = make_sample(model, torch.ones(1, 2))
    refused = r'on xpu:1\. .* kinds "cpu" and "cuda" \(with ROCm, too\) only \(.*ROCKMATE_UNPROVEN=xpu.*\): .* Move the'
    with pytest.raises(ModelError, match=refused):
        refuse_devices(model, sample)
    monkeypatch.setitem(KINDS, "xpu", type("Xpu", (Pretended,), {"kind": "xpu"}))
    refuse_devices(model, sample)
    assert main_device([CPU, ELSEWHERE]) == ELSEWHERE


@pytest.mark.slow
def test_a_kind_that_nobody_has_run_is_there_for_who_asks(monkeypatch):
    script = "from rkgb.devices.registry import KINDS; print(*sorted(KINDS))"
    monkeypatch.setenv("ROCKMATE_UNPROVEN", "xpu,other")
    assert run_script("-c", script).split() == ["cpu", "cuda", "xpu"]
    monkeypatch.delenv("ROCKMATE_UNPROVEN")
    assert run_script("-c", script).split() == ["cpu", "cuda"]


def test_what_its_allocator_does_not_tell_is_why_mps_is_refused():
    assert "MPS's allocator tells neither" in registry.refusal_text(torch.device("mps"))


class XpuAllocator:
    """What PyTorch has of XPU's allocator, with a history that is written by hand."""

    def __init__(self, monkeypatch):
        self.recording, self.traces = False, [[], []]
        monkeypatch.setattr(torch.xpu, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.xpu.memory, "_record_memory_history", self.record, raising=False)
        monkeypatch.setattr(torch.xpu.memory, "_snapshot", lambda device: {"device_traces": self.traces}, raising=False)

    def record(self, enabled, **_):
        self.recording = enabled is not None

    def did(self, action, size_bytes):
        self.traces[1].append({"action": action, "addr": 0, "size": size_bytes})


def test_the_history_of_xpu_is_read_as_that_of_cuda(monkeypatch):
    monkeypatch.setitem(KINDS, "xpu", registry.UNPROVEN["xpu"])
    allocator = XpuAllocator(monkeypatch)
    allocator.did("alloc", 5)
    with AllocationLog(ELSEWHERE) as log:
        assert allocator.recording
        for action in ("segment_alloc", "alloc", "free_requested", "free_completed"):
            allocator.did(action, 1000)
    assert [event.size_bytes for event in log.events] == [1024, -1024]
    assert not allocator.recording


def test_messages_name_every_kind_that_is_registered(monkeypatch):
    monkeypatch.setitem(KINDS, "toy", type("Toy", (Pretended,), {"kind": "toy"}))
    with pytest.raises(ModelError, match=r'"cuda" \(with ROCm, too\) and "toy" only'):
        refuse_devices(on_another_device(), make_sample(nn.Linear(2, 2), torch.ones(1, 2)))
    with pytest.raises(ValueError, match='PeakMemory measures "cpu" and "cuda" and "toy" devices, not \'xpu:1\''):
        PeakMemory(ELSEWHERE)


@pytest.mark.parametrize("device", [ELSEWHERE, torch.device("meta")])
def test_of_a_device_without_a_module_nothing_is_counted(device):
    other = device_of(device)
    assert isinstance(other, registry.Other)
    assert other.name == device.type
    assert (other.allocated_bytes(513), other.available_bytes()) == (513, sys.maxsize)
    assert [other.is_supported, other.is_host, other.is_there] == [False] * 3
    with pytest.raises(RuntimeError, match=f"memory cannot be measured on {device}"), AllocationLog(device):
        pass
    assert main_device([device, CPU]) == CPU
    assert [generator for generator, _ in random_states({device, CPU})] == [host().generator]
