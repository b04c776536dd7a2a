"""Parameters and optimizer state of an accelerator that rest in memory of its host: to the bit, slow copies too."""

import copy

import pytest
import torch

from rockmate import Rockmate
from rockmate.offload.host_tier import HostTier
from rockmate.resting.optimizer import OffloadedOptimizer
from rockmate.resting.tensors import RestingTensors
from tests.offload.lora import LoraModel, batch, frozen, next_token_loss, trained

WINDOW_BYTES = 700_000


@pytest.fixture
def tier(device, extension):
    made = HostTier(device)
    yield made
    made.close()


def train(module, optimizer, device, steps=3):
    losses = []
    for step in range(steps):
        tokens = batch(step).to(device)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = next_token_loss(module(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def models(device, trains):
    torch.manual_seed(0)
    eager = LoraModel(layers=2)
    for block in eager.blocks:
        block.norm = torch.nn.Identity()
    eager = (eager.requires_grad_(True) if trains else eager).to(device)
    return eager, copy.deepcopy(eager)


@pytest.mark.parametrize("rate", [0.0, 2e8], ids=["at_once", "slow"])
@pytest.mark.parametrize("trains", [False, True], ids=["adapters", "all"])
def test_steps_are_eagers_to_the_bit(device, extension, tier, rate, trains):
    eager, model = models(device, trains)
    planned = Rockmate(model, batch().to(device), 1.0, cache=False, plan_in_background=False, time_limit=0.5)
    plain, optimizer = (torch.optim.AdamW(trained(one), lr=0.01, foreach=False) for one in (eager, model))
    owner = RestingTensors(tier, WINDOW_BYTES)
    if trains:
        optimizer = OffloadedOptimizer(optimizer, tier, in_backward=True)
    extension.set_copy_rate(rate)
    owner.take(model.parameters() if trains else frozen(model))
    owner.most_held_bytes = 0
    losses = train(planned, optimizer, device)
    assert owner.most_held_bytes <= WINDOW_BYTES < owner.all_bytes
    wanted = train(eager, plain, device)
    assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(parameter.cpu(), other.cpu())
