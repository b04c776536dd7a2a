"""Which plain values a forward reads, and that a change of one of them is seen."""

import copy
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rkgb import make_sample
from rockmate import ReplanWarning, Rockmate
from rockmate.guards.attributes import BoundSettings, Settings
from rockmate.plan_files.reuse import plan_or_reuse
from tests.models.factories import tokens
from tests.models.hugging_face import gpt2


class TinyConfig(SimpleNamespace):
    """Where models keep their flags."""


class Steered(nn.Module):
    """Reads values of many kinds; some it sets itself, some it never reads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.config = TinyConfig(double=False, comment="never read")
        self.scale = 2
        self.adapters = ["one"]
        self.activation = torch.relu
        self.calls = 0
        self.comment = "never read"

    def forward(self, x):
        self.calls += 1
        x = self.activation(self.drop(self.layer(x))) * self.scale
        for _ in self.adapters:
            x = x + 1
        return x * 2 if self.config.double else x


def bound(module: nn.Module, sample: object) -> BoundSettings:
    return Settings.read_by(module, make_sample(module, sample)).bound_to(module)


def set_rate(module):
    module.drop.p = 0.2


def set_flag(module):
    module.config.double = True


def set_scale_of_another_type(module):
    module.scale = 2.0


def grow_list(module):
    module.adapters.append("two")


def set_function(module):
    module.activation = torch.tanh


def replace_forward(module):
    module.layer.forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (set_rate, "drop.p is 0.2, but was 0.1"),
        (set_flag, "config.double is True, but was False"),
        (set_scale_of_another_type, "scale is 2.0, but was 2"),
        (grow_list, "adapters is ['one', 'two'], but was ['one']"),
        (set_function, "activation is _VariableFunctionsClass.tanh, but was _VariableFunctionsClass.relu"),
        (replace_forward, "layer.forward is "),
    ],
)
def test_a_value_that_the_forward_reads_is_compared(change, named):
    module = Steered()
    settings = bound(module, torch.randn(2, 4))
    assert settings.difference() is None
    change(module)
    difference = settings.difference()
    assert difference is not None
    assert named in difference


def test_what_the_forward_sets_itself_or_never_reads_may_change():
    module = Steered()
    settings = bound(module, torch.randn(2, 4))
    assert module.calls == 0
    module(torch.randn(2, 4))
    module.comment = module.config.comment = "changed"
    module.added = 1
    module.eval()
    assert settings.difference() is None


def test_watching_leaves_the_module_the_random_numbers_and_pytorch_as_they_were():
    module, reading = Steered(), nn.Module.__getattribute__
    before, values = torch.get_rng_state(), copy.deepcopy(vars(module.config))
    bound(module, torch.randn(0, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert vars(module.config) == values
    assert "__getattribute__" not in vars(TinyConfig)
    assert nn.Module.__getattribute__ is reading


def test_settings_hold_for_a_copy_of_the_module():
    module = Steered()
    settings = Settings.read_by(module, make_sample(module, torch.randn(2, 4)))
    twin = copy.deepcopy(module)
    on_twin = settings.bound_to(twin)
    module.config.double = True
    assert on_twin.difference() is None
    twin.drop.p = 0.5
    assert on_twin.difference() is not None


class Switched(nn.Module):
    """Its only layer has no part in the output while a switch is off."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.on = True

    def forward(self, x):
        return torch.tanh(self.layer(x)) * 2 if self.on else torch.tanh(x) * 2


@pytest.mark.ci
def test_calls_that_train_nothing_are_run_by_the_module_itself_and_traced_but_once(monkeypatch):
    model, x = Switched(), torch.randn(64, 32)
    planned = Rockmate(model, budget=1.0)
    traced = []
    monkeypatch.setattr(
        "rockmate.calls.specializations.plan_by_faster_kernels",
        lambda *given: traced.append(1) or plan_or_reuse(*given),
    )
    model.on = False
    for _ in range(3):
        assert torch.equal(planned(x), torch.tanh(x) * 2)
    assert len(traced) == 1
    model.on = True
    assert planned(x).requires_grad, "the switch is seen"
    model.requires_grad_(False)
    for _ in range(3):
        assert not planned(x).requires_grad
    assert (len(traced), len(planned.plans)) == (3, 1)
    x.requires_grad_()
    with pytest.warns(ReplanWarning):
        assert planned(x).requires_grad, "a gradient reaches the input"


def test_settings_of_a_transformer_are_compared_in_no_time():
    module = gpt2()
    settings = bound(module, {"input_ids": tokens(2, 16), "labels": tokens(2, 16)})
    start_s = time.process_time()
    assert settings.difference() is None
    assert time.process_time() - start_s < 0.05
    module.config.use_cache = False
    assert settings.difference() == "config.use_cache is False, but was True when the module was planned"
    module.config.use_cache = True
    module.transformer.h[1].attn.attn_dropout.p = 0.3
    assert "transformer.h.1.attn.attn_dropout.p is 0.3" in (settings.difference() or "")
