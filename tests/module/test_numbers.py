"""Numbers and flags that change from call to call: each step is eager's, and few of them are planned."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rockmate.plan_files.reuse
from rkgb.replay.step_record import bitwise_equal
from rockmate import ReplanWarning, Rockmate

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning", "ignore::rkgb.TraceWarning")


class Scheduled(nn.Module):
    """Does with an argument and a setting what `use` says."""

    def __init__(self, use, setting=0.3):
        super().__init__()
        self.use = [use]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.drop = nn.Dropout(0.25)
        self.beta = setting

    def forward(self, x, t=1.5):
        for layer in self.layers:
            x = x + self.drop(layer(x))
        return self.use[0](self, x, t)


class Scale(torch.autograd.Function):
    """A function whose number belongs to its backward."""

    @staticmethod
    def forward(ctx, x, t):
        ctx.t = t
        return x * t

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.t, None


def loss_of(output):
    if isinstance(output, dict):
        output = output["x"]
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def step(module, x, values, seed):
    module.zero_grad()
    torch.manual_seed(seed)
    output = module(x, *values)
    loss_of(output).backward()
    tensors = [
        tensor for tensor in (output.values() if isinstance(output, dict) else [output]) if torch.is_tensor(tensor)
    ]
    plain = [part for part in output if not torch.is_tensor(part)] if isinstance(output, tuple) else type(output)
    return [*tensors, *(p.grad.clone() for p in module.parameters()), torch.get_rng_state()], plain


class LoweredPlan:
    """A planned module beside the same one trained eagerly, and how often it was planned and traced."""

    def __init__(self, monkeypatch, module, values):
        self.counts = {"make_plan": 0, "trace_model": 0}
        for name in self.counts:
            self.count(monkeypatch, name)
        torch.manual_seed(0)
        self.x = torch.randn(256, 16)
        self.eager = copy.deepcopy(module)
        self.planned = Rockmate(module, (self.x, *values), 0.8, loss=loss_of, solver="greedy", cache=False)
        self.module = module
        self.seed = 0
        assert self.planned.plan.recomputations

    def count(self, monkeypatch, name):
        function = getattr(rockmate.plan_files.reuse, name)

        def counted(*args, **kwargs):
            self.counts[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(rockmate.plan_files.reuse, name, counted)

    def train(self, *values):
        self.seed += 1
        found, plain = step(self.planned, self.x, values, self.seed)
        expected, expected_plain = step(self.eager, self.x, values, self.seed)
        assert all(map(bitwise_equal, found, expected)), values
        assert repr(plain) == repr(expected_plain)

    def set(self, change, value):
        for module in (self.module, self.eager):
            change(module, value)


# What is done with a number, its values, and how often at most the module is planned and traced for them.
FLOATS = (1.5, 1.7, 3.25, 2.5, 0.7, 0.6, 1.0, 7.5, 1.5)
COUNTS = (5, 6, 7, 30, 12, 13, 9, 1, 5)
ARGUMENTS = {
    "temperature": (lambda m, x, t: x / t, FLOATS, 1, 4),
    "weight": (lambda m, x, t: t * x + (1 - t) * x.exp(), FLOATS, 1, 5),
    "alpha": (lambda m, x, t: torch.add(x, x.tanh(), alpha=t), FLOATS, 1, 4),
    "power": (lambda m, x, t: (x.abs() + 1) ** t, FLOATS, 1, 4),
    "bound": (lambda m, x, t: x.clamp(max=t), FLOATS, 1, 4),
    "beta": (lambda m, x, t: F.softplus(x, t), FLOATS, 1, 4),
    "filled": (lambda m, x, t: x * torch.full((16,), t), FLOATS, 1, 4),
    "masked": (lambda m, x, t: x.masked_fill(x > 1, t), FLOATS, 1, 4),
    "rate": (lambda m, x, t: F.dropout(x, t), (0.1, 0.2, 0.3, 0.4, 0.15, 0.7, 0.1), 1, 3),
    "noise": (lambda m, x, t: x + t * torch.randn_like(x), FLOATS, 1, 4),
    "gumbel": (lambda m, x, t: F.gumbel_softmax(x, tau=t), FLOATS, 1, 4),
    "cosine": (lambda m, x, t: x * math.cos(t), FLOATS, 1, 9),
    "text": (lambda m, x, t: x * float(f"{t}"), FLOATS, 1, 9),
    "tensor": (lambda m, x, t: x * torch.tensor(t), FLOATS, 1, 9),
    "returned": (lambda m, x, t: (x * 2, t), FLOATS, 1, 9),
    "custom function": (lambda m, x, t: Scale.apply(x, t), FLOATS, 1, 9),
    "warm-up": (lambda m, x, t: x * min(1.0, t / 10), COUNTS, 2, 6),
    "branch": (lambda m, x, t: x.tanh() if t > 8 else x, COUNTS, 2, 5),
    "unused": (lambda m, x, t: x * 2, COUNTS, 1, 2),
    "unused but printed": (lambda m, x, t: (str(t), x)[1], COUNTS, 1, 9),
    "every other": (lambda m, x, t: x * (t % 2 + 1), COUNTS, 1, 9),
    "every tenth": (lambda m, x, t: x * (t // 10 + 0.5), COUNTS, 1, 9),
    "rounded": (lambda m, x, t: x * round(t / 10 + 1), COUNTS, 1, 9),
    "loop": (lambda m, x, t: sum(x * k for k in range(t)), (1, 2, 1, 3, 2), 3, 3),
    "slice": (lambda m, x, t: x[:, :t], (20, 17, 8, 20, 4), 4, 5),
    "position": (lambda m, x, t: x.roll(t, 1), COUNTS, 1, 9),
    "list": (lambda m, x, t: x * [0.5, 0.25, 2.0, 1.5][t], (0, 1, 2, 3, 1), 1, 5),
    "size": (lambda m, x, t: F.interpolate(x[None], scale_factor=t), (1.0, 1.01, 1.02, 2.0), 4, 4),
    "kind": (lambda m, x, t: x * t if isinstance(t, float) else x / t, (1.5, 1.7, 2, 3, 4.5), 2, 5),
    "not a number": (lambda m, x, t: x * t, (1.5, float("inf"), float("nan"), 2.5), 1, 4),
    "flag": (lambda m, x, t: {"x": x} if t else (x,), (True, False, True, False), 1, 2),
    "name": (lambda m, x, t: x.tanh() if t == "tanh" else x * 2, ("tanh", "none", "other", "tanh", "other"), 2, 3),
    "gradients on": (lambda m, x, t: x * 2 if torch.is_grad_enabled() and t > 8 else x, COUNTS, 2, 5),
}


QUICK = ("temperature", "every tenth", "branch", "rate of dropout")


def marked(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(ARGUMENTS))
@pytest.mark.ci
def test_an_argument_that_changes_is_exact_and_rarely_planned(name, monkeypatch):
    use, values, most_plans, most_traces = ARGUMENTS[name]
    both = LoweredPlan(monkeypatch, Scheduled(use), values[:1])
    for value in values:
        both.train(value)
    assert both.counts["make_plan"] <= most_plans
    assert both.counts["trace_model"] <= most_traces


def set_beta(module, value):
    module.beta = value


def set_rate(module, value):
    module.drop.p = value


SETTINGS = {
    "beta": (set_beta, lambda m, x, t: x * m.beta, (0.3, 0.31, 0.4, 0.9, 0.25, 0.3), 2),
    "schedule": (set_beta, lambda m, x, t: x * (0.5 ** (m.beta * 2)) * t, (0.3, 0.31, 0.4, 0.9, 0.25, 0.3), 2),
    "rate of dropout": (set_rate, lambda m, x, t: x, (0.25, 0.3, 0.2, 0.1, 0.6), 2),
    "no dropout": (set_rate, lambda m, x, t: x, (0.25, 0.3, 0.0, 0.2, 0.0), 3),
    "flag": (set_beta, lambda m, x, t: x.tanh() if m.beta else x, (True, False, True, False), 3),
    "text": (set_beta, lambda m, x, t: x.tanh() if m.beta == "tanh" else x, ("tanh", "exp", "tanh"), 3),
    "kept": (set_beta, lambda m, x, t: (setattr(m, "last", m.beta), x * m.beta)[1], (0.3, 0.31, 0.4), 3),
}


@pytest.mark.parametrize("name", marked(SETTINGS))
@pytest.mark.ci
def test_a_setting_that_changes_is_exact_and_rarely_planned(name, monkeypatch):
    change, use, values, most_traces = SETTINGS[name]
    both = LoweredPlan(monkeypatch, Scheduled(use), (1.5,))
    for value in values:
        both.set(change, value)
        both.train(1.5)
    assert both.counts["trace_model"] <= most_traces


@pytest.mark.ci
def test_two_numbers_that_change_together_and_then_apart_are_not_confused(monkeypatch):
    both = LoweredPlan(monkeypatch, Scheduled(lambda m, x, t: x * m.beta + x.tanh() / t, 1.5), (1.5,))
    for beta, temperature in ((1.5, 1.5), (1.75, 1.75), (1.25, 1.25), (1.25, 3.5), (4.5, 3.5), (4.25, 2.5)):
        both.set(set_beta, beta)
        both.train(temperature)
    assert both.counts["make_plan"] == 1


OTHERS = {
    "flag": (lambda m, x, t: {"x": x / t[0]} if t[1] else (x / t[0],), (True, False), 1, 5),
    "branch": (lambda m, x, t: x / t[0] if t[1] else x.tanh() * t[0], (True, False), 2, 5),
    "name": (lambda m, x, t: x * t[0] if t[1] == "a" else x / t[0] if t[1] == "b" else x, ("a", "b", "a", "c"), 3, 8),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.ci
def test_a_number_that_changes_in_every_call_beside_another_value_that_alternates(name, monkeypatch):
    use, others, most_plans, most_traces = OTHERS[name]
    both = LoweredPlan(monkeypatch, Scheduled(use), ((1.5, others[0]),))
    for index in range(12):
        both.train((1.5 + index / 7, others[index % len(others)]))
    assert both.counts["make_plan"] <= most_plans
    assert both.counts["trace_model"] <= most_traces


@pytest.mark.ci
def test_a_number_that_changes_in_every_call_beside_a_setting_that_alternates(monkeypatch):
    both = LoweredPlan(monkeypatch, Scheduled(lambda m, x, t: {"x": x / t} if m.beta else (x / t,), True), (1.5,))
    for index in range(12):
        both.set(set_beta, index % 2 == 0)
        both.train(1.5 + index / 7)
    assert both.counts == {"make_plan": 1, "trace_model": 4}


@pytest.mark.ci
def test_a_step_keeps_its_numbers_until_its_backward(monkeypatch):
    both = LoweredPlan(monkeypatch, Scheduled(lambda m, x, t: (x / t).exp() * m.beta), (1.5,))
    both.train(1.75)
    results = []
    for module in (both.planned, both.eager):
        module.zero_grad()
        torch.manual_seed(3)
        inner = both.module if module is both.planned else module
        inner.beta = 0.5
        first = module(both.x, 2.5)
        inner.beta = 0.75
        second = module(both.x, 4.5)
        inner.beta = 0.3
        loss_of(first).backward()
        loss_of(second).backward()
        results.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_a_thousand_values_are_planned_once_and_told_once(monkeypatch):
    both = LoweredPlan(monkeypatch, Scheduled(lambda m, x, t: x * (2.25 + t / 7) / m.beta), (3,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for epoch in range(3, 1003):
            both.planned(both.x, epoch)
    assert both.counts == {"make_plan": 1, "trace_model": 2}
    assert [one.category for one in told] == [ReplanWarning]


@pytest.mark.slow
def test_values_that_the_code_cannot_compute_with_are_kept_to_a_number(monkeypatch):
    both = LoweredPlan(monkeypatch, Scheduled(lambda m, x, t: x * math.cos(t)), (3,))
    for epoch in range(3, 103):
        both.planned(both.x, epoch)
    assert both.counts["make_plan"] == 1
    assert len(both.planned._family.members) <= 64


@pytest.mark.ci
def test_a_copy_computes_with_numbers_of_its_own(monkeypatch):
    both = LoweredPlan(monkeypatch, Scheduled(lambda m, x, t: x / t * m.beta), (1.5,))
    both.set(set_beta, 0.4)
    both.train(1.75)
    twin = copy.deepcopy(both.planned)
    both.set(set_beta, 0.6)
    both.train(2.5)
    both.planned, both.module = twin, None
    both.eager.beta = 0.4
    both.train(3.5)
    assert both.counts["make_plan"] == 1


@pytest.mark.ci
def test_a_whole_float_is_not_the_integer_that_it_equals(monkeypatch):
    both = LoweredPlan(monkeypatch, Scheduled(lambda m, x, t: x * (2 if isinstance(t, int) else 3)), (2,))
    for value in (2, 2.0, True, 2):
        both.train(value)
