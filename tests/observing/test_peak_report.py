"""Who holds the memory: sizes add up to what is measured, kinds and places are right, and training is as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rockmate.zoo as zoo
from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.registry import device_of
from rockmate import ArgumentError, BudgetError, PeakMemory, PeakReport, Rockmate
from tests.where import here, placed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 64)
        self.norm = nn.BatchNorm1d(64)
        placed(self)

    def forward(self, given):
        wide = self.first(given).relu()
        return self.norm(self.second(wide))


class Idle(TorchDispatchMode):
    """Within any mode PyTorch sums gradients of one tensor beside them, and not in place."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def train(model, steps, optimizer=torch.optim.AdamW, keep=None):
    made = optimizer(model.parameters(), lr=1e-3)
    for step in range(steps):
        torch.manual_seed(step)
        output = model(placed(torch.randn(512, 64)))
        if keep is not None:
            keep.append(output)
        output.square().mean().backward()
        made.step()
        made.zero_grad()
        del output


@pytest.mark.parametrize("keeps", [False, True])
def test_sizes_add_up_to_the_peak_that_is_measured(keeps):
    torch.manual_seed(0)
    model = Net()
    kept = [] if keeps else None
    with PeakMemory(here()) as memory:
        train(copy.deepcopy(model), 4, keep=kept)
    kept = [] if keeps else None
    with PeakReport(here()) as report:
        train(copy.deepcopy(model), 4, keep=kept)
    assert report.peak_bytes == memory.peak_bytes
    assert sum(holder.size_bytes for holder in report.holders) == report.peak_bytes
    assert sum(report.kinds.values()) == report.peak_bytes
    assert len(report.steps) == 5


def test_models_of_the_zoo_add_up_as_well():
    for name in ("gpt2-tiny", "resnet18-tiny"):
        entry = zoo.get(name, device=here())

        def step(entry=entry):
            entry.loss(entry.model(*entry.sample)).backward()
            entry.model.zero_grad()

        step()
        with PeakMemory(here()) as memory, Idle():
            step()
        with PeakReport(here()) as report:
            step()
        assert report.peak_bytes == memory.peak_bytes
        assert sum(holder.size_bytes for holder in report.holders) == report.peak_bytes
        assert report.kinds["activations"] > 0.5 * report.peak_bytes


def test_kinds_and_places_are_told():
    with PeakReport(here()) as report:
        train(Net(), 3)
    parameters = sum(device_of(here()).allocated_bytes(p.nbytes) for p in Net().parameters())
    kinds = report.kinds
    assert kinds["parameters"] == parameters
    assert 2 * parameters <= kinds["optimizer state"] <= 2 * parameters + 100
    wide = next(h for h in report.holders if h.label.module == "Net" and h.kind == "activations")
    assert wide.size_bytes == 512 * 256 * 4
    assert wide.label.operation == "relu.default"
    assert wide.label.line.startswith("test_peak_report.py:")
    assert {holder.label.module for holder in report.holders} >= {"Net", "second", "norm"}
    text = str(report)
    assert "optimizer state" in text
    assert "relu.default Net test_peak_report.py:" in text
    assert "growing" not in text


def test_what_grows_from_step_to_step_is_told():
    kept = []
    with PeakReport(here()) as report:
        train(Net(), 6, keep=kept)
    (leak,) = [holder for holder in report.growing if holder.label.module == "norm" and holder.size_bytes > 1 << 19]
    assert leak.label.operation.startswith("native_batch_norm")
    assert "growing from step to step" in str(report)


