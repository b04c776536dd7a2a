"""`Rockmate(..., scope="total", offload=...)`: what training holds beside a step rests in a second memory, too."""

import copy
import gc
import pickle
import warnings

import pytest
import torch

from rk_solvers import Limits, Link, SecondMemory
from rockmate import PeakMemory, Rockmate
from rockmate.offload import tiers
from rockmate.planning.trying import moving
from rockmate.resting.optimizer import OffloadedOptimizer
from rockmate.resting.tensor import rested_of
from tests.offload.lora import LoraModel, batch, next_token_loss, trained

TOKENS = batch()
BRIEFLY = Limits(search_s=0.5, extra_s=0.0, rounds=1)


@pytest.fixture(autouse=True)
def links(monkeypatch):
    """A disk that no computation waits for, without staging: that is as large as the model."""
    monkeypatch.setattr(tiers.FileTier, "staging_bytes", 0)
    monkeypatch.setattr(tiers, "measured_links", lambda tier, *_: SecondMemory(Link(1e7), Link(1e7), tier.limit_bytes))


def loss_of(logits):
    return next_token_loss(logits, TOKENS)


def whole(trains=False):
    torch.manual_seed(0)
    model = LoraModel(layers=4)
    return model.requires_grad_(True) if trains else model


def steps(model, optimizer, count=3):
    """Losses, and the parameters in the end."""
    losses = []
    for step in range(count):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model(TOKENS))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def eager_steps(trains=False):
    model = whole(trains)
    return steps(model, torch.optim.AdamW(trained(model), lr=0.01))


def same(mine, theirs):
    return all(
        torch.equal(a, b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )


def planned(model, optimizer, budget, **options):
    options = {"loss": loss_of, "scope": "total", "optimizer": optimizer, "limits": BRIEFLY, **options}
    return Rockmate(model, (TOKENS,), budget, offload="auto", **options)


def test_a_frozen_base_rests_and_training_is_eager_s():
    model = whole()
    base_bytes = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    module = planned(model, optimizer, 0.6)
    split = module.memory_split
    assert split.residents.window_bytes < 0.5 * base_bytes
    assert "window of parameters that rest" in str(split)
    assert any(rested_of(p) is not None for p in model.parameters())
    assert same(steps(module, optimizer), eager_steps())
    assert not module.fallbacks
    with torch.no_grad():  # whoever asks for what is away has it
        module.eval()
        assert torch.equal(module(TOKENS), copy.deepcopy(model)(TOKENS))


@pytest.mark.ci
def test_what_is_here_is_within_the_budget():
    model = whole()
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    module = planned(model, optimizer, 0.6)
    steps(module, optimizer)
    optimizer.zero_grad()
    module._family._resting._owner.empty()  # what goes is not seen where it was there before
    state = [t for values in optimizer.state.values() for t in values.values()]
    present_bytes = TOKENS.nbytes + sum(t.nbytes for t in (*trained(model), *state))
    with PeakMemory() as memory:
        for step in range(3):
            torch.manual_seed(step)
            loss_of(module(TOKENS)).backward()
            optimizer.step()
            optimizer.zero_grad()
    here_bytes, budget_bytes = memory.peak_bytes + present_bytes, module.memory_split.total_bytes
    assert 0.8 * budget_bytes < here_bytes <= budget_bytes


@pytest.mark.ci
def test_state_and_weights_rest_beside_steps_in_the_backward():
    model = whole(trains=True)
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), "disk", in_backward=True)
    module = planned(model, optimizer, 0.4)
    assert module.memory_split.residents.window_bytes > 0
    assert module.memory_split.residents.gradient_bytes == 0
    assert same(steps(module, optimizer), eager_steps(trains=True))


@pytest.mark.ci
@pytest.mark.slow
def test_copies_pickles_files_and_another_budget(tmp_path):
    model = whole()
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    module = planned(model, optimizer, 0.6)
    module.save_plan(tmp_path / "plan.json")
    again = whole()
    other = torch.optim.AdamW(trained(again), lr=0.01)
    from_file = Rockmate(again, (TOKENS,), plan=tmp_path / "plan.json", scope="total", optimizer=other)
    assert from_file.memory_split == module.memory_split
    assert any(rested_of(p) is not None for p in again.parameters())
    assert same(steps(from_file, other), eager_steps())
    with warnings.catch_warnings(action="ignore"):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert same(steps(twin, torch.optim.AdamW(trained(twin), lr=0.01)), eager_steps())
    before = module.memory_split
    module.replan(int(0.9 * before.total_bytes), (TOKENS,))
    assert module.memory_split.total_bytes < before.total_bytes
    assert same(steps(module, optimizer), eager_steps())


@pytest.mark.ci
def test_all_is_here_again_where_a_larger_budget_asks_for_nothing():
    model = whole()
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    module = planned(model, optimizer, 0.6)
    module.replan("1GiB", (TOKENS,))
    assert not module.memory_split.residents.window_bytes
    assert all(rested_of(p) is None for p in model.parameters())
    assert same(steps(module, optimizer), eager_steps())


def test_weights_rest_while_saved_tensors_move(monkeypatch):
    monkeypatch.setattr(moving, "steps_by_turns_ms", lambda *_: [1.0, 2.0])  # of the plan that moves, and of the other
    model = whole()
    optimizer = torch.optim.AdamW(trained(model), lr=0.01)
    module = planned(model, optimizer, 0.45)
    assert module.plan.moves > 0
    assert module.memory_split.residents.window_bytes > 0
    assert same(steps(module, optimizer), eager_steps())
    assert module.plan.measured_peak_bytes <= module.plan.budget_bytes


@pytest.mark.slow
def test_nothing_rests_under_a_budget_of_the_step():
    model = whole()
    module = Rockmate(model, (TOKENS,), 0.8, loss=loss_of, limits=BRIEFLY, offload="auto")
    assert module.memory_split is None
    assert all(rested_of(p) is None for p in model.parameters())
    del module
    gc.collect()
