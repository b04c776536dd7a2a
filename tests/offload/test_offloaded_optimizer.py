"""Optimizers whose state rests: the bits of the optimizer's own steps, its surface, the window, and faults."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from rockmate import PeakMemory, Rockmate
from rockmate.errors import OffloadError, OptimizerError
from rockmate.offload import file_tier
from rockmate.offload.file_tier import FileTier
from rockmate.resting.optimizer import OffloadedOptimizer
from rockmate.resting.tensors import RestingTensors
from tests.offload.lora import LoraModel, batch, next_token_loss

WIDTH = 160
WEIGHT_BYTES = 4 * WIDTH * WIDTH
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.fixture
def tier(tmp_path):
    made = FileTier(tmp_path)
    yield made
    made.close()


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def train(model, optimizer, steps=4, first=0, scheduler=None):
    for step in range(first, first + steps):
        data = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def same_state(one, other):
    """Parameters and optimizer state of both."""
    for group, twin in zip(one.param_groups, other.param_groups, strict=True):
        for parameter, its_twin in zip(group["params"], twin["params"], strict=True):
            assert torch.equal(parameter, its_twin)
            state, twins = one.state[parameter], other.state[its_twin]
            assert state.keys() == twins.keys()
            for name, value in state.items():
                assert torch.equal(value, twins[name]) if isinstance(value, torch.Tensor) else value == twins[name]


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_optimizers_to_the_bit(tier, name, in_backward):
    model, eager = network(), network()
    optimizer = OffloadedOptimizer(OPTIMIZERS[name](model.parameters()), tier, in_backward=in_backward)
    plain = OPTIMIZERS[name](eager.parameters())
    train(model, optimizer, 4, 0, CosineAnnealingLR(optimizer, 4))
    train(eager, plain, 4, 0, CosineAnnealingLR(plain, 4))
    assert optimizer.resting.held_bytes <= optimizer.resting.window_bytes
    same_state(plain, optimizer)


def test_all_state_is_here_within_the_window(tier):
    model = network()
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), tier)
    train(model, optimizer)
    assert optimizer.resting.all_bytes == 8 * WEIGHT_BYTES
    assert optimizer.resting.most_held_bytes <= optimizer.resting.window_bytes < 6.1 * WEIGHT_BYTES
    data = torch.randn(3, WIDTH)
    model(data).square().mean().backward()
    optimizer.resting.empty()
    small_bytes = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.nbytes < 1 << 16
    )
    assert optimizer.resting.held_bytes == 0
    assert small_bytes < 0.05 * optimizer.resting.all_bytes
    with PeakMemory() as memory:
        optimizer.step()
    assert memory.peak_bytes <= optimizer.resting.window_bytes + 3 * WEIGHT_BYTES  # and what the step computes with


def test_gradients_go_within_the_backward(tier):
    model = network()
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), tier, in_backward=True)
    train(model, optimizer, 2)
    assert all(parameter.grad is None for parameter in model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.close()
    data = torch.randn(3, WIDTH)
    model(data).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert optimizer.resting.all_bytes == 0


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "backward"])
def test_states_are_saved_and_loaded(tier, in_backward):
    model, eager = network(), network()
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), tier, in_backward=in_backward)
    plain = torch.optim.AdamW(eager.parameters())
    train(model, optimizer), train(eager, plain)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = torch.optim.AdamW(eager.parameters())
    again.load_state_dict(copy.deepcopy(loaded))
    same_state(plain, again)
    optimizer.load_state_dict(loaded)
    del loaded
    gc.collect()
    train(model, optimizer, 2, 4), train(eager, again, 2, 4)
    same_state(again, optimizer)
    assert optimizer.resting.held_bytes <= optimizer.resting.window_bytes
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.AdamW
        same_state(again, twin)


def test_it_has_the_optimizers_surface(tier):
    model = network()
    inner = torch.optim.AdamW(model[0].parameters(), lr=0.5)
    optimizer = OffloadedOptimizer(inner, tier)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.25})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    assert optimizer.step(lambda: model(torch.randn(3, WIDTH)).square().mean()) > 0
    assert called == ["before", "after"]  # once for all parameters
    assert "AdamW" in repr(optimizer)
    optimizer.param_groups[0]["lr"] = 0.125
    assert inner.param_groups[0]["lr"] == 0.125
    assert optimizer.defaults is inner.defaults
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(3, WIDTH)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_what_does_not_treat_parameters_one_by_one_is_refused(tier):
    model = network()
    with pytest.raises(OptimizerError, match="by itself"):
        OffloadedOptimizer(torch.optim.LBFGS(model.parameters()), tier)

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    optimizer = OffloadedOptimizer(Counting(model.parameters(), lr=0.1), tier)
    with pytest.raises(OptimizerError, match="count of a group"):
        train(model, optimizer, 1)


def test_a_scaler_is_refused_where_steps_are_in_the_backward(tier):
    model = network()
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), tier, in_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(3, WIDTH)).square().mean()).backward()
    with pytest.raises(OptimizerError, match="GradScaler"):
        scaler.step(optimizer)


def test_a_state_that_cannot_be_read_is_told_and_is_not_lost(tier, monkeypatch):
    model, eager = network(), network()
    optimizer, plain = (
        OffloadedOptimizer(torch.optim.AdamW(model.parameters()), tier),
        torch.optim.AdamW(eager.parameters()),
    )
    train(model, optimizer, 1), train(eager, plain, 1)
    optimizer.resting.empty()

    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(file_tier.ScratchFile, "read", fails)
        with pytest.raises(OffloadError, match="could not be read"):
            optimizer.step()
    model.load_state_dict(eager.state_dict())
    same_state(plain, optimizer)
    train(model, optimizer, 2, 1), train(eager, plain, 2, 1)
    same_state(plain, optimizer)


def test_all_of_training_rests(tier, tmp_path):
    """Parameters that train, their state, and gradients that go at once: under a plan, to the bit."""

    def whole():
        torch.manual_seed(0)
        return LoraModel(layers=2).requires_grad_(True)

    eager, model = whole(), whole()
    planned = Rockmate(model, batch(), 0.99, cache=False, plan_in_background=False, time_limit=0.5)
    weights, other = RestingTensors(FileTier(tmp_path), 500_000), FileTier(tmp_path)
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), other, in_backward=True)
    weights.take(model.parameters())
    plain = torch.optim.AdamW(eager.parameters(), lr=0.01)
    weights.most_held_bytes = 0
    for step in range(4):
        for module, one in ((eager, plain), (planned, optimizer)):
            torch.manual_seed(step)
            one.zero_grad()
            next_token_loss(module(batch(step)), batch(step)).backward()
            one.step()
    assert weights.most_held_bytes <= 500_000 < weights.all_bytes
    same_state(plain, optimizer)
    weights.tier.close(), other.close()
