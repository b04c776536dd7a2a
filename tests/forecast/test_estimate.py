"""Will it fit? Estimates beside what is measured, and beside plans that are made."""

import pytest
import torch
from torch import nn

import rockmate.zoo as zoo
from rk_solvers import Link, SecondMemory, peak_and_time
from rk_solvers.local.min_peak_search import min_peak_plan
from rkgb.devices.allocation_log import AllocationLog
from rockmate import ArgumentError, Offload, OffloadError, Rockmate, estimate
from rockmate.options import PlanOptions
from rockmate.planning.graph_solver import moving_solver
from rockmate.planning.measured import measure
from tests.forecast.test_eager_step import measured_bytes

QUICK = {"batches": False, "time_limit": 0.5}


def net(width=64, depth=6):
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def loss(output):
    return output.square().mean()


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny", "transformer-tiny"])
def test_the_smallest_plan_is_that_of_the_measured_model(name):
    entry = zoo.get(name)
    found = estimate(entry.model, entry.sample, loss=entry.loss, batches=False, time_limit=20)  # ends before
    measured = measure(entry.model, entry.sample, PlanOptions(loss=entry.loss).request(10**12))
    plan = min_peak_plan(measured.problem, [], measured.chain, float("inf"))
    least_bytes = found.eager.held_bytes + peak_and_time(measured.problem, plan)[0]
    assert found.smallest.peak_bytes == pytest.approx(least_bytes, rel=0.02)
    assert found.proven_bytes <= found.smallest.peak_bytes


def test_a_plan_for_the_memory_that_there_is_holds_in_real_steps():
    model, sample = net(), torch.randn(512, 64)
    eager = estimate(model, sample, loss=loss, **QUICK)
    memory = eager.eager.held_bytes + eager.eager.step_peak_bytes * 6 // 10
    found = estimate(model, sample, loss=loss, memory=memory, **QUICK)
    assert found.fits is False
    assert found.planned.peak_bytes <= memory
    planned = Rockmate(model, sample, found.planned.budget_bytes, loss=loss, time_limit=1)
    assert planned.plan.measured_peak_bytes <= found.planned.budget_bytes


@pytest.mark.parametrize("memory", [None, "1GiB", "400 KB"])
def test_what_a_plan_for_a_budget_costs_is_told_whatever_fits(memory):
    model, sample = net(), torch.randn(512, 64)
    found = estimate(model, sample, loss=loss, memory=memory, budget=0.7, **QUICK)
    assert found.asked_bytes == found.planned.budget_bytes == round(0.7 * found.eager.step_peak_bytes)
    planned = Rockmate(model, sample, found.planned.budget_bytes, loss=loss, time_limit=1)
    assert planned.plan.measured_peak_bytes <= found.planned.budget_bytes
    assert f"planned: Rockmate(model, sample, {found.asked_bytes})" in str(found)
    none = estimate(model, sample, loss=loss, memory=memory, budget=1000, **QUICK)
    assert none.planned is None
    assert "no plan was found for a step of 1000 B" in str(none)


def test_what_no_plan_fits_is_told():
    found = estimate(net(), torch.randn(512, 64), loss=loss, memory="200 KB", **QUICK)
    assert found.fits is False
    assert found.planned is None
    assert "no plan was found" in str(found)


def test_a_model_on_the_meta_device_is_told_as_one_with_data():
    real = estimate(net(), torch.randn(512, 64), loss=loss, **QUICK)
    with torch.device("meta"):
        model, sample = net(), torch.randn(512, 64)
    told = estimate(model, sample, loss=loss, **QUICK)
    assert (told.peak_bytes, told.split) == (real.peak_bytes, real.split)
    assert told.smallest.peak_bytes == real.smallest.peak_bytes


def test_nothing_of_the_model_s_size_is_allocated():
    with torch.device("meta"):
        model, sample = net(4096, 12), torch.randn(4096, 4096)
    with AllocationLog(torch.device("cpu")) as log:
        found = estimate(model, sample, loss=loss, batches=False, time_limit=0.5)
    assert found.peak_bytes > 3 << 30
    assert log.peak_bytes < 8 << 20


