"""Planned training on the test accelerator: exact to the bit, and predicted to the byte."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from rkgb.ir.sample import make_sample
from rkgb.replay.replay import record_step
from rockmate import BudgetTooSmall, PeakMemory, Rockmate, max_batch, smallest_budget, verify, zoo
from rockmate.memory.allocators import end_peak
from tests.module.models import built
from tests.module.steps import FEW_ROUNDS, assert_same_training, squares, train
from tests.module.test_too_large import chain, large

# Gaps are those that the tests before have left in segments, too; what is reserved is no matter of these tests yet.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]

TINY = sorted((name for name in zoo.names() if "tiny" in name), reverse=True)  # CI runs the last one, of the fastest
BUDGETS = (1.0, 0.85, 0.7, 0.6, 0.5)


def planned_if_it_may(entry: zoo.ZooEntry, budget: float) -> Rockmate:
    """Under that budget, or the smallest that is named."""
    try:
        return Rockmate(entry.model, entry.sample, budget, loss=entry.loss)
    except BudgetTooSmall as error:
        return Rockmate(entry.model, entry.sample, error.smallest_budget_bytes, loss=entry.loss)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_step_is_eager_s_and_its_bytes_are_predicted(device, name, budget):
    entry = zoo.get(name, device=device)
    model = planned_if_it_may(entry, budget)
    sample = make_sample(entry.model, entry.sample)
    eager = record_step(entry.model, sample, lambda fresh: fresh.call(entry.model))
    ours = record_step(entry.model, sample, lambda fresh: fresh.call(model))
    assert eager.first_difference(ours) is None
    plan = model.plan
    assert plan.peak_bytes == plan.measured_peak_bytes <= plan.budget_bytes
    with PeakMemory(device) as memory:
        entry.loss(model(*sample.args, **sample.kwargs)).backward()
    assert memory.peak_bytes <= plan.budget_bytes
    assert memory.reserved_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny"])
def test_many_steps_stay_within_the_budget(device, name):
    """Gradients are None in every other step and zeros in the rest."""
    entry = zoo.get(name, device=device)
    model = Rockmate(entry.model, entry.sample, 0.8, loss=entry.loss)
    memory = torch.accelerator.memory
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        memory.reset_peak_memory_stats()
        before_bytes, plans = memory.memory_allocated(), len(model.plans)
        entry.loss(model(*entry.sample)).backward()
        peak = end_peak(device, before_bytes, 0)
        optimizer.step()
        if len(model.plans) == plans:  # else planned once more, for steps that find gradients
            assert peak.allocated_bytes <= model.plan.budget_bytes, step


@pytest.mark.slow
def test_training_that_does_not_fit_eagerly_does_when_planned(device, extension):
    # Blocks of 16 MiB have segments of their own: small ones would share some, whose gaps nothing else can use.
    batches = [torch.cat([large("chain", seed)] * 2).to(device) for seed in range(2)]
    model = built(chain).to(device)
    untrained = copy.deepcopy(model.state_dict())
    with PeakMemory(device) as memory:
        eager = train(model, batches)
    model.load_state_dict(untrained)
    model.zero_grad()
    torch.accelerator.memory.empty_cache()
    extension.limit(0, torch.accelerator.memory.memory_reserved() + int(0.8 * memory.peak_bytes))
    with pytest.raises(torch.OutOfMemoryError):
        squares(model(batches[0])).backward()
    model.zero_grad()
    planned = Rockmate(model, batches[0], int(0.4 * memory.peak_bytes), loss=squares, limits=FEW_ROUNDS)
    assert planned.plan.peak_bytes == planned.plan.measured_peak_bytes <= planned.plan.budget_bytes
    assert_same_training(train(model, batches, forward=planned), eager)


@pytest.mark.parametrize("number", [1, 40, 200])
def test_where_memory_runs_out_while_planning_nothing_is_changed(device, extension, number):
    model, batch = built(chain).to(device), torch.randn(64, 32, device=device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_device_module(device).get_rng_state()
    extension.fail_allocation(number)
    with contextlib.suppress(torch.OutOfMemoryError):  # or another plan, or another way to measure, was taken
        Rockmate(model, batch, 0.6, loss=squares, limits=FEW_ROUNDS)
    extension.fail_allocation(0)
    assert torch.equal(torch.get_device_module(device).get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    Rockmate(model, batch, 0.6, loss=squares, limits=FEW_ROUNDS)(batch).sum().backward()


def test_dropout_draws_from_the_device_s_generator(device):
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Dropout(0.3), nn.Tanh())))
    model.to(device)
    eager, batches = copy.deepcopy(model), [torch.randn(128, 32, device=device) for _ in range(3)]
    planned = Rockmate(model, batches[0], 0.6, loss=squares, limits=FEW_ROUNDS)
    assert planned.plan.recomputations
    assert_same_training(train(model, batches, forward=planned), train(eager, batches))


def test_autocast_is_repeated(device):
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))))
    model.to(device)
    batch = torch.randn(256, 32, device=device)
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        own = copy.deepcopy(model)
        with torch.autocast(device.type, torch.bfloat16):
            forward = Rockmate(own, batch, 0.6, loss=lambda out: out.float().square().mean()) if planned else own
            out = forward(batch)
        out.float().square().mean().backward()
        found.append([out.detach(), *(parameter.grad for parameter in own.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_a_call_without_autocast_is_another(device):
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    eager, batch = copy.deepcopy(model), torch.randn(256, 32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        planned = Rockmate(model, batch, 0.8, loss=squares)
    for enabled, dtype in ((True, torch.bfloat16), (False, None), (True, torch.float16)):
        with torch.autocast(device.type, dtype, enabled=enabled):
            mine, theirs = planned(batch), eager(batch)
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")
def test_other_lengths_are_a_family(device):
    entry = zoo.get("gpt2-tiny", device=device)
    eager = copy.deepcopy(entry.model)
    words = entry.sample[0]
    model = Rockmate(entry.model, budget=0.7, loss=squares)
    plans = []
    for length in (16, 12, 9, 14, 7, 10):
        given = words[:, :length].contiguous()
        outputs = []
        for one in (model, eager):
            torch.manual_seed(length)
            one.zero_grad()
            output = one(given)
            squares(output).backward()
            outputs.append([output.detach(), *(parameter.grad for parameter in one.parameters())])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outputs, strict=True)), length
        plans.append(len(model._family.members))
    assert plans[-1] == plans[2], "lengths after the third were traced"


def test_a_module_may_be_planned_within_peak_memory(device):
    model, batch = built(chain).to(device), torch.randn(64, 32, device=device)
    planned = Rockmate(copy.deepcopy(model), budget=0.6, loss=squares, limits=FEW_ROUNDS)
    peaks = []
    for _ in range(2):
        planned.zero_grad()
        with PeakMemory(device) as memory:
            squares(planned(batch)).backward()
        peaks.append(memory)
    assert peaks[1].peak_bytes <= planned.plan.budget_bytes
    assert peaks[0].peak_bytes >= peaks[1].peak_bytes
    assert peaks[0].net_bytes >= peaks[1].net_bytes
    before = torch.accelerator.memory.memory_allocated()
    with PeakMemory(device) as memory:
        kept = torch.zeros(1 << 20, device=device)
        del kept
        squares(Rockmate(model, budget=0.7, loss=squares, limits=FEW_ROUNDS)(batch)).backward()
    assert memory.peak_bytes >= 4 << 20, "what was taken before the planning is forgotten"
    assert torch.accelerator.memory.memory_allocated() - before == memory.net_bytes


@pytest.mark.slow
def test_plan_files_queries_and_the_check_of_a_plan(device, tmp_path):
    entry = zoo.get("gpt2-tiny", device=device)
    model = Rockmate(entry.model, entry.sample, 0.7, loss=entry.loss)
    model.save_plan(tmp_path / "plan.json")
    again = Rockmate(copy.deepcopy(entry.model), entry.sample, plan=tmp_path / "plan.json", loss=entry.loss)
    assert again.plan.schedule == model.plan.schedule
    report = verify(entry.model, entry.sample, 0.7, loss=entry.loss)
    assert report.exact
    cheapest = smallest_budget(entry.model, entry.sample, 1.3, loss=squares, limits=FEW_ROUNDS)
    assert cheapest.slowdown <= 1.3
    found = max_batch(entry.model, entry.sample, model.plan.budget_bytes, loss=squares, limits=FEW_ROUNDS, most=16)
    assert found.batch >= entry.sample[0].shape[0]
