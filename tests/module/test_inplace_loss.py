"""Losses that write into the model's output, as training lets them."""

import pytest
import torch
from torch import nn

from rockmate import Rockmate, max_batch, verify
from tests.module.steps import FEW_ROUNDS

WIDTH = 32


def network():
    torch.manual_seed(0)
    wide = 4 * WIDTH
    return nn.Sequential(
        nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(),
        nn.Linear(wide, WIDTH),
    )  # fmt: skip


def rows():
    return torch.randn(512, WIDTH)


def scaled(logits):
    return logits.div_(0.7).square().mean()


def masked(logits):
    logits[:, 0] = 0
    return logits.masked_fill_(logits < 0, 0).logsumexp(-1).mean()


class TwoOutputs(nn.Module):
    """The first is read by what is recomputed for the second's backward."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 8)

    def forward(self, x):
        hidden = self.body(x)
        return hidden, self.last(torch.relu(self.head(torch.relu(hidden))) + 1)


def both(outputs):
    hidden, result = outputs
    return hidden.mul_(2).square().mean() + result.square().mean()


@pytest.mark.parametrize("loss", [scaled, masked])
def test_a_loss_may_write_into_the_output(loss):
    sample = rows()
    model = network()
    planned = Rockmate(model, sample, 0.8, loss=loss)
    assert planned.plan.recomputations
    assert verify(planned, sample, loss=loss).exact
    loss(planned(sample)).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    loss(model(sample)).backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(found, model.parameters(), strict=True))


@pytest.mark.ci
def test_what_is_recomputed_from_an_output_is_recomputed_from_what_it_was(tmp_path):
    torch.manual_seed(0)
    model, sample = TwoOutputs(), rows()
    unaware = Rockmate(model, sample, 0.95)
    assert "step.keep_output('linear_0'" in unaware.code
    with pytest.raises(RuntimeError, match="%linear_0, .* has been modified .* give it when the module is planned"):
        both(unaware(sample)).backward()
    planned = Rockmate(model, sample, "2MiB", loss=both)
    assert verify(planned, sample, loss=both).exact
    planned.save_plan(tmp_path / "plan.json")
    assert verify(Rockmate(model, sample, plan=tmp_path / "plan.json", loss=both), sample, loss=both).exact


@pytest.mark.ci
def test_the_largest_batch_for_such_a_loss():
    assert max_batch(network(), rows()[:8], "256KiB", loss=scaled, limits=FEW_ROUNDS, most=64).batch >= 8
