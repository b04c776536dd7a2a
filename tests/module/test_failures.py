"""After an exception anywhere in a step the module is as usable, and as exact, as before."""

import gc
import traceback

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.devices.allocation_log import AllocationLog
from rkgb.devices.registry import device_of
from rockmate.runtime.step import Step
from tests.module.models import WIDTH, Layers, Normalised, built, images, rows
from tests.module.steps import assert_trains_exactly, recomputing, squares
from tests.where import here, placed, random_stream


class Interruption(Exception):
    """Raised by these tests."""


class Failing(TorchDispatchMode):
    """The third linear layer fails."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.addmm.default
        if self.count == 3:
            raise Interruption
        return function(*args, **(kwargs or {}))


def test_a_failure_in_the_forward_leaves_the_module_usable(layers):
    with pytest.raises(Interruption), Failing():
        layers(rows(1))
    assert_trains_exactly(layers, [rows(1), rows(2)])


def test_the_random_stream_after_a_failed_recomputation_is_that_of_before(monkeypatch):
    few = rows(1)[:64]  # their masks are drawn again, not read
    layers = recomputing(built(Layers), few)
    loss = squares(layers(few))
    stream = random_stream()
    right = Step.rewind

    def rewind(step, *args, **kwargs):
        right(step, *args, **kwargs)
        raise Interruption

    with monkeypatch.context() as patch:
        patch.setattr(Step, "rewind", rewind)
        with pytest.raises(Interruption):
            loss.backward()
    assert torch.equal(random_stream(), stream)


@pytest.mark.parametrize("nth", [0, 1, 4])
@pytest.mark.parametrize("method", ["fill", "run", "take"])
@pytest.mark.parametrize(("make", "batch"), [(Layers, rows), (Normalised, images)], ids=["layers", "normalised"])
def test_a_failure_in_a_recomputation_leaves_the_module_usable(make, batch, method, nth, monkeypatch):
    model = recomputing(built(make), batch())
    right, calls = getattr(Step, method), []

    def failing(step, *args, **kwargs):
        calls.append(method)
        if len(calls) > nth:
            raise Interruption
        return right(step, *args, **kwargs)

    loss = squares(model(batch(1)))
    with monkeypatch.context() as patch:
        patch.setattr(Step, method, failing)
        with pytest.raises(Interruption):
            loss.backward()
    del loss
    model.zero_grad()
    assert torch.is_grad_enabled()
    assert_trains_exactly(model, [batch(1), batch(2)])


def test_a_retained_graph_may_be_walked_after_a_failed_recomputation(layers, monkeypatch):
    torch.manual_seed(5)
    loss = squares(layers(rows(1)))
    with monkeypatch.context() as patch:
        patch.setattr(Step, "fill", lambda *_: (_ for _ in ()).throw(Interruption))
        with pytest.raises(Interruption):
            loss.backward(retain_graph=True)
    layers.zero_grad()
    loss.backward()
    found = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    torch.manual_seed(5)
    squares(layers.original(rows(1))).backward()
    assert all(torch.equal(p.grad, other) for p, other in zip(layers.parameters(), found, strict=True))


def test_a_failure_of_a_hook_in_the_backward_leaves_the_module_usable(layers):
    def fail(_):
        raise Interruption

    handle = layers.layers[1].weight.register_hook(fail)
    with pytest.raises(Interruption):
        squares(layers(rows(1))).backward()
    handle.remove()
    layers.zero_grad()
    assert_trains_exactly(layers, [rows(1), rows(2)])


def test_failures_leak_nothing(layers, monkeypatch):
    """Once the exception is gone, so is all that the failed step held."""
    squares(layers(rows(1))).backward()
    layers.zero_grad()

    def failed_step():
        with monkeypatch.context() as patch:
            patch.setattr(Step, "fill", lambda *_: (_ for _ in ()).throw(Interruption))
            with pytest.raises(Interruption):
                squares(layers(rows(1))).backward()
        layers.zero_grad()

    failed_step()
    gc.collect()
    with AllocationLog(here()) as log:
        for _ in range(3):
            failed_step()
        device_of(here()).await_backwards()  # an accelerator's thread lets go of a failed step a moment later
        gc.collect()  # the exceptions' tracebacks are cycles of their own
    assert sum(event.size_bytes for event in log.events) == 0


# ---- tracebacks --------------------------------------------------------------------------------------


def test_an_operation_that_fails_shows_its_generated_line(layers):
    with pytest.raises(Interruption) as failure, Failing():
        layers(rows(1))
    text = "".join(traceback.format_exception(failure.value))
    line = next(line.strip() for line in text.splitlines() if "linear" in line and "layers_2.weight" in line)
    assert line in layers.code
    assert 'File "<rockmate ' in text


def test_a_recomputation_that_fails_shows_its_generated_line(layers, monkeypatch):
    monkeypatch.setattr(Step, "fill", lambda *_: (_ for _ in ()).throw(Interruption))
    with pytest.raises(Interruption) as failure:
        squares(layers(rows(1))).backward()
    text = "".join(traceback.format_exception(failure.value))
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith("step.fill("))
    assert line in layers.code
    assert "in recompute_" in text


def test_a_loss_that_is_no_number_is_eager_s_business(layers):
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        layers(rows(1)).backward()
    assert_trains_exactly(layers, [rows(1)])


def test_an_unused_forward_does_no_harm(layers):
    layers(rows(1))
    assert_trains_exactly(layers, [rows(1), rows(2)])


def test_a_module_of_modules_may_fail_in_the_loss():
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model = recomputing(placed(network), rows())
    output = model(rows(1))
    with pytest.raises(RuntimeError):
        (output @ torch.zeros(3, 3)).sum().backward()
    del output
    assert_trains_exactly(model, [rows(1)])