def test_training_is_as_it_was():
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    train(model, 3)
    with PeakReport(here()):
        train(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    model(placed(torch.randn(8, 64)))  # no hook is left


def test_a_planned_module_is_watched_as_well():
    model, sample = Net(), placed(torch.randn(512, 64))
    planned = Rockmate(model, sample, 1.0, time_limit=1)
    with PeakReport(here()) as report:
        planned(sample).square().mean().backward()
    assert sum(holder.size_bytes for holder in report.holders) == report.peak_bytes > 0


def test_an_error_is_the_user_s_own_and_nothing_is_left_on():
    report = PeakReport(here())

    def fail():
        with report:
            Net()(placed(torch.randn(4, 64)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert report.peak_bytes > 0
    with PeakMemory(here()):
        pass


def test_where_memory_runs_out_the_note_says_who_holds_it():
    def fail():
        with PeakReport(here()):
            output = Net()(placed(torch.randn(512, 64)))
            torch.empty(1 << 60, dtype=torch.uint8).fill_(int(output.sum()))

    with pytest.raises(RuntimeError) as caught:
        fail()
    (told,) = caught.value.__notes__
    assert "at the highest moment" in told
    assert "relu.default Net" in told


def test_results_are_there_at_the_end():
    report = PeakReport(here())
    with pytest.raises(RuntimeError, match="no result yet"):
        _ = report.peak_bytes
    with report, pytest.raises(RuntimeError, match="no result yet"):
        _ = report.holders
    with pytest.raises(ValueError, match="not 'meta'"):
        PeakReport("meta")


def loop_without_modules():
    weight = torch.zeros(512, 512, device=here(), requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    for _ in range(4):
        (torch.ones(8, 512, device=here()) @ weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def loop_within_a_range():
    model = torch.nn.Linear(512, 512, device=here())
    optimizer = torch.optim.Adam(model.parameters())
    with torch.profiler.record_function("an epoch of the user's"):
        for _ in range(4):
            model(torch.ones(8, 512, device=here())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("loop", [loop_without_modules, loop_within_a_range])
def test_steps_are_told_apart_where_no_log_can_end_between_them(loop, monkeypatch):
    """An optimizer's step is a range of the profiler, as a user's may be: one that ends within crashes later on."""
    entered, open_ranges = torch.autograd.profiler.record_function.__enter__, []
    ends = AllocationLog.__exit__

    def end(self, *error):
        open_ranges.append(report._labels._ranges)
        return ends(self, *error)

    monkeypatch.setattr(AllocationLog, "__exit__", end)
    with PeakReport(here()) as report:
        loop()
    assert torch.autograd.profiler.record_function.__enter__ is entered
    assert open_ranges == [0]  # once, after it all
    assert len(report.steps) == 5
    state_bytes = 2 * 512 * 512 * 4
    assert report.steps[0].end_bytes < report.steps[1].peak_bytes
    assert report.kinds["optimizer state"] >= state_bytes


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU())))
        placed(self)

    def forward(self, given, *, mask, scale=1.0):
        return self.layers(given) * mask[:, None] * scale


def test_what_a_plan_for_a_part_costs_is_told_of_the_largest_call():
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters())
    with PeakReport(here()) as report:
        for rows in (100, 2000, 300):
            given, mask = placed(torch.randn(rows, 64)), placed(torch.arange(rows) % 2 == 0)
            model(given, mask=mask, scale=2.0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = report.estimate(0.6)
    assert found.model == "Scaled"
    assert found.asked_bytes == pytest.approx(0.6 * found.eager.step_peak_bytes, abs=1)
    assert found.planned.budget_bytes == found.asked_bytes
    assert 0 < found.planned.overhead < 0.5
    assert dict(found.split)["optimizer state"] >= 2 * sum(p.nbytes for p in model.parameters())
    mask = placed(torch.arange(2000) % 2 == 0)
    sample = {"given": placed(torch.randn(2000, 64)), "mask": mask, "scale": 2.0}
    eager = Rockmate(model, sample, 1.0, time_limit=1).plan.baseline_peak_bytes
    assert found.eager.step_peak_bytes == pytest.approx(eager, rel=0.05)
    with pytest.raises(BudgetError):
        report.estimate(-1)


def test_of_what_no_plan_can_be_told_the_reason_is():
    with PeakReport(here()) as report:
        loop_without_modules()
    with pytest.raises(ArgumentError, match="no module was called in training"):
        report.estimate()
    planned = Rockmate(Net(), placed(torch.randn(512, 64)), 1.0, time_limit=1)
    with PeakReport(here()) as report:
        planned(placed(torch.randn(512, 64))).square().mean().backward()
    with pytest.raises(ArgumentError, match="Net is planned already"):
        report.estimate()


@pytest.mark.parametrize("odd", ["meta", "sparse", "nested"])
def test_calls_with_tensors_of_other_kinds_run_as_they_are(odd):
    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = placed(nn.Linear(8, 8))

        def forward(self, x, other):
            return self.layer(x)

    x = placed(torch.randn(4, 8))
    other = {
        "meta": lambda: torch.zeros(3, dtype=torch.int64, device="meta"),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }[odd]()
    with PeakReport(here()) as report:
        Taking()(x, other).sum().backward()
    assert report.peak_bytes > 0
