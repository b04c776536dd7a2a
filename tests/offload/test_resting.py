"""Parameters that rest in a second memory: steps to the bit, the window, and whoever else wants their values."""

import contextlib
import copy
import gc
import io
import os
import pickle
import threading
import time

import pytest
import torch
from torch import nn

from rockmate import PeakMemory, Rockmate
from rockmate.errors import OffloadError, ReplanWarning
from rockmate.offload import file_tier
from rockmate.offload.file_tier import FileTier
from rockmate.resting.tensor import rested_of
from rockmate.resting.tensors import RestingTensors
from tests.offload.lora import LoraModel, batch, frozen, next_token_loss, trained

CPU = torch.device("cpu")
WINDOW_BYTES = 700_000  # the largest weight has 307,200 bytes, all 1,7 MB


@pytest.fixture
def tier(tmp_path):
    made = FileTier(tmp_path)
    yield made
    made.close()


def lora(seed=0):
    torch.manual_seed(seed)
    return LoraModel()


def planned(budget=0.99):
    model = lora()
    return Rockmate(model, batch(), budget, cache=False, plan_in_background=False, time_limit=0.5)


@pytest.fixture(scope="module")
def plan_once():
    return planned()


@pytest.fixture
def model(plan_once):
    return copy.deepcopy(plan_once)


def resting_in(model, tier):
    owner = RestingTensors(tier, WINDOW_BYTES)
    owner.take(frozen(model))
    owner.most_held_bytes = 0
    return owner


@pytest.fixture
def resting(model, tier):
    return resting_in(model, tier)


def train(module, steps=3, optimizer=None, first=0):
    optimizer = optimizer or torch.optim.AdamW(trained(module), lr=0.01)
    losses = []
    for step in range(first, first + steps):
        tokens = batch(step)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = next_token_loss(module(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in trained(module)), *trained(module), *frozen(module)]


def same(found, wanted):
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


# ---- steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.99, 0.6], ids=["kept", "recomputed"])
def test_steps_are_eagers_to_the_bit_within_the_window(tier, budget):
    model = planned(budget)
    resting = resting_in(model, tier)
    assert resting.all_bytes > 1_600_000
    eager = lora()
    same(train(model), train(eager))
    resting.most_held_bytes = 0
    same(train(model, first=3), train(eager, first=3))
    assert resting.most_held_bytes <= WINDOW_BYTES
    assert resting.sent_bytes >= resting.all_bytes
    assert not model.fallbacks
    assert "step.reads(" in model.code


def test_what_nobody_writes_is_sent_once(model, resting):
    for step in range(3):
        torch.manual_seed(step)
        next_token_loss(model(batch(step)), batch(step)).backward()
    assert resting.sent_bytes == resting.all_bytes
    assert resting.most_held_bytes <= WINDOW_BYTES


def test_the_window_is_all_that_is_here(model, resting):
    train(model)
    resting.empty()
    assert resting.held_bytes == 0
    assert all(parameter.untyped_storage().nbytes() for parameter in trained(model))
    tokens = batch()
    with PeakMemory(CPU) as with_window:
        next_token_loss(model(tokens), tokens).backward()
    for parameter in trained(model):
        parameter.grad = None
    resting.wake_all()
    with PeakMemory(CPU) as alone:
        next_token_loss(model(tokens), tokens).backward()
    more_bytes = with_window.peak_bytes - alone.peak_bytes
    assert 0 <= more_bytes <= WINDOW_BYTES


def test_a_window_smaller_than_a_weight_takes_one_operation_at_a_time(model, tier):
    owner = RestingTensors(tier, 1)
    owner.take(frozen(model))
    owner.most_held_bytes = 0
    same(train(model), train(lora()))
    assert owner.most_held_bytes <= 2 * 307_200


def test_several_backwards_and_none(model, resting):
    eager, tokens = lora(), batch()
    for module in (model, eager):
        torch.manual_seed(1)
        module(tokens)  # no backward comes
        torch.manual_seed(2)
        loss = next_token_loss(module(tokens), tokens)
        loss.backward(retain_graph=True)
        loss.backward()
    same([p.grad for p in trained(model)], [p.grad for p in trained(eager)])


def test_calls_of_other_sizes_are_planned_while_weights_rest(model, resting):
    eager, tokens = lora(), batch(3, length=17)
    for module in (model, eager):
        torch.manual_seed(0)
        with pytest.warns(ReplanWarning) if module is model else contextlib.nullcontext():
            next_token_loss(module(tokens), tokens).backward()
    same([p.grad for p in trained(model)], [p.grad for p in trained(eager)])
    assert all(rested_of(parameter) for parameter in frozen(model) if parameter.nbytes > 1 << 16)
    assert resting.held_bytes <= WINDOW_BYTES


