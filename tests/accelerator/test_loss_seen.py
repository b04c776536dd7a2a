"""What a loss takes that nobody gave, as the allocator of a device counts it: plans are made for that."""

import copy

import pytest
import torch
import torch.nn.functional as F

from rockmate import PeakMemory, Rockmate
from tests.families.test_loss_seen import NARROW, ROWS, Classifier
from tests.module.steps import FEW_ROUNDS

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore::rockmate.FragmentationWarning")]


def chosen(output):
    return output[:, 0].sum()


def cross_entropy(output):
    return F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device=output.device))


def squares(output):
    return output.square().mean()


LOSSES = {"cross-entropy": cross_entropy, "one class": chosen, "squares": squares}
DEPTHS = {"squares": 18}  # it takes four times its outputs: others are to be kept


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("budget", [0.85, 0.75])
def test_plans_are_corrected_for_the_loss_and_keep_the_budget(device, name, budget):
    torch.manual_seed(0)
    model, loss = Classifier(DEPTHS.get(name, 6)).to(device).train(), LOSSES[name]
    planned = Rockmate(copy.deepcopy(model), budget=budget, limits=FEW_ROUNDS)
    times_ms, peaks = [], []
    for seed in range(5):
        batch = torch.randn(ROWS, NARROW, generator=torch.Generator().manual_seed(seed)).to(device)
        for one in (model, planned):
            one.zero_grad()
        loss(model(batch)).backward()
        if seed < 2:
            loss(planned(batch)).backward()  # the first call plans, and shows what the loss takes; so may the second
        else:
            with PeakMemory(device) as memory:
                loss(planned(batch)).backward()
            peaks.append(memory.peak_bytes)
        times_ms.append(planned.plan.time_ms)
        for mine, theirs in zip(planned.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    assert max(peaks) <= planned.plan.budget_bytes
    assert times_ms[-1] <= times_ms[0] or name == "squares"
    if name == "squares":
        assert planned._family.members[0].measured.loss.is_seen
    if name == "one class":  # it takes next to nothing, and what was assumed is there for activations
        assert times_ms[-1] < times_ms[0]
        assert planned._family.members[0].measured.loss.is_seen
