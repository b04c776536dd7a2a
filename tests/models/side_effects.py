"""Modules that do more than compute: hooks, counters, other generators, compiled parts, global state.

`EFFECTS[name]` gives what may become of them and builds (module, sample); the culprit is called `inner`.
"""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.graph.programs import Program, linear, rows

EXACT, REFUSED, WARNED = "exact", "refused", "warned"
Effect = tuple[set[str], Callable[[], nn.Module]]


def around(inner: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(first=linear(), inner=inner, last=linear()))


def runs(function: Callable[..., Any], **parts: nn.Module | Tensor) -> Callable[[], nn.Module]:
    """A module whose `inner` runs `function`."""
    return lambda: around(Program(function, layer=linear(), **parts))


class Counting(nn.Module):
    """Counts its calls in Python; `used` says whether the count is a part of what it computes."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layer, self.calls, self.used = linear(), 0, used

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls if self.used else self.layer(x)


class Remembering(nn.Module):
    """Makes a constant when it is first called, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = linear(), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4).to(x.dtype).cos()
        return self.layer(x) * self.table


class LastOutput(nn.Module):
    """Keeps an activation as an attribute, from which the next call starts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = linear(), torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x) + 0.5 * self.last.detach()
        return self.last


class InstallingHooks(nn.Module):
    """Adds a hook to its layer when it is first called, as model libraries do to catch what layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.installed = linear(), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.installed = True
        return self.layer(x)


def seldom(draw: Callable[[], float]) -> Callable[..., Tensor]:
    """A layer that other random numbers skip, so seldom that no two runs show it."""
    return lambda m, x: x if draw() < 1e-9 else m.layer(x)


def hooked(register: str, hook: Callable[..., Any]) -> Callable[[], nn.Module]:
    """`inner` has a hook, registered by the method of that name."""

    def build() -> nn.Module:
        inner = linear()
        getattr(inner, register)(hook)
        return around(inner)

    return build


def hook_on_the_value(m, x):
    y = m.layer(x)
    y.register_hook(lambda gradient: 2 * gradient)
    return y.relu()


def watching_hook_on_the_value(m, x):
    y = m.layer(x)
    y.register_hook(lambda gradient: None)
    return y.relu()


def hook_on_the_node(m, x):
    y = m.layer(x)
    y.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))
    return y.relu()


def hook_on_a_parameter() -> nn.Module:
    """Such hooks live on the parameter, which every run shares."""
    inner = linear()
    inner.weight.register_hook(lambda gradient: 2 * gradient)
    return around(inner)


def fixed_noise(m, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return m.layer(x) + torch.randn_like(x)


def seeding(m, x):
    torch.manual_seed(3)
    return torch.dropout(m.layer(x), 0.5, True)


def without_gradient_ever_after(m, x):
    y = m.layer(x)
    torch.set_grad_enabled(False)
    return y * m.layer.weight[0]


def other_default_dtype(m, x):
    torch.set_default_dtype(torch.float64)
    try:
        return m.layer(x) * torch.ones(4).to(x.dtype) + (torch.arange(4) / 3).to(x.dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return around(Program(lambda m, x: m.layer(x) + torch.randn(3, 4, generator=generator), layer=linear()))


def reseeded_generator(m, x):
    return m.layer(x) + torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def slope_of(m, x):
    points = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(m.layer(points).sigmoid().sum(), points, create_graph=True)
    return m.layer(x) + slope.square().mean()


def module_global() -> nn.Module:
    calls: list[int] = []
    return around(Program(lambda m, x: (calls.append(1), m.layer(x) * len(calls))[1], layer=linear()))


def scripted(make: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with warnings.catch_warnings():  # torch would like its own compiler for scripts to be gone
            warnings.simplefilter("ignore", DeprecationWarning)
            return around(make(linear()))

    return build


def through_data(m, x):
    y = m.layer(x)
    y.data.mul_(2)
    return y * 3


def saved_by_hooks(m, x):
    """A user's own packing of saved tensors, which changes what the backward reads."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return m.layer(x).exp()


EFFECTS: dict[str, Effect] = {
    "scripted_submodule": ({REFUSED}, scripted(torch.jit.script)),
    "traced_submodule": ({REFUSED}, scripted(lambda layer: torch.jit.trace(layer, rows()))),
    "compiled_submodule": ({EXACT, REFUSED}, lambda: around(torch.compile(linear(), backend="eager"))),
    "compiled_by_aot": ({EXACT, REFUSED}, lambda: around(torch.compile(linear(), backend="aot_eager"))),
    "hook_on_a_value": ({REFUSED, WARNED}, runs(hook_on_the_value)),
    "watching_hook_on_a_value": ({REFUSED, WARNED}, runs(watching_hook_on_the_value)),
    "hook_on_a_node": ({REFUSED, WARNED}, runs(hook_on_the_node)),
    "hook_on_a_parameter": ({EXACT}, hook_on_a_parameter),
    "changing_forward_hook": ({EXACT, WARNED}, hooked("register_forward_hook", lambda m, args, output: output * 2)),
    "changing_pre_hook": ({EXACT, WARNED}, hooked("register_forward_pre_hook", lambda m, args: (args[0] * 2,))),
    "watching_forward_hook": ({WARNED}, hooked("register_forward_hook", lambda m, args, output: None)),
    "watching_pre_hook": ({WARNED}, hooked("register_forward_pre_hook", lambda m, args: None)),
    "backward_hook": ({REFUSED}, hooked("register_full_backward_hook", lambda m, gradients, of_outputs: None)),
    "backward_pre_hook": ({REFUSED}, hooked("register_full_backward_pre_hook", lambda m, of_outputs: None)),
    "unused_counter": ({EXACT}, lambda: around(Counting(used=False))),
    "used_counter": ({WARNED}, lambda: around(Counting(used=True))),
    "lazy_constant": ({EXACT, WARNED}, lambda: around(Remembering())),
    "hooks_of_its_own": ({EXACT, WARNED}, lambda: around(InstallingHooks())),
    "state_in_an_attribute": ({WARNED}, lambda: around(LastOutput())),
    "python_random": ({REFUSED, WARNED}, runs(seldom(random.random))),
    "numpy_random": ({REFUSED, WARNED}, runs(seldom(lambda: float(np.random.random())))),
    "python_random_factor": ({REFUSED, WARNED}, runs(lambda m, x: m.layer(x) * random.random())),
    "seed_in_a_fork": ({EXACT, REFUSED}, runs(fixed_noise)),
    "seed_in_forward": ({EXACT, REFUSED}, runs(seeding)),
    "generator_of_its_own": ({EXACT}, own_generator),
    "generator_seeded_in_forward": ({REFUSED}, runs(reseeded_generator)),
    "gradients_switched_off": ({EXACT, REFUSED}, runs(without_gradient_ever_after)),
    "default_dtype": ({EXACT, REFUSED}, runs(other_default_dtype)),
    "counter_outside": ({REFUSED}, module_global),
    "sparse_gradient": (
        {REFUSED},
        runs(lambda m, x: m.e((x > 0).long()).mean((1, 2))[:, None] + x, e=nn.Embedding(2, 4, sparse=True)),
    ),
    "gradient_of_a_gradient": ({EXACT, REFUSED}, runs(slope_of)),
    "write_through_data": ({EXACT, REFUSED}, runs(through_data)),
    "saved_tensors_hooks": ({REFUSED, WARNED}, runs(saved_by_hooks)),
}
