"""Steps some of whose data are in a second memory for a while: eager's bits, in as many bytes as were predicted."""

import copy
import gc
import os

import pytest
import torch

from rockmate import NothingToTrain, zoo
from rockmate.errors import OffloadError
from rockmate.offload.file_tier import FileTier
from tests.graph.programs import TINY
from tests.module.models import Layers, Normalised, built, images, rows
from tests.module.moving import moving
from tests.module.random_networks import random_case
from tests.module.steps import (
    assert_same_training,
    keep_every_other,
    keep_nothing,
    squares,
    train,
)


@pytest.fixture
def tier(tmp_path):
    made = FileTier(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(("share", "seed"), [(1.0, 0), (0.5, 1), (0.5, 2)])
@pytest.mark.parametrize("name", TINY)
def test_real_models_train_exactly_in_the_bytes_that_were_predicted(tier, name, share, seed):
    entry = zoo.get(name)
    step = moving(entry.model, entry.sample, tier, share=share, seed=seed, loss=entry.loss)
    eager, batches = copy.deepcopy(entry.model), [entry.sample] * 2
    assert_same_training(train(entry.model, batches, entry.loss, step.runner), train(eager, batches, entry.loss))
    peak_bytes = step.peak_bytes()
    gc.collect()
    tier.close()  # what is still on its way is waited for
    assert tier.held_bytes == 0
    assert peak_bytes <= 1.001 * step.costs.peak_bytes
    assert tier.most_held_bytes == step.costs.stored_bytes > 0


@pytest.mark.parametrize("recompute", [keep_nothing, keep_every_other])
@pytest.mark.parametrize("seed", [0, 1])
def test_some_data_move_and_others_are_computed_again(tier, recompute, seed):
    for make, sample in ((Layers, rows), (Normalised, images)):
        model = built(make)
        step = moving(model, sample(), tier, share=0.7, seed=seed, recompute=recompute)
        eager, batches = copy.deepcopy(model), [sample(1), sample(2)]
        assert_same_training(train(model, batches, forward=step.runner), train(eager, batches))
        assert step.peak_bytes() <= 1.01 * step.costs.peak_bytes
        assert "recompute_0" in step.runner.source


@pytest.mark.parametrize("seed", range(60))
def test_random_networks_are_exact(tier, seed):
    case = random_case(seed)
    loss = squares if case.loss is None else case.loss
    recompute = None if seed % 2 else keep_every_other
    try:
        step = moving(case.network, case.batch(0), tier, share=0.7, seed=seed, loss=loss, recompute=recompute)
    except NothingToTrain:
        pytest.skip("every parameter that this seed draws is frozen")
    eager, batches = copy.deepcopy(case.network), [case.batch(number) for number in range(2)]
    assert_same_training(train(case.network, batches, loss, step.runner), train(eager, batches, loss))
    gc.collect()
    tier.close()
    assert tier.held_bytes == 0


def test_the_code_says_what_moves_and_when(tier):
    code = moving(built(Layers), rows(), tier).runner.source
    assert "step.offload('" in code
    assert "step.leave('" in code
    assert "step.watch('" in code


def test_lines_come_after_what_computes_and_not_after_views_of_it_for_later(tier):
    """What a projection makes is viewed once more after attention: what it has read is sent long before that."""
    entry = zoo.get("gpt2-tiny")
    lines = [
        line.strip() for line in moving(entry.model, entry.sample, tier, loss=entry.loss).runner.source.split("\n")
    ]
    sent = lines.index("step.offload('layer_norm_0')")
    projected = next(place for place, line in enumerate(lines) if line.startswith("linear_0 = "))
    attended = next(place for place, line in enumerate(lines) if line.startswith("softmax_0 = "))
    assert projected < sent < attended


def test_a_graph_is_walked_twice(tier):
    model = built(Layers)
    eager, step = copy.deepcopy(model), moving(model, rows(), tier)
    for forward in (eager, step.runner):
        torch.manual_seed(0)
        loss = squares(forward(rows(1)))
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def test_forwards_without_a_backward_and_without_gradients_leave_nothing(tier):
    model = built(Layers)
    step = moving(model, rows(), tier)
    output = step.runner(rows(1))
    assert tier.held_bytes > 0
    del output
    gc.collect()
    tier.close()
    assert tier.held_bytes == 0
    with torch.no_grad():
        step.runner(rows(1))
    assert tier.held_bytes == 0


def test_several_steps_at_once_do_not_mix(tier):
    model = built(Layers)
    eager, step = copy.deepcopy(model), moving(model, rows(), tier)
    for forward in (eager, step.runner):
        torch.manual_seed(0)
        losses = [squares(forward(rows(number))) for number in range(3)]
        for loss in losses:
            loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def told_by(loss):
    """What its backward says that fails; nothing holds the error afterwards, and what its traceback holds."""
    try:
        loss.backward(retain_graph=True)
    except OffloadError as error:
        return str(error)
    return ""


def test_a_disk_that_fails_in_the_backward_is_told_and_the_next_step_is_exact(tier, monkeypatch):
    model = built(Layers)
    eager, step = copy.deepcopy(model), moving(model, rows(), tier)
    output = step.runner(rows(1))
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    loss = squares(output)
    assert "could not be read from a file in" in told_by(loss)
    assert "could not be brought back before" in told_by(loss)
    monkeypatch.setattr(os, "preadv", read)
    del output, loss
    model.zero_grad()
    gc.collect()
    tier.close()  # what is still on its way is waited for
    assert tier.held_bytes == 0
    assert_same_training(train(model, [rows(2)], forward=step.runner), train(eager, [rows(2)]))


def test_within_hooks_of_the_user_s_nothing_moves_and_all_is_exact(tier):
    model = built(Layers)
    eager, step = copy.deepcopy(model), moving(model, rows(), tier)
    found = []
    for forward in (eager, step.runner):
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor + 0, lambda tensor: tensor):
            loss = squares(forward(rows(1)))
        loss.backward()
        found.append(loss.detach())
    assert torch.equal(*found)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