def test_numbers_of_sixteen_bits_take_half():
    model, sample = net(), torch.randn(512, 64)
    whole = estimate(model, sample, **QUICK)
    half = estimate(model, sample, dtype=torch.bfloat16, **QUICK)
    assert half.eager.parameter_bytes * 2 == whole.eager.parameter_bytes
    assert half.peak_bytes == pytest.approx(whole.peak_bytes / 2, rel=0.05)
    assert model[0].weight.dtype is torch.float32


def test_losses_hold_targets_of_their_own():
    targets = torch.randint(8, (512,))
    found = estimate(net(), torch.randn(512, 64), loss=lambda o: nn.functional.cross_entropy(o, targets), **QUICK)
    assert found.peak_bytes > 0


@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW, "of the model"])
def test_optimizers_are_named_or_made_or_there(optimizer):
    model = net()
    given = torch.optim.AdamW(model.parameters()) if optimizer == "of the model" else optimizer
    found = estimate(model, torch.randn(512, 64), optimizer=given, **QUICK)
    assert found.eager.optimizer_bytes >= 2 * found.eager.parameter_bytes
    assert found.eager.knows_optimizer_step
    if optimizer == "of the model":
        assert not given.state
        assert all(p.device.type == "cpu" for p in given.param_groups[0]["params"])


# ---- batches -------------------------------------------------------------------------------------------------


def test_the_largest_batch_is_the_largest_that_fits():
    model, memory = net(), 3 << 20
    found = estimate(model, torch.randn(64, 64), loss=loss, memory=memory, time_limit=0.5)
    eager = found.batch.eager
    held = found.eager.held_bytes

    def takes(rows):
        return held - found.eager.input_bytes + rows * 64 * 4 + measured_bytes(model, torch.randn(rows, 64), loss)

    assert takes(eager) <= memory < takes(eager + 2)
    assert found.batch.planned.batch > eager
    rows = found.batch.planned.batch
    budget = memory - (held - found.eager.input_bytes) - rows * 64 * 4
    planned = Rockmate(model, torch.randn(rows, 64), budget, loss=loss, time_limit=1)
    assert planned.plan.measured_peak_bytes <= budget


def test_a_function_of_the_batch_makes_its_own_losses():
    def make(rows):
        targets = torch.randint(8, (rows,))
        return net(), torch.randn(rows, 64), lambda output: nn.functional.cross_entropy(output, targets)

    found = estimate(make, 32, memory="3 MiB", time_limit=0.5)
    assert found.batch.sample == 32
    assert found.batch.eager > 32


def test_a_loss_of_one_batch_alone_is_left_out_of_others():
    targets = torch.randint(8, (32,))

    def fixed(output):
        return nn.functional.cross_entropy(output, targets)

    found = estimate(net(), torch.randn(32, 64), loss=fixed, memory="3 MiB", time_limit=0.5)
    assert found.batch.eager > 32


# ---- devices -------------------------------------------------------------------------------------------------


def test_devices_are_named_or_told_by_their_memory():
    named = estimate(net(), torch.randn(8, 64), device="h100", **QUICK)
    assert named.fits
    assert named.usable_bytes > 70 << 30
    assert named.step_ms > 0
    other = estimate(net(), torch.randn(8, 64), device="24GiB", **QUICK)
    assert other.fits
    assert other.step_ms is None
    assert other.reserved_bytes >= other.peak_bytes
    fast = estimate(net(), torch.randn(8, 64), device="24GiB", flops=1e12, bandwidth=1e11, **QUICK)
    assert fast.step_ms > 0
    assert estimate(net(), torch.randn(8, 64), **QUICK).fits is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"device": "H1000"}, "there is no device 'H1000'.*H100"),
        ({"device": "100MiB"}, "nothing is left for tensors"),
        ({"memory": "much"}, "is no size"),
        ({"optimizer": "best"}, "there is no optimizer 'best'.*adamw"),
    ],
)
def test_what_cannot_be_meant_is_told(said, told):
    with pytest.raises(ArgumentError, match=told):
        estimate(net(), torch.randn(8, 64), **said)