def test_a_functional_call_has_its_own_weights(model, resting):
    eager, tokens = lora(), batch()
    others = {name: value.detach() * 0.5 for name, value in eager.named_parameters() if "wide" in name}
    for module in (model, eager):
        torch.manual_seed(0)
        output = torch.func.functional_call(module, others, (tokens,))
        next_token_loss(output, tokens).backward()
    same([p.grad for p in trained(model)], [p.grad for p in trained(eager)])


def test_a_weight_written_before_the_backward_is_told(model, resting):
    tokens = batch()
    loss = next_token_loss(model(tokens), tokens)
    with torch.no_grad():
        model.blocks[1].wide.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        loss.backward()


# ---- whoever else wants their values -------------------------------------------------------------------------


def test_everybody_sees_the_values(model, resting):
    eager, tokens = lora().eval(), batch()
    train(model, 1)
    train(eager.train(), 1)
    assert resting.held_bytes < resting.all_bytes
    model.eval(), eager.eval()
    assert torch.equal(model(tokens), eager(tokens))
    with torch.inference_mode():
        assert torch.equal(model(tokens), eager(tokens))
    with torch.no_grad():
        assert torch.equal(model(tokens), eager(tokens))
    assert resting.held_bytes <= WINDOW_BYTES
    for name, value in model.state_dict().items():
        assert torch.equal(value, eager.state_dict()[name])
    weight, wanted = model.blocks[0].wide.weight, eager.blocks[0].wide.weight
    assert weight.tolist() == wanted.tolist()
    assert str(weight) == str(wanted)
    assert (weight.numpy() == wanted.numpy()).all()
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == wanted.shape


def test_copies_and_files_are_ordinary(model, resting):
    eager = lora()
    train(model, 1), train(eager, 1)
    file = io.BytesIO()
    torch.save(model.original, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), copy.deepcopy(model.original), torch.load(file, weights_only=False),
                 pickle.loads(pickle.dumps(model.original)), pickle.loads(pickle.dumps(model))):  # fmt: skip
        assert all(type(parameter) is nn.Parameter for parameter in twin.parameters())
        same(list(twin.parameters()), list(eager.parameters()))
    same(train(copy.deepcopy(model), first=1), train(eager, first=1))


WRITES = [
    lambda p: p.mul_(1.5),
    lambda p: p.data.mul_(0.5),
    lambda p: p.detach()[:5].mul_(1.5),
    lambda p: torch._foreach_mul_([p], 0.5),
    lambda p: p.copy_(p.clone() * 1.5),
    lambda p: torch.mul(p, 0.5, out=p),
    lambda p: setattr(p, "data", p.data * 1.5),
    lambda p: p.numpy().__imul__(0.5),
    lambda p: p.untyped_storage().copy_(torch.full_like(p, 0.01).untyped_storage()),
    lambda p: nn.init.constant_(p, 0.02),
]


def test_no_write_is_lost(model, resting):
    eager = lora()
    for write in WRITES:
        with torch.no_grad():
            for module in (model, eager):
                for parameter in frozen(module):
                    write(parameter)
        same(train(model, 1), train(eager, 1))


def test_a_state_that_is_loaded_rests(model, resting):
    eager, state = lora(), lora(1).state_dict()
    model.load_state_dict(state), eager.load_state_dict(state)
    del state
    same(train(model), train(eager))
    assert resting.held_bytes <= WINDOW_BYTES


def test_what_others_hold_stays_until_they_let_go(model, resting):
    state = model.state_dict()
    train(model, 1)
    assert resting.held_bytes == resting.all_bytes
    for name, value in lora().state_dict().items():
        if "base" in name:
            assert torch.equal(state[name], value)
    with torch.no_grad():
        state["blocks.1.wide.weight"].mul_(2)  # as of any module, its own are written
    del state, value
    eager = lora()
    train(eager, 1)
    with torch.no_grad():
        eager.blocks[1].wide.weight.mul_(2)
    same(train(model, first=1), train(eager, first=1))
    assert resting.held_bytes <= WINDOW_BYTES


def test_what_begins_to_train_or_has_another_type_rests_no_more(model, resting):
    weight = model.blocks[0].wide.weight
    weight.requires_grad_(True)
    assert type(weight) is nn.Parameter
    model.blocks[0].narrow.requires_grad_(True)
    assert type(model.blocks[0].narrow.weight) is nn.Parameter
    eager = lora()
    eager.blocks[0].wide.weight.requires_grad_(True)
    eager.blocks[0].narrow.requires_grad_(True)
    with pytest.warns(ReplanWarning, match="requires_grad"):
        same(train(model, 1), train(eager, 1))
    model.original.double()
    assert resting.all_bytes == 0
    same(list(model.parameters()), list(eager.double().parameters()))


def test_what_goes_to_another_device_rests_no_more(model, resting):
    model.original.to("meta")
    assert resting.all_bytes == resting.tier.held_bytes == 0
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())