def test_a_model_that_cannot_be_planned_is_told_without_a_plan():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(8, 8), 0

        def forward(self, given):
            self.calls += 1
            return self.layer(given) * self.calls

    model = Counting()
    found = estimate(model, torch.randn(4, 8), **QUICK)
    assert found.peak_bytes > 0
    assert model.calls == 0


# ---- moves -------------------------------------------------------------------------------------------------------


def test_moves_over_a_fast_link_cost_less_than_recomputation():
    model, sample = net(512), torch.randn(2048, 512)
    asked = dict(loss=loss, device="H100", budget=0.5, **QUICK)
    alone, moved = estimate(model, sample, **asked), estimate(model, sample, offload="auto", link=1e12, **asked)
    assert alone.planned.moved_bytes == 0
    assert moved.planned.moved_bytes > 0
    assert moved.planned.overhead < alone.planned.overhead
    assert moved.planned.peak_bytes - moved.eager.held_bytes <= moved.asked_bytes
    assert moved.smallest.peak_bytes <= alone.smallest.peak_bytes
    assert moved.proven_bytes <= moved.smallest.peak_bytes
    assert f'planned: Rockmate(model, sample, {moved.asked_bytes}, offload="auto") trains within' in str(moved)
    assert "moved away at once" in str(moved)
    assert any("what moves cost" in kind for kind in moved.unknown)
    assert moved.offload == "auto"


def test_nothing_moves_over_a_link_that_is_slower_than_recomputation():
    found = estimate(net(), torch.randn(512, 64), loss=loss, budget=0.7, offload="disk", link=1.0, **QUICK)
    assert found.planned.moved_bytes == 0


@pytest.mark.ci
def test_what_is_in_the_second_memory_is_limited():
    model, sample = net(512), torch.randn(2048, 512)
    asked = dict(loss=loss, device="H100", budget=0.5, link=1e12, **QUICK)
    free = estimate(model, sample, offload="host", **asked).planned.moved_bytes
    limited = estimate(model, sample, offload=Offload("host", limit=free // 2), **asked)
    assert limited.planned.moved_bytes <= free // 2
    assert estimate(model, sample, offload=Offload("host", limit=0), **asked).planned.moved_bytes == 0


@pytest.mark.parametrize("name", ["gpt2-tiny", pytest.param("transformer-tiny", marks=pytest.mark.ci)])
def test_what_moves_are_told_to_meet_they_meet_on_what_is_measured(name):
    entry = zoo.get(name)
    found = estimate(entry.model, entry.sample, loss=entry.loss, budget=0.6, offload="disk", link=1e12, **QUICK)
    measured = measure(entry.model, entry.sample, PlanOptions(loss=entry.loss).request(10**12))
    solver = moving_solver(measured.chain, SecondMemory(Link(1e9), Link(1e9)), 0.5)
    assert solver.solve(measured.problem, found.asked_bytes).status.fits
    assert found.planned.moved_bytes > 0
    smallest = solver.solve(measured.problem, found.smallest.budget_bytes)
    assert smallest.peak_bytes == pytest.approx(found.smallest.budget_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("said", "error", "told"),
    [
        ({"device": "H100", "offload": "disk"}, OffloadError, "are not written to a disk"),
        ({"device": "cpu", "offload": "host"}, OffloadError, "are in host memory already"),
        ({"device": "24GiB", "offload": "auto"}, ArgumentError, "how fast it is"),
        ({"device": "24GiB", "offload": "auto", "link": 1e9}, ArgumentError, "how fast it is"),
        ({"device": "H100", "offload": "away"}, OffloadError, "data are to be moved to 'away'"),
    ],
)
def test_a_link_that_is_not_there_is_told(said, error, told):
    with pytest.raises(error, match=told):
        estimate(net(), torch.randn(8, 64), loss=loss, **said)