def test_what_shares_a_storage_does_not_rest(tier):
    whole = torch.randn(2, 40_000)
    views = [nn.Parameter(part, requires_grad=False) for part in whole]
    small = nn.Parameter(torch.randn(10), requires_grad=False)
    owner = RestingTensors(tier, 0)
    owner.take([*views, small])
    assert owner.all_bytes == 0


def test_waking_ends_it(model, resting):
    resting.wake_all()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert resting.held_bytes == resting.tier.held_bytes == 0
    same(train(model), train(lora()))
    assert "step.reads(" not in model.code


def test_nothing_is_left_of_a_model_that_is_gone(tier):
    model = lora()
    owner = RestingTensors(tier, WINDOW_BYTES)
    owner.take(frozen(model))
    assert tier.held_bytes == owner.all_bytes > 0
    del model
    gc.collect()
    tier.close()  # which waits for what is on its way
    assert tier.held_bytes == owner.all_bytes == owner.held_bytes == 0


# ---- faults --------------------------------------------------------------------------------------------------


def test_a_full_second_memory_leaves_all_as_it_was(tmp_path):
    model, tier = lora(), FileTier(tmp_path, limit_bytes=400_000)
    owner = RestingTensors(tier, 0)
    with pytest.raises(OffloadError, match="limit"):
        owner.take(frozen(model))
    same(list(model.parameters()), list(lora().parameters()))
    owner.wake_all()
    assert tier.held_bytes == 0
    tier.close()


def test_a_weight_that_cannot_be_read_is_told_and_comes_when_it_can(model, resting, monkeypatch):
    train(model, 1)
    fails = [True]
    read = file_tier.ScratchFile.read

    def sometimes(self, *args):
        if fails[0]:
            raise OSError(5, "Input/output error")
        read(self, *args)

    monkeypatch.setattr(file_tier.ScratchFile, "read", sometimes)
    with pytest.raises(OffloadError, match="could not be read"):
        train(model, 1)
    fails[0] = False
    eager = lora()
    train(eager, 1)
    same(list(model.parameters()), list(eager.parameters()))
    same(train(model, 2, first=1), train(eager, 2, first=1))


def test_a_write_that_cannot_be_stored_is_not_lost(model, resting, monkeypatch):
    with torch.no_grad():
        for parameter in frozen(model):
            parameter.add_(1)
    write = file_tier.ScratchFile.write
    full = [True]

    def sometimes(self, *args):
        if full[0]:
            raise OSError(28, "No space left on device")
        write(self, *args)

    monkeypatch.setattr(file_tier.ScratchFile, "write", sometimes)

    def write_all():
        with torch.no_grad():
            for parameter in frozen(model):
                parameter.add_(1)
        train(model, 1)

    with pytest.raises(OffloadError, match="disk is full"):
        write_all()
    full[0] = False
    eager = lora()
    with torch.no_grad():
        for parameter in frozen(eager):
            parameter.add_(1)
    written = [torch.equal(one, other) for one, other in zip(frozen(model), frozen(eager), strict=True)]
    with torch.no_grad():
        for parameter, is_once in zip(frozen(eager), written, strict=True):
            parameter.add_(0 if is_once else 1)
    same(train(model), train(eager))


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_an_interrupted_step_leaves_the_model_usable(model, resting, at):
    class Interrupt(BaseException):
        pass

    def raising(*_):
        raise Interrupt

    hooked = model.original.blocks[2].norm if at == "forward" else trained(model)[2]
    hook = (hooked.register_forward_pre_hook if at == "forward" else hooked.register_hook)(raising)
    if at == "forward":
        model.original.eval(), model.eval()
    with pytest.raises(Interrupt):
        next_token_loss(model(batch()), batch()).backward()
    hook.remove()
    model.train()
    model.zero_grad()
    same(train(model), train(lora()))
    assert resting.held_bytes <= WINDOW_BYTES


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has none")
@pytest.mark.parametrize("way", ["write", "read"])
def test_a_process_that_came_of_a_fork_has_them(model, resting, monkeypatch, way):
    """Also those that are on their way then: its threads stay behind."""
    moves, parent = getattr(file_tier.ScratchFile, way), os.getpid()

    def slowly(*arguments):
        if os.getpid() == parent:
            time.sleep(0.05)
        moves(*arguments)

    train(model, 1)
    monkeypatch.setattr(file_tier.ScratchFile, way, slowly)
    with torch.no_grad():
        for parameter in frozen(model):
            parameter.add_(0)
    resting.written(frozen(model))
    train(model, 1)
    wanted = lora().blocks[2].narrow.weight.sum().item()
    child = os.fork()
    if child == 0:
        os._exit(0 if model.blocks[2].narrow.weight.sum().item() == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert model.blocks[2].narrow.weight.sum().item() == wanted


def test_threads_read_at_once(model, resting):
    eager, tokens = lora().eval(), batch()
    model.eval()
    wanted, wrong = eager(tokens), []

    def read():
        for _ in range(5):
            with torch.no_grad():
                if not torch.equal(model(tokens), wanted):
                    wrong.append(1)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
